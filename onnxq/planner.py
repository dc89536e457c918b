"""Scheme, target and graph to plan: what can be integer, what is worth it, and which tensors share a scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnx import TensorProto

from onnxq.activations import plan_activations
from onnxq.errors import SchemeError
from onnxq.graph import Constant, Graph, Node, onnx_dtype, scopes
from onnxq.islands import absorbed_clamps, integer_nodes
from onnxq.obstacles import obstacle, volume
from onnxq.operators import OPERATORS, Operator, Role
from onnxq.plan import Activation, Decision, Demotion, Plan, Weight
from onnxq.scheme import Granularity, Mode, Rule, Scheme, Spec
from onnxq.targets import Target

# Below this a weight saves less than the nodes that decode it cost.
_SMALLEST_STORED_WEIGHT = 256

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


def make_plan(graph: Graph, scheme: Scheme, target: Target, demotions: Mapping[str, Demotion] | None = None) -> Plan:
    """Decide for every node of a prepared graph.

    A node becomes static when the scheme asks for it, the target has an integer kernel for it as it stands, and, for
    operators that only pass integers on, when integers come in and an integer node takes what goes out, so that no
    QuantizeLinear and DequantizeLinear stand alone. Any other node with large constant weights stores them as codes.

    Args:
        graph: with unique node names and inferred types.
        scheme: the user's rules.
        target: the runtime.
        demotions: nodes to take out of integer arithmetic, by name.

    Returns:
        The plan.

    Raises:
        SchemeError: a pattern of the scheme matches nothing, or a spec has no integer kernel on the target.
    """
    nodes = [(scope, node) for scope in scopes(graph) for node in scope.nodes]
    _check_patterns(scheme, nodes)
    wishes = {node: _wish(scheme, node, demotions or {}) for _, node in nodes}
    _check_specs({wish.rule for wish in wishes.values()}, target)

    specs = {node: _activation_spec(wish.rule, target) for node, wish in wishes.items() if wish.mode is Mode.STATIC}
    absorbed = absorbed_clamps(graph, specs, target)
    obstacles: dict[Node, str] = {}
    for scope, node in nodes:
        problem = wishes[node].obstacle or obstacle(node, target)
        if not problem and scope is not graph:
            problem = "stands in a control-flow body, where activations are not calibrated"
        if problem:
            obstacles[node] = problem
    integer = integer_nodes(graph, obstacles, absorbed, target)
    activations = plan_activations(graph, integer, absorbed, specs, target)
    vanished = _vanished_clamps(absorbed, integer, activations)
    decisions = tuple(_decide(node, wishes[node], integer, vanished, obstacles, target) for _, node in nodes)
    return Plan(decisions, activations, scheme.name, target.name)


@dataclass(frozen=True)
class _Wish:
    """What the scheme and the demotions ask of a node, and why it cannot be static if they say so."""

    rule: Rule
    mode: Mode
    obstacle: str = ""


def _wish(scheme: Scheme, node: Node, demotions: Mapping[str, Demotion]) -> _Wish:
    rule = scheme.rule_for(node.op, node.name, _tensor_names(node))
    if rule.mode is not Mode.FLOAT and node.name in demotions:
        demotion = demotions[node.name]
        return _Wish(rule, demotion.mode, demotion.reason)
    if rule.mode is not Mode.STATIC:
        return _Wish(rule, rule.mode, f"the scheme {scheme.name} asks for {rule.mode}")
    return _Wish(rule, Mode.STATIC)


def _tensor_names(node: Node) -> Iterator[str]:
    return (tensor.name for tensor in (*node.inputs, *node.outputs) if tensor.name)


def _check_patterns(scheme: Scheme, nodes: Iterable[tuple[Graph, Node]]) -> None:
    if any(rule.op_types or rule.nodes or rule.tensors for rule in scheme.rules):
        pairs = tuple(nodes)
        scheme.check_used(
            {node.op for _, node in pairs},
            {node.name for _, node in pairs},
            {name for _, node in pairs for name in _tensor_names(node)},
        )


def _check_specs(rules: Iterable[Rule], target: Target) -> None:
    for rule in rules:
        activation, weight = _activation_spec(rule, target), _weight_spec(rule, target)
        if rule.mode is not Mode.FLOAT and not weight.symmetric:
            raise SchemeError(f"weights as {weight.format} with a zero point are not made; use symmetric int8")
        if rule.mode is not Mode.STATIC:
            continue
        if not activation.format.startswith(("int8", "uint8")) or activation.per is not Granularity.TENSOR:
            raise SchemeError(
                f"activations as {activation.format} per {activation.per} have no integer kernel on {target.name}; "
                "use uint8 or int8 per tensor"
            )
        if not weight.format.startswith("int8"):
            raise SchemeError(
                f"weights as {weight.format} have no fast integer kernel on {target.name}; use symmetric int8"
            )


def _activation_spec(rule: Rule, target: Target) -> Spec:
    return rule.activation or Spec(target.activation, symmetric=False)


def _weight_spec(rule: Rule, target: Target) -> Spec:
    return rule.weight or Spec(target.weight, per=Granularity.CHANNEL)


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
) -> Decision:
    if node in integer:
        return _static_decision(node, wish, target)
    if node in vanished:
        return Decision(node.name, node.op, Mode.STATIC, f"vanishes into the quantizer behind {vanished[node].name}")
    reason = obstacles.get(node) or "integer nodes do not stand both before and behind it"
    if wish.mode is Mode.FLOAT:
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    weights = tuple(_stored_weights(node, wish, target))
    if not weights:
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    formats = " and ".join(sorted({weight.spec.format for weight in weights}))
    return Decision(node.name, node.op, Mode.STORAGE, f"computes in float from {formats} weights: {reason}", weights)


def _static_decision(node: Node, wish: _Wish, target: Target) -> Decision:
    operator = OPERATORS[node.op]
    if operator.role is Role.CARRIER:
        return Decision(node.name, node.op, Mode.STATIC, "passes codes on")
    if operator.role is Role.ARITHMETIC:
        return Decision(node.name, node.op, Mode.STATIC, "integer kernel between integer nodes")
    weight = _weight(node, 1, operator, wish, target)
    has_bias = operator.bias is not None and len(node.inputs) > operator.bias and node.inputs[operator.bias].name
    return Decision(
        node.name,
        node.op,
        Mode.STATIC,
        "integer kernel",
        (weight,),
        bias=operator.bias if has_bias else None,
        data=node.inputs[0].name,
    )


def _stored_weights(node: Node, wish: _Wish, target: Target) -> Iterator[Weight]:
    operator = OPERATORS.get(node.op) if not node.domain else None
    if operator is None:
        return
    for index in operator.weights:
        tensor = node.inputs[index] if index < len(node.inputs) else None
        if (
            isinstance(tensor, Constant)
            and onnx_dtype(tensor) in _FLOATS
            and volume(tensor.shape) >= _SMALLEST_STORED_WEIGHT
            and len(tensor.shape) >= 2
        ):
            yield _weight(node, index, operator, wish, target)


def _weight(node: Node, index: int, operator: Operator, wish: _Wish, target: Target) -> Weight:
    tensor = node.inputs[index]
    axis = operator.weights[index](node)
    return Weight(index, tensor.name, _weight_spec(wish.rule, target), axis, volume(tensor.shape))
