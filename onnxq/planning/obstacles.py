"""Explain in words why a node cannot run as an integer kernel on a target."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from onnx import TensorProto

from onnxq.calibration.accumulators import Range
from onnxq.calibration.instrument import CARRYING
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.errors import DataError
from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Variable,
    all_graphs,
    all_nodes,
    is_constant,
    onnx_dtype,
    optional_input,
)
from onnxq.lowering import AllowedOps
from onnxq.numerics.spec import QuantSpec
from onnxq.ops import Operator, Role, facts_of
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import Target

# 255 * 127 * 33,000 is below 2**30, so the other half of the int32 accumulator is free for the bias.
_LONGEST_SUM = 33_000
_MATRIX = 2


def obstacle(node: Node, target: Target) -> str:
    """Return why a node cannot run as an integer kernel, or an empty string; the graph around it is not checked."""
    operator = facts_of(node)
    if node.domain or node.op not in target.kernels.fused.ops:
        return f"{target.name} has no integer kernel for {node.op}"
    if operator.role is Role.COMPUTE:
        return _compute_obstacle(node, operator)
    operands = data_inputs(node)
    for tensor in operands:
        if isinstance(tensor, Constant):
            beside = operator.role is Role.ARITHMETIC and any(isinstance(operand, Variable) for operand in operands)
            if not beside or not _is_operand(tensor):
                return f"the data of {node.op} is constant"
        elif problem := _type_obstacle(tensor):
            return problem
    if node.op == "Resize" and node.attrs.get("mode", "nearest") != "nearest":
        return "Resize would interpolate differently on quantized values"
    if node.op == "MaxPool" and len(node.outputs) > 1:
        return "no integer kernel for a MaxPool that returns indices"
    if node.op == "HardSigmoid" and not 0 < slope_and_middle(node)[0] < math.inf:
        return "no integer kernel for a HardSigmoid that does not rise"
    return ""


def _is_operand(tensor: Constant) -> bool:
    floats = is_constant(tensor) and onnx_dtype(tensor) == TensorProto.FLOAT
    return floats and tensor.nbytes > 0 and bool(np.isfinite(tensor.values).all())


def quantization_obstacle(node: Node, spec: QuantSpec) -> str:
    """Return why a node's integer kernel cannot output quantized values of a spec, or an empty string."""
    if node.op == "HardSigmoid" and (spec.symmetric or spec.format not in ("int8", "uint8", "int16", "uint16")):
        kind = "symmetric" if spec.symmetric else "affine"
        return f"{kind} {spec.format} values do not end at the limits of HardSigmoid"
    return ""


def _compute_obstacle(node: Node, operator: Operator) -> str:
    data = node.inputs[0]
    if isinstance(data, Constant):
        return f"the first input of {node.op} is constant"
    if problem := _type_obstacle(data):
        return problem
    weight = node.inputs[1]
    if problem := _weight_obstacle(node, weight):
        return problem
    rank = len(weight.shape)
    if rank < _MATRIX:
        return f"no integer kernel takes a weight of rank {rank}"
    if node.op == "MatMul" and rank != _MATRIX:
        return f"no integer MatMul kernel takes a weight of rank {rank}"
    if 0 in weight.shape:
        return "its weight is empty"
    if scales_its_terms(node):
        return "no integer kernel for a Gemm with alpha, beta or transA"
    channels = weight.shape[operator.weights[1].channels(node)]
    terms = volume(weight.shape) // channels
    if terms > _LONGEST_SUM:
        return f"sums of {terms} products can overflow an int32 accumulator"
    bias = optional_input(node, operator.bias) if operator.bias is not None else None
    if bias is not None:
        if not is_constant(bias):
            return changing("bias", bias)
        if volume(bias.shape) != channels or any(extent != 1 for extent in bias.shape[:-1]):
            return f"its bias has shape {list(bias.shape)}, not one value for each of {channels} channels"
    return ""


def dynamic_obstacle(node: Node, target: Target, emit: AllowedOps) -> str:
    """Return why a node cannot be quantized dynamically (with scales computed at run time), or an empty string."""
    if node.op in target.kernels.own_dynamic and not node.domain:
        return _own_obstacle(node, target, emit)
    if node.domain or node.op not in target.kernels.dynamic:
        return f"{target.name} has no dynamic integer kernel for {node.op}"
    if problem := _type_obstacle(node.inputs[0]):
        return problem
    weight = node.inputs[1]
    if problem := _weight_obstacle(node, weight):
        return problem
    if len(weight.shape) != _MATRIX or 0 in weight.shape:
        return f"no dynamic integer {node.op} kernel takes a weight of shape {list(weight.shape)}"
    if isinstance(node.inputs[0], Constant):
        return f"the first input of {node.op} is constant"
    if scales_its_terms(node):
        return "no integer kernel for a Gemm with alpha, beta or transA"
    terms = weight.shape[1 if facts_of(node).is_transposed(node) else 0]
    if terms > 2 * _LONGEST_SUM:
        return f"sums of {terms} products can overflow an int32 accumulator"
    return ""


def _own_obstacle(node: Node, target: Target, emit: AllowedOps) -> str:
    for index in facts_of(node).weights:
        weight = node.inputs[index]
        if problem := _weight_obstacle(node, weight):
            return problem
        if len(weight.shape) != 3 or 0 in weight.shape:
            return f"no dynamic integer kernel takes a weight of shape {list(weight.shape)}"
        if weight.shape[-1] > 2 * _LONGEST_SUM:
            return f"sums of {weight.shape[-1]} products can overflow an int32 accumulator"
    if node.attrs.get("layout", 0):
        return f"{target.name} has no dynamic integer kernel for {node.op} with the batch first"
    if not emit.has_own:
        return f"standard ONNX has no integer {node.op}; with --emit ort, {target.name} has a kernel for it"
    return ""


def scales_its_terms(node: Node) -> bool:
    """Return whether a Gemm has ``alpha``, ``beta`` or ``transA`` other than the default."""
    return node.op == "Gemm" and bool(
        node.attrs.get("alpha", 1.0) != 1.0 or node.attrs.get("beta", 1.0) != 1.0 or node.attrs.get("transA", 0)
    )


def slope_and_middle(node: Node) -> tuple[float, float]:
    """Return ``alpha`` and ``beta`` of ``HardSigmoid(x) = clip(alpha * x + beta, 0, 1)``.

    >>> slope_and_middle(Node("HardSigmoid", "n", {"alpha": 0.25}))
    (0.25, 0.5)
    """
    return float(node.attrs.get("alpha", 0.2)), float(node.attrs.get("beta", 0.5))


def _weight_obstacle(node: Node, weight: Variable | Constant) -> str:
    if not is_constant(weight):
        return changing_weight(node, weight)
    if onnx_dtype(weight) != TensorProto.FLOAT:
        return f"its weight is {TensorProto.DataType.Name(onnx_dtype(weight)).lower()}, not float32"
    return ""


def changing_weight(node: Node, weight: Variable | Constant) -> str:
    """Return why a weight that is not constant cannot be quantized before the model runs."""
    if node.op == "MatMul" and all(isinstance(tensor, Variable) for tensor in node.inputs):
        return "both operands are activations"
    return changing("weight", weight)


def changing(what: str, tensor: Variable | Constant) -> str:
    """Return why a tensor that is not constant cannot be quantized before the model runs."""
    if isinstance(tensor, Constant):
        return f"its {what} is an input that callers may feed; list it as an initializer only"
    return f"its {what} is computed at run time"


def _type_obstacle(tensor: Variable) -> str:
    dtype = onnx_dtype(tensor)
    if dtype == TensorProto.UNDEFINED:
        return "the type of its input is unknown"
    if dtype != TensorProto.FLOAT:
        return f"its input is {TensorProto.DataType.Name(dtype).lower()}, not float32"
    return ""


def data_inputs(node: Node) -> list[Variable | Constant]:
    """Return the activation inputs of a node; of a compute node only the one that its weight multiplies."""
    operator = facts_of(node)
    indices = range(len(node.inputs)) if operator.data is None else operator.data
    if operator.role is Role.COMPUTE:
        indices = (0,)
    return [tensor for index in indices if (tensor := optional_input(node, index)) is not None]


def volume(shape: Iterable[int]) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)


# Subgraphs of control flow: which nodes can be integer, and which stay in float because they never ran.

_IDLE = "its subgraph ran on no sample"
_UNREACHED = "no sample reached it"


def body_obstacles(graph: Graph, target: Target) -> dict[Graph, str]:
    """Return why no node of a graph can be integer, for the main graph and each subgraph; empty if nodes can.

    Args:
        graph: the main graph.
        target: the runtime.
    """
    reasons = {graph: ""}
    scanned = {graph: False}
    for scope, node in all_nodes(graph):
        for body in node.subgraphs() if node.attrs else ():
            reasons[body] = reasons[scope] or _body_obstacle(node, target, in_scan=scanned[scope])
            scanned[body] = scanned[scope] or node.op == "Scan"
    return reasons


def leave_idle_nodes(graph: Graph, plan: Plan, statistics: CalibrationStatistics) -> dict[str, Demotion]:
    """Return demotions of the static nodes that did not run on data in calibration, by node name.

    A subgraph ran if any of its own tensors was observed. A subgraph without tensors to calibrate is kept: its static
    nodes read tensors of outer graphs or have fixed ranges. An expert that no token was sent to ran on tensors without
    elements: such a tensor has no range, unless it shares the scale of another.

    Args:
        graph: the prepared graph.
        plan: a plan in which nodes are static wherever possible.
        statistics: statistics of the plan's taps.
    """
    ranges = {name: statistics.of(name).find(Range) for name in plan.observed_tensors}
    unseen = {name for name, extent in ranges.items() if extent is not None and not extent.count}
    seen = {activation.group for activation in plan.activations if activation.tensor not in unseen}
    unreached = {activation.tensor for activation in plan.activations if activation.group not in seen}
    demotions: dict[str, Demotion] = {}
    idle: set[Graph] = set()
    for scope in all_graphs(graph) if unseen else ():
        own = {tensor.name for node in scope.nodes for tensor in node.outputs} | {
            tensor.name for tensor in scope.inputs
        }
        instrumented = own.intersection(plan.observed_tensors)
        if scope.parent is not None and (scope.parent in idle or (instrumented and instrumented <= unseen)):
            idle.add(scope)
        for node in scope.nodes:
            used = unreached.intersection(tensor.name for tensor in (*node.inputs, *node.outputs))
            if plan.by_node[node.name].mode is Mode.STATIC and (scope in idle or used):
                demotions[node.name] = Demotion(Mode.STORAGE, _IDLE if scope in idle else _UNREACHED)
    return demotions


def refuse_idle_nodes(graph: Graph, plan: Plan, statistics: CalibrationStatistics) -> None:
    """Refuse a fixed plan with static nodes that did not run on data in calibration.

    Args:
        graph: the prepared graph.
        plan: the plan to apply unchanged.
        statistics: statistics of the plan's taps.

    Raises:
        DataError: the plan has a static node there; the message names the first.
    """
    for name, demotion in leave_idle_nodes(graph, plan, statistics).items():
        raise DataError(
            f"node {name!r} is static in the plan, but {demotion.reason}; give samples that run it, or change the mode "
            "of these nodes to storage"
        )


def _body_obstacle(node: Node, target: Target, *, in_scan: bool) -> str:
    if not target.kernels.in_bodies:
        return f"in a subgraph of {node.op}, where {target.name} is not known to have integer kernels"
    if node.domain or node.op not in CARRYING:
        return f"in a subgraph of {node.op}, where activations are not calibrated"
    if in_scan and node.op != "Scan":
        return f"in a subgraph of {node.op} inside a Scan, where activations are not calibrated"
    return ""
