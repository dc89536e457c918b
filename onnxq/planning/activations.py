"""Activations that get a scale: which tensors of an island pass through a quantizer, and which share one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxq.config.scheme import Granularity, Method, Spec
from onnxq.errors import SchemeError
from onnxq.ir import Constant, Graph, Node, Tensor, Variable, owner_graphs, producer
from onnxq.ops import operator_of
from onnxq.planning.groups import Groups
from onnxq.planning.islands import UNLIMITED, Limits, clamp_limits, quantized_outputs
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Activation
from onnxq.runtime.targets import Target

# Nodes that onnxruntime moves a DequantizeLinear behind.
_MOVED_BEHIND = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def check_activation_spec(spec: Spec, target: Target) -> None:
    """Check that integer kernels take data as a rule or a plan wants it.

    Raises:
        SchemeError: they do not.
    """
    if not spec.format.startswith(("int8", "uint8")) or spec.per is not Granularity.TENSOR:
        raise SchemeError(
            f"activations as {spec.format} per {spec.per} have no integer kernel on {target.name}; "
            "use uint8 or int8 per tensor"
        )
    if not isinstance(spec.method, Method):
        raise SchemeError(
            f"method {spec.method!r} is an encoder of weights, and the scales of activations are found by a range "
            "method; leave it out, and say ranges where the scheme begins"
        )


def plan_activations(
    graph: Graph, integer: set[Node], absorbed: Mapping[Node, Node], specs: Mapping[Node, Spec], target: Target
) -> tuple[Activation, ...]:
    """Return the tensors of a graph that get a scale, in graph order, and which of them share one.

    Args:
        graph: the graph, bodies included.
        integer: its nodes that run as integer kernels.
        absorbed: clamps that a quantizer may stand for, with the node in front of each.
        specs: the wanted activation spec of each integer node.
        target: the runtime.
    """
    found: dict[Tensor, Activation] = {}
    limits: dict[Variable, Limits | None] = {}
    groups = Groups[Tensor]()
    for node in owner_graphs(graph):
        if node not in integer:
            continue
        spec = specs[node]
        inputs = data_inputs(node)
        outputs = [] if node.op in target.kernels.fused.float_output else quantized_outputs(node, absorbed)
        if node.op in target.kernels.fused.either_output:
            outputs = [tensor for tensor in outputs if _all_want_codes(tensor, integer)]
        for tensor in inputs:
            if isinstance(tensor, Constant):
                found.setdefault(tensor, _stored(tensor, spec))
            else:
                found.setdefault(tensor, Activation(tensor.name, spec, tensor.name, _fixed_range(tensor)))
        for tensor in outputs:
            known = found.get(tensor, Activation(tensor.name, spec, tensor.name, _fixed_range(tensor)))
            found[tensor] = replace(known, every_consumer=True)
        for tensor in outputs:
            limits[tensor] = _limits(tensor, absorbed)
        operator = operator_of(node)
        if operator is not None and operator.moves:
            moved = (tensor for tensor in inputs if isinstance(tensor, Variable))
            _share_one_scale(tuple(moved), outputs, limits, groups)
    _quantize_for_bodies(graph, found, groups)
    return tuple(replace(activation, group=groups.find(tensor).name) for tensor, activation in found.items())


def _quantize_for_bodies(graph: Graph, found: dict[Tensor, Activation], groups: Groups[Tensor]) -> None:
    """Quantize again, with the same scale, what nodes in float move from a DequantizeLinear to a body.

    onnxruntime moves a DequantizeLinear behind such nodes, and aborts where a body reads what they give.
    """
    homes = owner_graphs(graph)
    moved: dict[Tensor, Tensor] = {}
    for node, home in homes.items():
        source = node.inputs[0] if node.op in _MOVED_BEHIND and not node.domain and node.inputs else None
        if source is None or (made := node.outputs[0]) in found:
            continue
        known = found.get(source)
        origin = source if known is not None and known.every_consumer else moved.get(source)
        if origin is None:
            continue
        if all(homes[reader] is home for reader in made.outputs):
            moved[made] = origin
        else:
            found[made] = replace(found[origin], tensor=made.name, every_consumer=True)
            groups.join(origin, made)


def _all_want_codes(tensor: Variable, integer: set[Node]) -> bool:
    return not tensor.returned_by and all(reader in integer for reader in tensor.outputs)


def _limits(tensor: Variable, absorbed: Mapping[Node, Node]) -> Limits | None:
    """Return where the codes of a tensor have to end because nothing else clamps its values."""
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
    """Join the tensors of a carrier, except inputs whose clamp is tighter than what the carrier lets through.

    A clamp vanishes only when the range of the quantizer behind it ends where the clamp does, so what is clamped
    keeps its own scale where a Concat mixes it with what is not.
    """
    found = [limits.get(tensor) or UNLIMITED for tensor in inputs]
    widest = min(low for low, _ in found), max(high for _, high in found)
    limits.update(dict.fromkeys(outputs, widest))
    alike = [tensor for tensor, limit in zip(inputs, found, strict=True) if limit == widest]
    for tensor in (*alike, *outputs):
        groups.join((alike or outputs)[0], tensor)


def _stored(tensor: Constant, spec: Spec) -> Activation:
    """Return a constant as codes, whose range is that of its values."""
    values = tensor.values
    # What observers of other toolkits make of ranges that are fixed is not what they make of constants.
    plain = replace(spec, method=Method.MINMAX)
    return Activation(tensor.name, plain, tensor.name, (float(values.min()), float(values.max())))


def _fixed_range(tensor: Variable) -> tuple[float, float] | None:
    maker = producer(tensor)
    operator = operator_of(maker) if maker is not None else None
    return operator.fixed_range if operator else None
