"""Node times: the runtime's own profile, traced back to the nodes of the prepared model."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from onnxq.config.scheme import Mode
from onnxq.ir import Graph, Node, all_graphs
from onnxq.ops import Role, operator_of
from onnxq.planning.activations import Groups
from onnxq.planning.plan import DECODING, Plan
from onnxq.runtime.kernels import Kernel

# Suffixes that the runtime appends to the names of nodes that replace others.
_RENAMED = re.compile(
    r"(_token_\d+|_nchwc|/duplicated|/MatMulAddFusion|/QuickGeluFusion/|/WithoutBiases|/Dequantization(Subtract|Multiply))+$"
)
# Suffixes of the Q/DQ nodes that the runtime adds, behind the name of their tensor.
_ADDED = re.compile(r"(_d?q)+$")
_CODERS = frozenset({"DequantizeLinear", "FakeQuantize", "QuantizeLinear", "Sum"})
_REORDERS = frozenset({"Reorder", "ReorderInput", "ReorderOutput"})
_LAYOUTS = _REORDERS | {"Transpose"}
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class NodeTimes:
    """Times of a run by nodes and tensors of the prepared model, in nanoseconds.

    Attributes:
        nodes: by node; a fused kernel counts at the node that holds a weight.
        borders: time of QuantizeLinear, DequantizeLinear and changes of layout, by tensor.
        elements: number of output elements of each node that runs.
        rest: time of kernels that could not be traced to a node.
    """

    nodes: Mapping[str, float]
    borders: Mapping[str, float]
    elements: Mapping[str, float]
    rest: float

    @property
    def total(self) -> float:
        """The time of all kernels."""
        return sum(self.nodes.values()) + sum(self.borders.values()) + self.rest


UNTIMED = NodeTimes(MappingProxyType({}), MappingProxyType({}), MappingProxyType({}), 0.0)
"""No times are known."""


def kernels_by_node(kernels: Sequence[Kernel], graph: Graph) -> Mapping[str, tuple[Kernel, ...]]:
    """Return the kernels that bear a node's name or make its outputs, by node name.

    Kernels that only change the layout of data are left out. `graph` is the graph before the runtime optimized it.
    """
    everywhere = [node for scope in all_graphs(graph) for node in scope.nodes]
    makers = {tensor.name: node.name for node in everywhere for tensor in node.outputs if tensor.name}
    names = {node.name for node in everywhere}
    kernels_of: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        name = _RENAMED.sub("", kernel.name)
        maker = next((makers[tensor] for tensor in (*kernel.outputs, name) if tensor in makers), None)
        # A kernel that quantizes the output of a node bears the name of that node.
        node = name if name in names else maker
        if node is not None and kernel.op_type not in _REORDERS:
            kernels_of[node].append(kernel)
    return {name: tuple(own) for name, own in kernels_of.items()}


def trace_kernels(kernels: Sequence[Kernel], graph: Graph, quantized: Mapping[str, str] = _NOTHING) -> NodeTimes:
    """Trace kernels back to the nodes and tensors that they stand for.

    - A kernel stands for the node whose output it makes, or whose name it bears.
    - It also stands for all nodes before it without a kernel: these were fused into it, or removed.
    - A kernel without either, such as a Gelu made from a formula, stands for the last node behind its input without a
      kernel.

    `kernels` are those of `graph`, or of a model built from it. `quantized` has the tensor that each Q/DQ node stands
    for; see `quantized_tensors`.
    """
    everywhere = [node for scope in all_graphs(graph) for node in scope.nodes]
    makers = [(tensor.name, node) for node in everywhere for tensor in node.outputs if tensor.name]
    makers_of = Counter(name for name, _ in makers)
    # Bodies may have tensors of the same name; their nodes have names of their own.
    by_tensor = {name: node for name, node in makers if makers_of[name] == 1}
    by_name = {node.name: node for node in everywhere}
    order = {node: index for index, node in enumerate(everywhere)}
    tensors = {*by_tensor, *(tensor.name for scope in all_graphs(graph) for tensor in scope.inputs)}
    nodes: dict[Node, float] = defaultdict(float)
    elements: dict[Node, float] = {}
    borders: dict[str, float] = defaultdict(float)
    # The tensor of the prepared model that a tensor of the running graph is another form of.
    alias: dict[str, str] = {}
    # Dynamically quantized tensors, with the time of that and the nodes that share them.
    quantize_times: dict[str, float] = {}
    sharing: dict[str, list[Node]] = defaultdict(list)
    rest = 0.0
    stands_for = [_stands_for(kernel, by_tensor, by_name, order) for kernel in kernels]
    running = {node for node in stands_for if node is not None}
    for kernel, node in zip(kernels, stands_for, strict=True):
        border = _border(kernel, quantized, tensors)
        sources = (alias.get(tensor, tensor) for tensor in kernel.inputs)
        source = next((tensor for tensor in sources if tensor in tensors), "")
        if border is None and node is None and kernel.op_type in _LAYOUTS:
            border = source or None
        if border is not None:
            borders[border] += kernel.nanoseconds
            alias.update(dict.fromkeys(kernel.outputs, border))
        elif node is None and kernel.op_type == "DynamicQuantizeLinear" and kernel.outputs:
            quantize_times[kernel.outputs[0]] = kernel.nanoseconds
        elif (node := node or _last_behind(by_tensor.get(source), running, order)) is None:
            rest += kernel.nanoseconds
        else:
            nodes[node] += kernel.nanoseconds
            elements[node] = kernel.elements
            alias.update(dict.fromkeys(kernel.outputs, node.outputs[0].name))
            for tensor in quantize_times.keys() & set(kernel.inputs):
                sharing[tensor].append(node)
    for tensor, time in quantize_times.items():
        for node in sharing[tensor]:
            nodes[node] += time / len(sharing[tensor])
        rest += 0.0 if sharing[tensor] else time
    holders = _holders(everywhere, nodes.keys())
    return NodeTimes(_spread(nodes, holders), dict(borders), _sizes(elements, holders), rest)


def _spread(nodes: Mapping[Node, float], holders: Mapping[Node, Sequence[Node]]) -> dict[str, float]:
    """Divide the time of each kernel among the nodes with weights that were fused into it."""
    times: dict[str, float] = defaultdict(float)
    for node, time in nodes.items():
        fused = holders.get(node, [node])
        for part in fused:
            times[part.name] += time / len(fused)
    return dict(times)


def _sizes(elements: Mapping[Node, float], holders: Mapping[Node, Sequence[Node]]) -> dict[str, float]:
    """Return the output elements by node; nodes that were fused into another have those of its kernel."""
    sizes = {node.name: size for node, size in elements.items()}
    for node, fused in holders.items():
        sizes.update({part.name: elements[node] for part in fused if part.name not in sizes})
    return sizes


def _stands_for(
    kernel: Kernel, by_tensor: Mapping[str, Node], by_name: Mapping[str, Node], order: Mapping[Node, int]
) -> Node | None:
    """Return the node whose output a kernel makes (the last of several), or whose name it bears."""
    name = _RENAMED.sub("", kernel.name)
    makers = [by_tensor.get(tensor) or by_name.get(_RENAMED.sub("", tensor)) for tensor in kernel.outputs]
    node = max((maker for maker in makers if maker is not None), key=order.__getitem__, default=None)
    return node or by_tensor.get(name) or by_name.get(name)


def _last_behind(maker: Node | None, running: Set[Node], order: Mapping[Node, int]) -> Node | None:
    """Return the last of the nodes behind `maker`, reached through nodes that no kernel stands for."""
    pending, seen = [maker] if maker is not None else [], set[Node]()
    while pending:
        behind = {reader for tensor in pending.pop().outputs for reader in tensor.outputs if reader in order}
        pending += (new := behind - running - seen)
        seen |= new
    return max(seen, key=order.__getitem__, default=None)


def _border(kernel: Kernel, quantized: Mapping[str, str], tensors: Set[str]) -> str | None:
    """Return the tensor that a kernel quantizes or dequantizes; None if it does something else."""
    if kernel.op_type not in _CODERS:
        return None
    name = _RENAMED.sub("", kernel.name)
    if name in quantized:
        return quantized[name]
    base = _ADDED.sub("", name)
    return quantized.get(base, base if base in tensors else None) if base != name else None


def _holders(everywhere: Sequence[Node], running: Iterable[Node]) -> Mapping[Node, list[Node]]:
    """Map a running node to the nodes with weights that were fused into it, including itself."""
    run = set(running)
    stands_in: dict[Node, Node] = {node: node for node in run}
    for node in reversed(everywhere):
        if node not in run:
            consumers = [
                stands_in[consumer] for tensor in node.outputs for consumer in tensor.outputs if consumer in stands_in
            ]
            if consumers:
                stands_in[node] = consumers[0]
    holders: dict[Node, list[Node]] = defaultdict(list)
    for node in everywhere:
        if node in stands_in and _weighs(node):
            holders[stands_in[node]].append(node)
    return holders


def _weighs(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.role in (Role.COMPUTE, Role.WEIGHTED)


# Regions of integer nodes in a finished plan, and their times beside the same nodes in float


@dataclass(frozen=True)
class Region:
    """Integer nodes that pass quantized values to one another, or a single integer node among floats.

    Attributes:
        first: the region's first node.
        nodes: number of nodes.
        float_milliseconds: time of these nodes in the float model.
        milliseconds: time of the integer nodes and the region's boundaries; shared boundaries count in equal parts.
    """

    first: str
    nodes: int
    mode: Mode
    float_milliseconds: float
    milliseconds: float


@dataclass(frozen=True)
class NodeTime:
    """The time of a node in the float model and in the plan's model.

    Attributes:
        float_milliseconds: 0 if the node was fused into another.
        milliseconds: time in the plan's model, without its boundaries.
    """

    node: str
    float_milliseconds: float
    milliseconds: float


def node_times(plan: Plan, floats: NodeTimes, integers: NodeTimes) -> tuple[NodeTime, ...]:
    """Return the times of a plan's nodes in order, for nodes that ran in at least one of the two models."""
    return tuple(
        NodeTime(name, floats.nodes.get(name, 0.0) / 1e6, integers.nodes.get(name, 0.0) / 1e6)
        for name in (decision.node for decision in plan.decisions)
        if name in floats.nodes or name in integers.nodes
    )


def find_regions(graph: Graph, plan: Plan, floats: NodeTimes, integers: NodeTimes) -> tuple[Region, ...]:
    """Return the regions of a plan, longest float time first."""
    modes = {decision.node: decision.mode for decision in plan.decisions if decision.mode in DECODING}
    integer = [node for scope in all_graphs(graph) for node in scope.nodes if node.name in modes]
    groups = Groups[str]()
    tensors: dict[str, set[str]] = {}
    for node in integer:
        tensors[node.name] = {tensor.name for tensor in (*node.inputs, *node.outputs)}
        readers = (reader for tensor in node.outputs for reader in tensor.outputs)
        for reader in readers:
            if modes[node.name] is modes.get(reader.name) is Mode.STATIC:
                groups.join(node.name, reader.name)
    members: dict[str, list[str]] = {}
    for node in integer:
        members.setdefault(groups.find(node.name), []).append(node.name)
    touched = {first: set().union(*(tensors[name] for name in names)) for first, names in members.items()}
    sharing = Counter(tensor for region in touched.values() for tensor in region)
    regions = []
    for first, names in members.items():
        time = sum(integers.nodes.get(name, 0.0) for name in names)
        time += sum(integers.borders.get(tensor, 0.0) / sharing[tensor] for tensor in touched[first])
        before = sum(floats.nodes.get(name, 0.0) for name in names)
        regions.append(Region(names[0], len(names), modes[names[0]], before / 1e6, time / 1e6))
    return tuple(sorted(regions, key=lambda region: -region.float_milliseconds))
