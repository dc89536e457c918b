"""Scheme, target and graph to plan: what can be integer, what is worth it, and which tensors share a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import TensorProto

from onnxq.errors import SchemeError
from onnxq.graph import Constant, Graph, Node, Variable, onnx_dtype, scopes
from onnxq.groups import Groups
from onnxq.obstacles import data_inputs, obstacle, volume
from onnxq.operators import OPERATORS, Operator, Role
from onnxq.plan import Activation, Decision, Demotion, Plan, Weight
from onnxq.scheme import Granularity, Mode, Rule, Scheme, Spec
from onnxq.targets import Target

# Below this a weight saves less than the nodes that decode it cost.
_SMALLEST_STORED_WEIGHT = 256

Limits = tuple[float, float]
_UNLIMITED: Limits = (-math.inf, math.inf)

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

    absorbed = _absorbed_clamps(graph, wishes, target)
    obstacles: dict[Node, str] = {}
    for scope, node in nodes:
        problem = wishes[node].obstacle or obstacle(node, target)
        if not problem and scope is not graph:
            problem = "stands in a control-flow body, where activations are not calibrated"
        if problem:
            obstacles[node] = problem
    integer = _integer_nodes(graph, obstacles, absorbed, target)
    activations = _activations(graph, integer, absorbed, wishes, target)
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


# --- which of them stay integer together --------------------------------------------------------------------------


def _absorbed_clamps(graph: Graph, wishes: Mapping[Node, _Wish], target: Target) -> dict[Node, Node]:
    """Map a clamp to the node in front of it, of which it is the only consumer, when a quantizer can stand for it."""
    outputs = set(graph.outputs)
    found = {}
    for node in graph.nodes:
        if node.op not in target.clamps or node.domain or wishes[node].mode is not Mode.STATIC:
            continue
        source = node.inputs[0]
        producer = _producer(source)
        limits = _limits(node)
        if producer is None or len(source.outputs) != 1 or source in outputs or limits is None or limits[0] != 0.0:
            continue
        operator = OPERATORS.get(producer.op)
        affine = not _activation_spec(wishes[producer].rule, target).symmetric
        if affine and operator and producer.op in target.fused and operator.role in (Role.COMPUTE, Role.ARITHMETIC):
            found[node] = producer
    return found


def _producer(tensor: Variable | Constant) -> Node | None:
    return tensor.inputs[0] if tensor.inputs else None


def _limits(clamp: Node) -> Limits | None:
    """Return the least and greatest value that a clamp lets through, or None when they are computed at run time."""
    if clamp.op == "Relu":
        return 0.0, math.inf
    limits = list(_UNLIMITED)
    for index, bound in enumerate(clamp.inputs[1:3]):
        if not bound.name:
            continue
        if not isinstance(bound, Constant) or bound.nbytes == 0:
            return None
        limits[index] = float(bound.values.reshape(-1)[0])
    return limits[0], limits[1]


def _integer_nodes(
    graph: Graph, obstacles: Mapping[Node, str], absorbed: Mapping[Node, Node], target: Target
) -> set[Node]:
    """Return the largest set of nodes in which every carrier and arithmetic node has integers before and behind it."""
    integer = {node for node in graph.nodes if node not in obstacles and node not in absorbed}
    pending = [node for node in graph.nodes if node in integer]
    while pending:
        node = pending.pop()
        if node not in integer or OPERATORS[node.op].role is Role.COMPUTE:
            continue
        before, behind = _before(node, absorbed), _behind(node, absorbed)
        if (
            all(neighbour in integer and neighbour.op not in target.float_output for neighbour in before)
            and len(before) == len(data_inputs(node, OPERATORS[node.op]))
            and any(neighbour in integer for neighbour in behind)
        ):
            continue
        integer.discard(node)
        pending.extend((*before, *behind))
    return integer


def _before(node: Node, absorbed: Mapping[Node, Node]) -> list[Node]:
    """Return the nodes whose codes a node reads, looking through absorbed clamps."""
    producers = (_producer(tensor) for tensor in data_inputs(node, OPERATORS[node.op]))
    return [absorbed.get(producer, producer) for producer in producers if producer is not None]


def _behind(node: Node, absorbed: Mapping[Node, Node]) -> list[Node]:
    """Return the nodes that read the codes of a node, looking through absorbed clamps."""
    return [consumer for tensor in _quantized_outputs(node, absorbed) for consumer in tensor.outputs]


def _quantized_outputs(node: Node, absorbed: Mapping[Node, Node]) -> list[Variable]:
    """Return the outputs that carry codes: behind the clamp when one is absorbed."""
    found = []
    for tensor in node.outputs:
        clamp = tensor.outputs[0] if len(tensor.outputs) == 1 else None
        found.append(clamp.outputs[0] if clamp is not None and absorbed.get(clamp) is node else tensor)
    return found


# --- which tensors get a scale ------------------------------------------------------------------------------------


def _activations(
    graph: Graph, integer: set[Node], absorbed: Mapping[Node, Node], wishes: Mapping[Node, _Wish], target: Target
) -> tuple[Activation, ...]:
    found: dict[Variable, Activation] = {}
    limits: dict[Variable, Limits | None] = {}
    groups = Groups[Variable]()
    for node in graph.nodes:
        if node not in integer:
            continue
        operator = OPERATORS[node.op]
        spec = _activation_spec(wishes[node].rule, target)
        inputs = data_inputs(node, operator)
        outputs = [] if node.op in target.float_output else _quantized_outputs(node, absorbed)
        for tensor in inputs:
            found.setdefault(tensor, Activation(tensor.name, spec, tensor.name, _fixed_range(tensor)))
        for tensor in outputs:
            known = found.get(tensor, Activation(tensor.name, spec, tensor.name, _fixed_range(tensor)))
            found[tensor] = replace(known, every_consumer=True)
        for tensor in outputs:
            clamp = _producer(tensor)
            limits[tensor] = _limits(clamp) if clamp is not None and clamp in absorbed else None
        if operator.role is Role.CARRIER:
            _share_one_scale(inputs, outputs, limits, groups)
    return tuple(replace(activation, group=groups.find(tensor).name) for tensor, activation in found.items())


def _share_one_scale(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    limits: dict[Variable, Limits | None],
    groups: Groups[Variable],
) -> None:
    """Join the tensors of a carrier, except inputs whose clamp is tighter than what the carrier lets through.

    A clamp vanishes only when the range of the quantizer behind it ends where the clamp does, so what is clamped
    keeps its own scale where a Concat mixes it with what is not.
    """
    found = [limits.get(tensor) or _UNLIMITED for tensor in inputs]
    widest = min(low for low, _ in found), max(high for _, high in found)
    limits.update(dict.fromkeys(outputs, widest))
    alike = [tensor for tensor, limit in zip(inputs, found, strict=True) if limit == widest]
    for tensor in (*alike, *outputs):
        groups.join((alike or outputs)[0], tensor)


def _fixed_range(tensor: Variable) -> tuple[float, float] | None:
    producer = tensor.inputs[0] if tensor.inputs else None
    operator = OPERATORS.get(producer.op) if producer is not None and not producer.domain else None
    return operator.fixed_range if operator else None


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
