"""Choose the integer nodes of a graph, the clamps that quantizers absorb, and the activations that get a scale."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from onnxq.config.scheme import Granularity, Method, QuantSpec
from onnxq.errors import SchemeError
from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Tensor,
    Variable,
    all_graphs,
    is_constant,
    optional_input,
    owner_graphs,
    producer,
)
from onnxq.numerics.formats import format_named
from onnxq.ops import Role, facts_of
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Activation
from onnxq.runtime.targets import Target

Item = TypeVar("Item", bound=Hashable)


@dataclass
class Groups(Generic[Item]):
    """Disjoint groups (union-find), each with its first item as representative. An item starts as a group of its own.

    >>> groups = Groups[str]()
    >>> groups.join("a", "b")
    >>> groups.find("b"), groups.find("c")
    ('a', 'c')
    """

    parent: dict[Item, Item] = field(default_factory=dict)

    def find(self, item: Item) -> Item:
        """Return the representative of the group of ``item``."""
        root = item
        while self.parent.get(root, root) is not root:
            root = self.parent[root]
        while self.parent.get(item, item) is not root:
            self.parent[item], item = root, self.parent[item]
        return root

    def join(self, first: Item, second: Item) -> None:
        """Merge the group of ``second`` into that of ``first``, whose representative stays."""
        self.parent[self.find(second)] = self.find(first)


# Islands of integer nodes, and the clamps that their quantizers absorb.

Limits = tuple[float, float]
UNLIMITED: Limits = (-math.inf, math.inf)

NO_KERNEL_IN_FRONT = "a clamp is fused only into the output of an integer kernel, and none comes before it"
"""Why a clamp stays if the node before it stays in float."""

NOT_QUANTIZED_BEHIND = "a clamp is fused only into the input of an integer kernel, and none reads its output"
"""Why a clamp stays if the nodes after it stay in float."""


def absorbed_clamps(obstacles: Mapping[Node, str]) -> dict[Node, Node]:
    """Map each clamp that a quantizer can replace to the node before it, of which the clamp is the only consumer.

    Args:
        obstacles: of each clamp, see `clamp_obstacles`.
    """
    makers = {clamp: producer(clamp.inputs[0]) for clamp, why in obstacles.items() if not why}
    return {clamp: maker for clamp, maker in makers.items() if maker is not None}


def clamp_obstacles(graph: Graph, specs: Mapping[Node, QuantSpec], target: Target) -> dict[Node, str]:
    """Return for each clamp why no quantizer can replace it, or an empty string.

    The clamp and the node before it must be in the same graph, because a runtime does not fuse across subgraphs.

    Args:
        graph: the graph, subgraphs included.
        specs: the requested activation spec of each node that may become an integer kernel.
        target: the runtime.
    """
    homes = owner_graphs(graph)
    returned = {tensor for scope in all_graphs(graph) for tensor in scope.outputs}

    def why(clamp: Node) -> str:
        source, limits = clamp.inputs[0], clamp_limits(clamp)
        maker = producer(source)
        if limits is None:
            return f"the limits of {clamp.op} are computed at run time"
        if limits[0] != 0.0:
            return f"{target.name} has no integer kernel for {clamp.op}, and only clamps that start at 0 can be fused"
        if (
            maker is None
            or maker not in specs
            or homes[maker] is not homes[clamp]
            or not _ends_in_quantized(maker, target)
        ):
            return NO_KERNEL_IN_FRONT
        if specs[maker].symmetric:
            return "a symmetric range does not start at 0, where it clamps"
        if len(source.outputs) != 1 or source in returned:
            return "other nodes also read its input"
        return ""

    fused = target.kernels.fused.clamps
    return {node: why(node) for node in homes if node.op in fused and not node.domain and node in specs}


def _ends_in_quantized(node: Node, target: Target) -> bool:
    return facts_of(node).role in (Role.COMPUTE, Role.ARITHMETIC) and node.op in target.kernels.fused.ops


def clamp_limits(clamp: Node) -> Limits | None:
    """Return the lower and upper limit of a clamp, or None if they are computed at run time."""
    if clamp.op == "Relu":
        return 0.0, math.inf
    limits = list(UNLIMITED)
    for index in range(2):
        bound = optional_input(clamp, 1 + index)
        if bound is None:
            continue
        if not is_constant(bound) or bound.nbytes == 0:
            return None
        limits[index] = float(bound.values.reshape(-1)[0])
    return limits[0], limits[1]


def integer_nodes(
    graph: Graph, obstacles: Mapping[Node, str], absorbed: Mapping[Node, Node], target: Target
) -> set[Node]:
    """Return the largest set of integer nodes in which pass-through and arithmetic nodes have integer neighbours.

    All producers of these nodes must be integer nodes, and at least one consumer. Quantized values enter subgraphs,
    which read tensors of outer graphs. They do not leave subgraphs, nor pass through loop-carried values.
    """
    nodes = list(owner_graphs(graph))
    integer = {node for node in nodes if node not in obstacles and node not in absorbed}
    pending = [node for node in nodes if node in integer]
    while pending:
        node = pending.pop()
        if node not in integer or facts_of(node).role is Role.COMPUTE:
            continue
        before, behind = _before(node, absorbed), _behind(node, absorbed)
        if (
            all(neighbour in integer and neighbour.op not in target.kernels.fused.float_output for neighbour in before)
            and len(before) == sum(not isinstance(tensor, Constant) for tensor in data_inputs(node))
            and any(neighbour in integer for neighbour in behind)
        ):
            continue
        integer.discard(node)
        pending.extend((*before, *behind))
    return integer


def _before(node: Node, absorbed: Mapping[Node, Node]) -> list[Node]:
    producers = (producer(tensor) for tensor in data_inputs(node))
    return [absorbed.get(maker, maker) for maker in producers if maker is not None]


def _behind(node: Node, absorbed: Mapping[Node, Node]) -> list[Node]:
    return [consumer for tensor in quantized_outputs(node, absorbed) for consumer in tensor.outputs]


def quantized_outputs(node: Node, absorbed: Mapping[Node, Node]) -> list[Variable]:
    """Return the outputs that hold quantized values: the output of the clamp if one is absorbed."""
    tensors = []
    for tensor in node.outputs:
        clamp = tensor.outputs[0] if len(tensor.outputs) == 1 else None
        tensors.append(clamp.outputs[0] if clamp is not None and absorbed.get(clamp) is node else tensor)
    return tensors


# Activations that get a scale, and the groups that share one.

# onnxruntime moves a DequantizeLinear behind these nodes.
_MOVED_BEHIND = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def check_activation_spec(spec: QuantSpec, target: Target) -> None:
    """Check that integer kernels accept activations of this spec.

    Raises:
        SchemeError: they do not.
    """
    formats = ("int8", "uint8", "int16", "uint16") if target.reads.wide else ("int8", "uint8")
    if not spec.format.startswith(formats) or spec.granularity is not Granularity.TENSOR:
        raise SchemeError(
            f"activations as {spec.format} per {spec.granularity} have no integer kernel on {target.name}; "
            f"use {', '.join(formats)} per tensor"
        )
    if not isinstance(spec.method, Method):
        raise SchemeError(
            f"method {spec.method!r} quantizes weights only; leave it out here, and set ranges at the top of the scheme"
        )


def plan_activations(
    graph: Graph, integer: set[Node], absorbed: Mapping[Node, Node], specs: Mapping[Node, QuantSpec], target: Target
) -> tuple[Activation, ...]:
    """Return the tensors that get a scale, in graph order, with the groups that share one.

    Args:
        graph: the graph, subgraphs included.
        integer: its nodes that run as integer kernels.
        absorbed: clamps that a quantizer may replace, with the node before each.
        specs: the requested activation spec of each integer node.
        target: the runtime.
    """
    activations: dict[Tensor, Activation] = {}
    limits: dict[Variable, Limits | None] = {}
    groups = Groups[Tensor]()
    for node in owner_graphs(graph):
        if node not in integer:
            continue
        spec = specs[node]
        inputs = data_inputs(node)
        outputs = [] if node.op in target.kernels.fused.float_output else quantized_outputs(node, absorbed)
        if node.op in target.kernels.fused.either_output:
            outputs = [tensor for tensor in outputs if _all_read_quantized(tensor, integer)]
        for tensor in inputs:
            if isinstance(tensor, Constant):
                activations.setdefault(tensor, _stored(tensor, spec))
            else:
                activations.setdefault(tensor, _computed(tensor, spec, target))
        for tensor in outputs:
            entry = activations.get(tensor, _computed(tensor, spec, target))
            activations[tensor] = replace(entry, every_consumer=True)
        for tensor in outputs:
            limits[tensor] = _limits(tensor, absorbed)
        if facts_of(node).moves:
            moved = (tensor for tensor in inputs if isinstance(tensor, Variable))
            _share_one_scale(tuple(moved), outputs, limits, groups)
    _quantize_for_bodies(graph, activations, groups)
    return tuple(replace(activation, group=groups.find(tensor).name) for tensor, activation in activations.items())


def _quantize_for_bodies(graph: Graph, activations: dict[Tensor, Activation], groups: Groups[Tensor]) -> None:
    # onnxruntime moves a DequantizeLinear behind some float nodes, and aborts if a subgraph reads their outputs.
    # Quantize these outputs again, with the same scale.
    homes = owner_graphs(graph)
    moved: dict[Tensor, Tensor] = {}
    for node, home in homes.items():
        source = node.inputs[0] if node.op in _MOVED_BEHIND and not node.domain and node.inputs else None
        if source is None or (output := node.outputs[0]) in activations:
            continue
        activation = activations.get(source)
        origin = source if activation is not None and activation.every_consumer else moved.get(source)
        if origin is None:
            continue
        if all(homes[reader] is home for reader in output.outputs):
            moved[output] = origin
        else:
            activations[output] = replace(activations[origin], tensor=output.name, every_consumer=True)
            groups.join(origin, output)


def _all_read_quantized(tensor: Variable, integer: set[Node]) -> bool:
    return not tensor.graph_output_of and all(reader in integer for reader in tensor.outputs)


def _limits(tensor: Variable, absorbed: Mapping[Node, Node]) -> Limits | None:
    # The quantization range must end at these limits, because no other node clamps the values.
    maker = producer(tensor)
    if maker is not None and maker.op == "HardSigmoid":
        return 0.0, 1.0
    return clamp_limits(maker) if maker is not None and maker in absorbed else None


def _share_one_scale(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    limits: dict[Variable, Limits | None],
    groups: Groups[Tensor],
) -> None:
    # A clamp is absorbed only if the range of the quantizer after it ends at its limits. So an input with a tighter
    # clamp than the widest keeps its own scale where a Concat mixes it with others.
    ranges = [limits.get(tensor) or UNLIMITED for tensor in inputs]
    widest = min(low for low, _ in ranges), max(high for _, high in ranges)
    limits.update(dict.fromkeys(outputs, widest))
    alike = [tensor for tensor, limit in zip(inputs, ranges, strict=True) if limit == widest]
    for tensor in (*alike, *outputs):
        groups.join((alike or outputs)[0], tensor)


def _stored(tensor: Constant, spec: QuantSpec) -> Activation:
    values = tensor.values
    # Observers of other toolkits treat constants differently from activations with a fixed range.
    plain = replace(spec, method=Method.MINMAX)
    return Activation(tensor.name, plain, tensor.name, (float(values.min()), float(values.max())))


def _computed(tensor: Variable, spec: QuantSpec, target: Target) -> Activation:
    maker = producer(tensor)
    fixed = facts_of(maker).fixed_range if maker is not None else None
    if fixed is not None and target.kernels.wide and maker is not None and maker.op in _BINARY:
        fixed = _binary_range(fixed, spec)
    return Activation(tensor.name, spec, tensor.name, fixed)


_BINARY = frozenset({"Sigmoid", "Tanh"})
_WIDE_BITS = 16


def is_wide(spec: QuantSpec) -> bool:
    """Return whether quantized values of a spec have 16 bits."""
    return format_named(spec.format).bits == _WIDE_BITS


def _binary_range(fixed: tuple[float, float], spec: QuantSpec) -> tuple[float, float]:
    """Return a range without its last step, so that a scale of 16 bits is a power of two."""
    if not is_wide(spec):
        return fixed
    format, (low, high) = format_named(spec.format), fixed
    if not format.signed:
        return low, high - (high - low) * 2.0**-_WIDE_BITS
    # Signed values have no zero point, as onnxruntime's quantizer writes them for QNN.
    step, middle = 2.0 ** (1 - _WIDE_BITS), 0.0 if not spec.symmetric else (format.maximum + format.minimum) / 2
    return (format.minimum - middle) * step, (format.maximum - middle) * step
