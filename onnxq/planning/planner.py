"""Plan a graph for a scheme and a target: the mode of each node, shared scales, and means for bias correction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from onnx import TensorProto

from onnxq.config.scheme import Mode, QuantSpec, Rule, Scheme
from onnxq.ir import (
    Graph,
    Node,
    Variable,
    all_nodes,
    is_constant,
    onnx_dtype,
    optional_input,
    producer,
)
from onnxq.lowering import AllowedOps
from onnxq.numerics.formats import format_named
from onnxq.ops import Role, facts_of
from onnxq.planning.activations import (
    NO_KERNEL_IN_FRONT,
    NOT_QUANTIZED_BEHIND,
    absorbed_clamps,
    check_activation_spec,
    clamp_obstacles,
    integer_nodes,
    is_wide,
    plan_activations,
)
from onnxq.planning.experts import is_moe
from onnxq.planning.given import with_given_ranges, with_given_scales
from onnxq.planning.obstacles import (
    body_obstacles,
    dynamic_obstacle,
    obstacle,
    quantization_obstacle,
    scales_its_terms,
    volume,
)
from onnxq.planning.plan import EXCLUDED, Activation, Decision, Demotion, Mean, Plan, Weight
from onnxq.planning.weights import (
    check_weight_spec,
    decide_weights,
    is_large_table,
    lacking_weight,
    readable,
    weight_at,
    weight_spec,
    with_pairs,
    with_second_layouts,
)
from onnxq.runtime.targets import Target

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_WEIGHT = 1


def with_corrections(graph: Graph, decisions: Iterable[Decision]) -> Iterator[Decision]:
    """Yield the decisions, with `mean` set on those whose bias can be corrected.

    Args:
        graph: the prepared graph; only its main graph has channel means.
        decisions: for its nodes.
    """
    nodes = {node.name: node for node in graph.nodes}
    axes: dict[str, int] = {}
    for decision in decisions:
        node = nodes.get(decision.node)
        mean = _mean(node, decision) if node is not None else None
        # A tensor has channel means along one axis only.
        fits = mean is not None and axes.setdefault(mean.tensor, mean.axis) == mean.axis
        yield replace(decision, mean=mean) if fits else decision


def _mean(node: Node, decision: Decision) -> Mean | None:
    weight = next((weight for weight in decision.weights if weight.index == _WEIGHT), None)
    if weight is None or weight.spec.is_followed or bias_of(node) is None:
        return None
    axis = facts_of(node).channels
    assert axis is not None, "only a product whose channels are known has a bias to correct"
    return Mean(node.inputs[0].name, axis)


def bias_of(node: Node) -> tuple[Node, int] | None:
    """Return the node and the input of the constant bias of a compute node; None if it can have no bias.

    The bias is an input of a Gemm or convolution, or the constant of an Add after a MatMul. A convolution may still
    lack it.

    >>> from onnxq.ir import constant
    >>> import numpy as np
    >>> weight, bias = constant("w", np.ones((2, 3), np.float32)), constant("b", np.ones(3, np.float32))
    >>> data = Variable("x", np.dtype(np.float32), [1, 2])
    >>> bias_of(Node("Gemm", "g", {}, [data, weight, bias], [Variable("y")]))[1]
    2
    """
    operator = facts_of(node)
    if operator.channels is None or len(node.inputs) <= _WEIGHT or scales_its_terms(node):
        return None
    data, weight = node.inputs[:2]
    if not isinstance(data, Variable) or not is_constant(weight):
        return None
    if onnx_dtype(data) not in _FLOATS or onnx_dtype(weight) not in _FLOATS:
        return None
    # MatMul has no bias input.
    added = _added(node) if operator.bias is None and len(weight.shape) == 2 else None
    place = added if operator.bias is None else (node, operator.bias)
    bias = optional_input(*place) if place else None
    if place and bias is None and not operator.product:
        return place
    if not is_constant(bias) or onnx_dtype(bias) not in _FLOATS:
        return None
    channels = weight.shape[operator.weights[_WEIGHT].channels(node)]
    if node.op == "ConvTranspose":
        # Its weight has the output channels of one group.
        channels *= node.attrs.get("group", 1)
    return place if bias.shape and bias.shape[-1] == channels == volume(bias.shape) else None


def _added(node: Node) -> tuple[Node, int] | None:
    output = node.outputs[0]
    # The product may also be a graph output, which is allowed.
    reader = output.outputs[0] if len(output.outputs) == 1 else None
    if reader is None or reader.op != "Add" or reader.domain:
        return None
    index = 1 if reader.inputs[0] is output else 0
    return (reader, index) if is_constant(reader.inputs[index]) else None


# The plan.


def make_plan(
    graph: Graph,
    scheme: Scheme,
    target: Target,
    demotions: Mapping[str, Demotion] | None = None,
    emit: AllowedOps = AllowedOps.QDQ,
) -> Plan:
    """Choose a mode for every node of a prepared graph.

    - A node becomes static if the scheme requests it and the target has an integer kernel for it. An operator that only
      passes values through also needs an integer node before and after it, so that no QuantizeLinear and
      DequantizeLinear stand alone.
    - An LSTM has no static kernel. It becomes dynamic if operators of the runtime may be written.
    - Any other node with large constant weights keeps them quantized.

    Args:
        graph: with unique node names and inferred types.
        scheme: the user's rules.
        target: the runtime.
        demotions: modes of nodes that deviate from the scheme, by name.
        emit: operators that the written model may contain.

    Raises:
        SchemeError: a pattern of the scheme matches nothing, or a spec has no integer kernel on the target.
    """
    nodes = list(all_nodes(graph))
    _check_patterns(scheme, nodes)
    wishes = {node: _wish(scheme, node, demotions or {}) for _, node in nodes}
    _check_specs({wish.rule for wish in wishes.values()}, target)

    specs = {node: _activation_spec(wish.rule, target) for node, wish in wishes.items() if wish.mode is Mode.STATIC}
    absorbed = absorbed_clamps(clamps := clamp_obstacles(graph, specs, target))
    in_bodies = body_obstacles(graph, target)
    obstacles: dict[Node, str] = {}
    for scope, node in nodes:
        problem = wishes[node].reason or clamps.get(node) or obstacle(node, target) or in_bodies[scope]
        if problem := problem or quantization_obstacle(node, specs[node]):
            obstacles[node] = problem
    integer = integer_nodes(graph, obstacles, absorbed, target)
    encodings = {encoding.tensor: encoding for encoding in scheme.encodings}
    activations = with_given_ranges(plan_activations(graph, integer, absorbed, specs, target), encodings, target)
    vanished = _vanished_clamps(absorbed, integer, activations)
    obstacles |= {
        clamp: NOT_QUANTIZED_BEHIND if maker in integer else NO_KERNEL_IN_FRONT
        for clamp, maker in absorbed.items()
        if clamp not in vanished
    }
    decisions = tuple(
        _with_cause(
            _decide(node, wishes[node], integer, vanished, obstacles, target, emit, in_body=scope is not graph),
            wishes[node],
        )
        for scope, node in nodes
    )
    if encodings:
        decisions = tuple(with_given_scales([node for _, node in nodes], decisions, encodings, target))
    # Kernels add products of 8-bit activations alone in 16 bits.
    wide = {node.name for node, spec in specs.items() if is_wide(spec)}
    decisions = tuple(with_pairs((node for _, node in nodes), decisions, target, wide))
    decisions = tuple(with_second_layouts([node for _, node in nodes], decisions))
    if scheme.correct_biases:
        decisions = tuple(with_corrections(graph, decisions))
    return Plan(decisions, activations, scheme.name, target.name)


class _Wish(NamedTuple):
    """The mode that the scheme and the demotions request for a node, with the reason if it is not static.

    `weights_alone` is set if the scheme quantizes no activations of the node.
    """

    rule: Rule
    mode: Mode
    reason: str = ""
    figures: str = ""
    weight: QuantSpec | None = None
    finer: str = ""
    weights_alone: bool = False


def _wish(scheme: Scheme, node: Node, demotions: Mapping[str, Demotion]) -> _Wish:
    rule = rule_of(scheme, node)
    if rule.mode is not Mode.FLOAT and node.name in demotions:
        demotion = demotions[node.name]
        wished = demotion.mode, demotion.reason, demotion.figures, demotion.weight, demotion.finer
        return _Wish(rule, *wished)
    if rule in scheme.excluded:
        return _Wish(rule, rule.mode, EXCLUDED)
    if rule.mode is not Mode.STATIC:
        alone = rule.mode in (Mode.WEIGHT_ONLY, Mode.STORAGE)
        return _Wish(rule, rule.mode, f"scheme {scheme.name} requests {rule.mode}", weights_alone=alone)
    return _Wish(rule, Mode.STATIC)


def rule_of(scheme: Scheme, node: Node) -> Rule:
    """Return the rule of a scheme that decides on a node."""
    return scheme.rule_for(node.op, node.name, _tensor_names(node), node.origins)


def _tensor_names(node: Node) -> Iterator[str]:
    return (tensor.name for tensor in (*node.inputs, *node.outputs) if tensor.name)


def _check_patterns(scheme: Scheme, nodes: Iterable[tuple[Graph, Node]]) -> None:
    if any(rule.op_types or rule.nodes or rule.tensors for rule in scheme.rules):
        pairs = tuple(nodes)
        origins = {origin for _, node in pairs for origin in ((node.name, node.op), *node.origins)}
        scheme.check_used(
            {op_type for _, op_type in origins},
            {name for name, _ in origins},
            {name for _, node in pairs for name in _tensor_names(node)},
            _readers(node for _, node in pairs),
        )


def _readers(nodes: Iterable[Node]) -> Mapping[str, Sequence[str]]:
    readers = defaultdict[str, list[str]](list)
    for node in nodes:
        for tensor in node.inputs:
            readers[tensor.name].append(node.name)
    return readers


def _check_specs(rules: Iterable[Rule], target: Target) -> None:
    for rule in rules:
        check_weight_spec(weight_spec(rule, target), rule.mode, target)
        if rule.mode in (Mode.STATIC, Mode.DYNAMIC):
            check_activation_spec(_activation_spec(rule, target), target)


def _activation_spec(rule: Rule, target: Target) -> QuantSpec:
    return rule.activation or target.activation


# The decision and its reason.


def _vanished_clamps(
    absorbed: Mapping[Node, Node], integer: set[Node], activations: tuple[Activation, ...]
) -> dict[Node, Node]:
    quantized = {activation.tensor for activation in activations}
    return {
        clamp: producer
        for clamp, producer in absorbed.items()
        if producer in integer and clamp.outputs[0].name in quantized
    }


def _decide(
    node: Node,
    wish: _Wish,
    integer: set[Node],
    vanished: Mapping[Node, Node],
    obstacles: Mapping[Node, str],
    target: Target,
    emit: AllowedOps,
    *,
    in_body: bool,
) -> Decision:
    if node in integer:
        return _static_decision(node, wish, target)
    if node in vanished:
        return Decision(node.name, node.op, Mode.STATIC, f"fused into the QuantizeLinear after {vanished[node].name}")
    reason = obstacles.get(node) or _alone(node, integer, target)
    if wish.mode is Mode.FLOAT:
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    if wish.mode is Mode.DYNAMIC or (wish.mode is Mode.STATIC and node.op in target.kernels.own_dynamic):
        problem = _narrow(node, wish, target) or dynamic_obstacle(node, target, emit)
        if not problem:
            return _dynamic_decision(node, wish, reason, target)
        reason = problem
    rows = wish.mode in (Mode.STATIC, Mode.DYNAMIC) and target.reads.looks_up and is_large_table(node)
    spec = readable(wish.weight, target) if wish.weight else weight_spec(wish.rule, target)
    mode = Mode.WEIGHT_ONLY if rows else wish.mode
    # A search offers a kernel to experts with stored weights; it may not undo what the scheme asks for.
    mode = Mode.STORAGE if is_moe(node) and wish.rule.mode is Mode.STORAGE else mode
    decision = decide_weights(node, mode, spec, reason, emit, in_body=in_body, whole_blocks=target.reads.whole_blocks)
    # That the scheme quantizes weights alone is not why a node stays in float.
    is_unexplained = wish.weights_alone and decision.reason == wish.reason
    return replace(decision, reason=lacking_weight(node)) if is_unexplained else decision


def _with_cause(decision: Decision, wish: _Wish) -> Decision:
    if not (wish.finer and (decision.weights or wish.mode is Mode.FLOAT)):
        return replace(decision, figures=wish.figures) if wish.figures else decision
    # A decision of another mode already names the reason.
    used = decision.mode is Mode.WEIGHT_ONLY
    reason = f"{decision.reason}: {wish.finer}" if used else decision.reason
    return replace(decision, reason=reason, figures=wish.figures, finer=wish.finer)


def _narrow(node: Node, wish: _Wish, target: Target) -> str:
    format = weight_spec(wish.rule, target).format
    return f"dynamic {node.op} takes 8-bit weights, not {format}" if format_named(format).bits < 8 else ""


def _alone(node: Node, integer: set[Node], target: Target) -> str:
    makers = (maker for tensor in node.inputs if (maker := producer(tensor)) in integer and maker is not None)
    adds_bias = any((place := bias_of(maker)) is not None and place[0] is node for maker in makers)
    if adds_bias and target.is_onnxruntime:
        return "adds a bias, fused into the integer kernel before it where possible"
    return "some of its inputs or all of its consumers are float"


def _dynamic_decision(node: Node, wish: _Wish, reason: str, target: Target) -> Decision:
    indices: Iterable[int] = (1,)
    if node.op in target.kernels.own_dynamic:
        indices = facts_of(node).weights
        reason = wish.reason or f"{node.op} has no kernel with static scales"
    weights = tuple(weight_at(node, index, weight_spec(wish.rule, target)) for index in indices)
    reason = f"multiplies integers with dynamic scales: {reason}"
    return Decision(node.name, node.op, Mode.DYNAMIC, reason, weights, data=node.inputs[0].name)


def _static_decision(node: Node, wish: _Wish, target: Target) -> Decision:
    operator, activation = facts_of(node), _activation_spec(wish.rule, target)
    decodes = is_wide(activation) and not target.kernels.wide
    if operator.moves:
        return Decision(node.name, node.op, Mode.STATIC, "passes quantized values through")
    if operator.role is Role.ARITHMETIC:
        reason = (
            _in_float(activation, "activations", target) if decodes else "has an integer kernel, between integer nodes"
        )
        return Decision(node.name, node.op, Mode.STATIC, reason)
    weight = weight_at(node, 1, weight_spec(wish.rule, target))
    has_bias = operator.bias is not None and optional_input(node, operator.bias) is not None
    return Decision(
        node.name,
        node.op,
        Mode.STATIC,
        _in_float(activation, "activations", target) if decodes else _kernel(weight, target),
        (weight,),
        bias=operator.bias if has_bias and target.reads.integer_bias else None,
        data=node.inputs[0].name,
    )


def _kernel(weight: Weight, target: Target) -> str:
    if format_named(weight.spec.format).bits >= target.reads.multiplied_bits:
        return "has an integer kernel"
    return _in_float(weight.spec, "weights", target)


def _in_float(spec: QuantSpec, what: str, target: Target) -> str:
    return (
        f"computes in float between quantized activations: {target.name} dequantizes {spec.format} {what} in each run"
    )
