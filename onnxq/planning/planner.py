"""Where a bias can make up for what rounding a weight adds to the mean of each output channel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    operator_key,
    optional_input,
    producer,
)
from onnxq.lowering import AllowedOps
from onnxq.numerics.formats import format_named
from onnxq.ops import OPERATORS, Role, operator_of
from onnxq.planning.activations import (
    NO_CODES_BEHIND,
    NO_KERNEL_IN_FRONT,
    absorbed_clamps,
    check_activation_spec,
    clamp_obstacles,
    integer_nodes,
    plan_activations,
)
from onnxq.planning.obstacles import (
    body_obstacles,
    codes_obstacle,
    dynamic_obstacle,
    obstacle,
    scales_its_terms,
    volume,
)
from onnxq.planning.plan import EXCLUDED, Activation, Decision, Demotion, Mean, Plan, Weight
from onnxq.planning.weights import (
    check_weight_spec,
    decide_weights,
    is_large_product,
    is_large_table,
    weight_at,
    weight_spec,
    with_pairs,
    with_second_layouts,
)
from onnxq.runtime.targets import Target

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_WEIGHT = 1


def with_corrections(graph: Graph, decisions: Iterable[Decision]) -> Iterator[Decision]:
    """Yield the decisions, each with the mean that tells how the node's bias is to be corrected, where one does.

    Args:
        graph: the prepared graph; only its main graph has means of channels.
        decisions: for its nodes.
    """
    found = {node.name: node for node in graph.nodes}
    axes: dict[str, int] = {}
    for decision in decisions:
        node = found.get(decision.node)
        mean = _mean(node, decision) if node is not None else None
        # A tensor is told apart along one axis only.
        fits = mean is not None and axes.setdefault(mean.tensor, mean.axis) == mean.axis
        yield replace(decision, mean=mean) if fits else decision


def _mean(node: Node, decision: Decision) -> Mean | None:
    weight = next((weight for weight in decision.weights if weight.index == _WEIGHT), None)
    if weight is None or weight.spec.is_followed or bias_of(node) is None:
        return None
    axis = OPERATORS[operator_key(node)].channels
    assert axis is not None, "only a product whose channels are known has a bias to correct"
    return Mean(node.inputs[0].name, axis)


def bias_of(node: Node) -> tuple[Node, int] | None:
    """Return the node and the input at which the constant bias of a product stands or may stand, or None.

    It is the bias of a Gemm, or of a convolution, which may still lack it, or what an Add behind a MatMul adds to each
    of its columns.

    >>> from onnxq.ir import constant
    >>> import numpy as np
    >>> weight, bias = constant("w", np.ones((2, 3), np.float32)), constant("b", np.ones(3, np.float32))
    >>> data = Variable("x", np.dtype(np.float32), [1, 2])
    >>> bias_of(Node("Gemm", "g", {}, [data, weight, bias], [Variable("y")]))[1]
    2
    """
    operator = operator_of(node)
    if operator is None or operator.channels is None or len(node.inputs) <= _WEIGHT or scales_its_terms(node):
        return None
    data, weight = node.inputs[:2]
    if not isinstance(data, Variable) or not is_constant(weight):
        return None
    if onnx_dtype(data) not in _FLOATS or onnx_dtype(weight) not in _FLOATS:
        return None
    # A matrix product has none of its own.
    added = _added(node) if operator.bias is None and len(weight.shape) == 2 else None
    place = added if operator.bias is None else (node, operator.bias)
    bias = optional_input(*place) if place else None
    if place and bias is None and not operator.product:
        return place
    if not is_constant(bias) or onnx_dtype(bias) not in _FLOATS:
        return None
    channels = weight.shape[operator.weights[_WEIGHT].channels(node)]
    if node.op == "ConvTranspose":
        # Its weight holds those of one group, as many as each other group has.
        channels *= node.attrs.get("group", 1)
    return place if bias.shape and bias.shape[-1] == channels == volume(bias.shape) else None


def _added(node: Node) -> tuple[Node, int] | None:
    """Return the only reader of a product when it adds a constant, and the input at which that stands."""
    output = node.outputs[0]
    # Graphs may return the product as well.
    reader = output.outputs[0] if len(output.outputs) == 1 else None
    if reader is None or reader.op != "Add" or reader.domain:
        return None
    index = 1 if reader.inputs[0] is output else 0
    return (reader, index) if is_constant(reader.inputs[index]) else None


# Scheme, target and graph to plan: what can be integer, what is worth it, and which tensors share a scale.


def make_plan(
    graph: Graph,
    scheme: Scheme,
    target: Target,
    demotions: Mapping[str, Demotion] | None = None,
    emit: AllowedOps = AllowedOps.QDQ,
) -> Plan:
    """Decide for every node of a prepared graph.

    A node becomes static when the scheme asks for it, the target has an integer kernel for it as it stands, and, for
    operators that only pass integers on, when integers come in and an integer node takes what goes out, so that no
    QuantizeLinear and DequantizeLinear stand alone. An LSTM that is wanted so becomes dynamic where an operator of the
    runtime's own may be written, as there is no static one. Any other node with large constant weights stores them as
    codes.

    Args:
        graph: with unique node names and inferred types.
        scheme: the user's rules.
        target: the runtime.
        demotions: nodes to take out of integer arithmetic, by name.
        emit: what the written model may hold.

    Returns:
        The plan.

    Raises:
        SchemeError: a pattern of the scheme matches nothing, or a spec has no integer kernel on the target.
    """
    found = list(all_nodes(graph))
    _check_patterns(scheme, found)
    wishes = {node: _wish(scheme, node, demotions or {}) for _, node in found}
    _check_specs({wish.rule for wish in wishes.values()}, target)

    specs = {node: _activation_spec(wish.rule, target) for node, wish in wishes.items() if wish.mode is Mode.STATIC}
    absorbed = absorbed_clamps(clamps := clamp_obstacles(graph, specs, target))
    in_bodies = body_obstacles(graph, target)
    obstacles: dict[Node, str] = {}
    for scope, node in found:
        problem = wishes[node].reason or clamps.get(node) or obstacle(node, target) or in_bodies[scope]
        if problem := problem or codes_obstacle(node, specs[node]):
            obstacles[node] = problem
    integer = integer_nodes(graph, obstacles, absorbed, target)
    activations = plan_activations(graph, integer, absorbed, specs, target)
    vanished = _vanished_clamps(absorbed, integer, activations)
    obstacles |= {
        clamp: NO_CODES_BEHIND if maker in integer else NO_KERNEL_IN_FRONT
        for clamp, maker in absorbed.items()
        if clamp not in vanished
    }
    decisions = tuple(
        _with_cause(
            _decide(node, wishes[node], integer, vanished, obstacles, target, emit, in_body=scope is not graph),
            wishes[node],
        )
        for scope, node in found
    )
    decisions = tuple(with_pairs((node for _, node in found), decisions, target))
    decisions = tuple(with_second_layouts([node for _, node in found], decisions))
    if scheme.correct_biases:
        decisions = tuple(with_corrections(graph, decisions))
    return Plan(decisions, activations, scheme.name, target.name)


class _Wish(NamedTuple):
    """What the scheme and the demotions ask of a node, and why when that is not static."""

    rule: Rule
    mode: Mode
    reason: str = ""
    figures: str = ""
    weight: QuantSpec | None = None
    finer: str = ""


def _wish(scheme: Scheme, node: Node, demotions: Mapping[str, Demotion]) -> _Wish:
    rule = scheme.rule_for(node.op, node.name, _tensor_names(node), node.origins)
    if rule.mode is not Mode.FLOAT and node.name in demotions:
        demotion = demotions[node.name]
        wished = demotion.mode, demotion.reason, demotion.figures, demotion.weight, demotion.finer
        return _Wish(rule, *wished)
    if rule in scheme.excluded:
        return _Wish(rule, rule.mode, EXCLUDED)
    if rule.mode is not Mode.STATIC:
        return _Wish(rule, rule.mode, f"the scheme {scheme.name} asks for {rule.mode}")
    return _Wish(rule, Mode.STATIC)


def _tensor_names(node: Node) -> Iterator[str]:
    return (tensor.name for tensor in (*node.inputs, *node.outputs) if tensor.name)


def _check_patterns(scheme: Scheme, found: Iterable[tuple[Graph, Node]]) -> None:
    if any(rule.op_types or rule.nodes or rule.tensors for rule in scheme.rules):
        pairs = tuple(found)
        known = {one for _, node in pairs for one in ((node.name, node.op), *node.origins)}
        scheme.check_used(
            {op_type for _, op_type in known},
            {name for name, _ in known},
            {name for _, node in pairs for name in _tensor_names(node)},
        )


def _check_specs(rules: Iterable[Rule], target: Target) -> None:
    for rule in rules:
        check_weight_spec(weight_spec(rule, target), rule.mode, target)
        if rule.mode in (Mode.STATIC, Mode.DYNAMIC):
            check_activation_spec(_activation_spec(rule, target), target)


def _activation_spec(rule: Rule, target: Target) -> QuantSpec:
    return rule.activation or target.activation


# --- the decision and its reason ----------------------------------------------------------------------------------


def _vanished_clamps(
    absorbed: Mapping[Node, Node], integer: set[Node], activations: tuple[Activation, ...]
) -> dict[Node, Node]:
    """Keep the absorbed clamps that really have a quantizer behind them."""
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
        return Decision(node.name, node.op, Mode.STATIC, f"vanishes into the quantizer behind {vanished[node].name}")
    reason = obstacles.get(node) or _alone(node, integer, target)
    if wish.mode is Mode.FLOAT:
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    if wish.mode is Mode.DYNAMIC or (wish.mode is Mode.STATIC and node.op in target.kernels.own_dynamic):
        problem = _narrow(node, wish, target) or dynamic_obstacle(node, target, emit)
        if not problem:
            return _dynamic_decision(node, wish, reason, target)
        reason = problem
    rows = wish.mode in (Mode.STATIC, Mode.DYNAMIC) and target.reads.looks_up and is_large_table(node)
    spec, whole = wish.weight or weight_spec(wish.rule, target), target.reads.whole_blocks
    # What a step of a Scan multiplies is read again in each.
    again = in_body and target.kernels.forms.scans and is_large_product(node) and not isinstance(spec.per, tuple)
    mode = Mode.WEIGHT_ONLY if rows or (again and wish.mode is not Mode.STORAGE) else wish.mode
    return decide_weights(node, mode, spec, reason, emit, in_body=in_body and not again, whole_blocks=whole)


def _with_cause(decision: Decision, wish: _Wish) -> Decision:
    """Return a decision with the figures that it rests on, and why its codes are finer than the scheme asks for."""
    if not (wish.finer and decision.weights):
        return replace(decision, figures=wish.figures) if wish.figures else decision
    # What is only stored names the wish's own reason.
    used = decision.mode is Mode.WEIGHT_ONLY
    reason = f"{decision.reason}: {wish.finer}" if used else decision.reason
    return replace(decision, reason=reason, figures=wish.figures, finer=wish.finer)


def _narrow(node: Node, wish: _Wish, target: Target) -> str:
    """Return why integers whose scale each run computes do not multiply a wanted weight, or an empty string."""
    format = weight_spec(wish.rule, target).format
    return f"{node.op} multiplies weights of 8 bits in each run, not {format}" if format_named(format).bits < 8 else ""


def _alone(node: Node, integer: set[Node], target: Target) -> str:
    """Return why a node stays float that has an integer kernel."""
    products = (maker for tensor in node.inputs if (maker := producer(tensor)) in integer and maker is not None)
    added = next((one for one in products if (place := bias_of(one)) is not None and place[0] is node), None)
    if added is not None and target.workarounds:
        return f"adds the bias of {added.name}, whose kernel takes it over where it can"
    return "integer nodes do not stand both before and behind it"


def _dynamic_decision(node: Node, wish: _Wish, reason: str, target: Target) -> Decision:
    indices: Iterable[int] = (1,)
    if node.op in target.kernels.own_dynamic:
        indices = OPERATORS[operator_key(node)].weights
        reason = wish.reason or f"no kernel of {node.op} has fixed scales"
    weights = tuple(weight_at(node, index, weight_spec(wish.rule, target)) for index in indices)
    reason = f"multiplies integers whose scale each run computes: {reason}"
    return Decision(node.name, node.op, Mode.DYNAMIC, reason, weights, data=node.inputs[0].name)


def _static_decision(node: Node, wish: _Wish, target: Target) -> Decision:
    operator = OPERATORS[operator_key(node)]
    if operator.moves:
        return Decision(node.name, node.op, Mode.STATIC, "passes quantized values on")
    if operator.role is Role.ARITHMETIC:
        return Decision(node.name, node.op, Mode.STATIC, "integer kernel between integer nodes")
    weight = weight_at(node, 1, weight_spec(wish.rule, target))
    has_bias = operator.bias is not None and optional_input(node, operator.bias) is not None
    return Decision(
        node.name,
        node.op,
        Mode.STATIC,
        _kernel(weight, target),
        (weight,),
        bias=operator.bias if has_bias and target.reads.integer_bias else None,
        data=node.inputs[0].name,
    )


def _kernel(weight: Weight, target: Target) -> str:
    """Return what computes a static product."""
    if format_named(weight.spec.format).bits >= target.reads.multiplied_bits:
        return "integer kernel"
    decoded = f"{target.name} decodes {weight.spec.format} weights in each run"
    return f"computes in float between quantized activations: {decoded}"
