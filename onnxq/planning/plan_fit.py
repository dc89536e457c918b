"""Check that a plan was made for a model and that every node can be quantized as it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

from onnx import TensorProto

from onnxq.config.scheme import Mode
from onnxq.errors import SchemeError, did_you_mean
from onnxq.ir import (
    Constant,
    Graph,
    Node,
    all_graphs,
    all_nodes,
    is_constant,
    onnx_dtype,
)
from onnxq.lowering import AllowedOps
from onnxq.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE
from onnxq.numerics.formats import format_named
from onnxq.numerics.pairs import Pairs, may_be_paired
from onnxq.ops import facts_of
from onnxq.planning.activations import check_activation_spec
from onnxq.planning.obstacles import dynamic_obstacle
from onnxq.planning.plan import Decision, Mean, Plan, Preparation
from onnxq.planning.weights import check_weight_spec
from onnxq.runtime.targets import Target, target_named
from onnxq.version import VERSION


def preparation_of(plan: Plan) -> Preparation:
    """Return what a plan was made for, if this version of onnxq made it; other versions may prepare models differently.

    Raises:
        SchemeError: another version made the plan, or the plan lacks its preparation.
    """
    if plan.preparation is None:
        raise SchemeError("the plan has no [preparation] table; write it again with --plan-out")
    if plan.preparation.version != VERSION:
        raise SchemeError(
            f"the plan was made by onnxq {plan.preparation.version}, expected {VERSION}, which is installed; "
            "make it again, or install the other one"
        )
    return plan.preparation


def check_model(plan: Plan, digest: str) -> None:
    """Check that a plan was made for this model, not for one with the same names but other weights or attributes.

    Args:
        plan: from a file.
        digest: of the prepared model.

    Raises:
        SchemeError: the digests differ.
    """
    if plan.preparation is not None and plan.preparation.model != digest:
        raise SchemeError(
            "the plan was made for another model, whose nodes are called alike and whose weights, attributes or shapes "
            "differ; make a plan of this one"
        )


def check_fits(plan: Plan, graph: Graph) -> None:
    """Check that every name in a plan exists in a graph, every node has a decision, and every decision can be applied.

    Args:
        plan: from a file.
        graph: a prepared graph.

    Raises:
        SchemeError: the plan does not fit; the message names the first difference.
    """
    named = {node.name: node for _, node in all_nodes(graph)}
    differences = (
        _node_differences(plan, named),
        _spec_differences(plan),
        _activation_differences(plan, graph),
        _awq_differences(plan, graph),
    )
    for difference in chain.from_iterable(differences):
        raise SchemeError(f"the plan does not fit the model: {difference}")


def _node_differences(plan: Plan, named: Mapping[str, Node]) -> Iterator[str]:
    target = target_named(plan.target)
    for decision in plan.decisions:
        node = named.get(decision.node)
        if node is None:
            yield f"it has no node {decision.node!r}{did_you_mean(decision.node, named)}"
        elif node.op != decision.op_type:
            yield f"node {decision.node!r} is {node.op}, in the plan {decision.op_type}"
        else:
            yield from _input_differences(decision, node)
            yield from _mode_differences(decision, node, target)
    for name, node in named.items():
        if name not in plan.by_node:
            yield f"its {node.op} {name!r} has no entry under nodes{did_you_mean(name, plan.by_node)}"


def _spec_differences(plan: Plan) -> Iterator[str]:
    target = target_named(plan.target)
    for decision in plan.decisions:
        for weight in decision.weights:
            if problem := _refusal(partial(check_weight_spec, weight.spec, decision.mode, target)):
                yield f"{problem}, found at weight {weight.tensor!r} of node {decision.node!r}"
    for activation in plan.activations:
        if problem := _refusal(partial(check_activation_spec, activation.spec, target)):
            yield f"{problem}, found at tensor {activation.tensor!r}"


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except SchemeError as error:
        return str(error)
    return ""


def _input_differences(decision: Decision, node: Node) -> Iterator[str]:
    names = [tensor.name for tensor in node.inputs]
    for weight in decision.weights:
        if not 0 <= weight.index < len(names) or names[weight.index] != weight.tensor:
            suggestion = did_you_mean(weight.tensor, names)
            yield f"input {weight.index} of node {node.name!r} is not {weight.tensor!r}{suggestion}"
            continue
        tensor = node.inputs[weight.index]
        if not is_constant(tensor):
            yield f"weight {weight.tensor!r} of node {node.name!r} is not constant, or an input that a caller may feed"
            continue
        rank = len(tensor.shape)
        for axis in (weight.axis, weight.reduction_axis):
            if not -rank <= axis < rank:
                yield f"weight {weight.tensor!r} of node {node.name!r} has {rank} axes, no axis {axis}"
        if len(weight.scales) not in (0, 1, tensor.shape[weight.axis]) or not all(
            SMALLEST_SCALE <= scale <= LARGEST_SCALE for scale in weight.scales
        ):
            yield (
                f"weight {weight.tensor!r} of node {node.name!r} has {len(weight.scales)} scales, expected one, or one "
                f"for each of {tensor.shape[weight.axis]} channels, all of them positive normal numbers"
            )
        if weight.pairs is not Pairs.NONE and not may_be_paired(format_named(weight.spec.format)):
            yield (
                f"weight {weight.tensor!r} of node {node.name!r} has pairs {str(weight.pairs)!r}, which values of int8 "
                f"alone have to fit in, and is {weight.spec.format}; leave pairs out"
            )
        elif weight.pairs is not Pairs.NONE and weight.axis % rank == weight.reduction_axis % rank:
            yield (
                f"weight {weight.tensor!r} of node {node.name!r} is summed over axis {weight.axis}, along which its "
                "output channels lie, too; give axis and reduction_axis of two axes"
            )
    if decision.bias is not None and not (0 <= decision.bias < len(names) and names[decision.bias]):
        yield f"node {node.name!r} has no input {decision.bias} to be a bias"
    if decision.data and decision.data not in names:
        yield f"node {node.name!r} does not read {decision.data!r}{did_you_mean(decision.data, names)}"
    if decision.mean is not None:
        yield from _mean_differences(decision, decision.mean, node)


def _mean_differences(decision: Decision, mean: Mean, node: Node) -> Iterator[str]:
    if not any(weight.index == 1 for weight in decision.weights):
        yield f"node {node.name!r} has a mean and no weight at input 1 whose rounding it makes up for; leave it out"
        return
    if mean.tensor != node.inputs[0].name:
        yield f"the mean of node {node.name!r} is that of its data {node.inputs[0].name!r}, found {mean.tensor!r}"
    axis = facts_of(node).channels
    if axis is None:
        yield f"node {node.name!r} has a mean, and no {node.op} has a bias that is corrected; leave it out"
    elif mean.axis != axis:
        yield f"the mean of node {node.name!r} is along axis {axis} of its data, found {mean.axis}"


def _mode_differences(decision: Decision, node: Node, target: Target) -> Iterator[str]:
    indices = sorted(weight.index for weight in decision.weights)
    if decision.mode is Mode.FLOAT and indices:
        yield f"node {node.name!r} is float and has weights that are quantized; leave them out"
    if decision.mode is Mode.WEIGHT_ONLY and not indices:
        yield f"node {node.name!r} is weight-only and lacks weights; give them, or make it float"
    if decision.mode is Mode.DYNAMIC and not (indices and decision.data):
        yield f"node {node.name!r} is dynamic and lacks weights or data"
    elif decision.mode is Mode.DYNAMIC:
        whole = sorted(facts_of(node).weights) if node.op in target.kernels.own_dynamic else [1]
        if indices != whole:
            yield f"node {node.name!r} is dynamic and its weights are inputs {whole}, found {indices}"
        elif problem := dynamic_obstacle(node, target, AllowedOps.ORT):
            yield f"node {node.name!r} cannot be dynamic: {problem}"
    elif decision.mode is Mode.STATIC and indices and indices != [1]:
        yield f"node {node.name!r} is static and its weight is input 1, found {indices}"
    if decision.mode in (Mode.STATIC, Mode.DYNAMIC) and indices and decision.data != node.inputs[0].name:
        yield f"the data of node {node.name!r} is {node.inputs[0].name!r}, found {decision.data!r}"


def _activation_differences(plan: Plan, graph: Graph) -> Iterator[str]:
    # A dictionary keeps graph order, so that suggestions are always the same.
    tensors: dict[str, None] = {}
    stored = set[str]()
    for scope in all_graphs(graph):
        visible = [*scope.inputs, *(tensor for node in scope.nodes for tensor in (*node.inputs, *node.outputs))]
        tensors |= dict.fromkeys(tensor.name for tensor in visible if not isinstance(tensor, Constant))
        stored |= {tensor.name for tensor in visible if is_constant(tensor) and onnx_dtype(tensor) == TensorProto.FLOAT}
    for activation in plan.activations:
        constants = stored if activation.fixed_range is not None else set()
        for name in (activation.tensor, activation.group):
            if name not in tensors and name not in constants:
                yield f"it has no tensor {name!r} that is fed or computed{did_you_mean(name, tensors)}"
    scaled = {activation.tensor for activation in plan.activations}
    for decision in plan.decisions:
        if decision.mode is Mode.STATIC and decision.weights and decision.data not in scaled:
            yield f"node {decision.node!r} is static and its data {decision.data!r} has no entry under activations"


def _awq_differences(plan: Plan, graph: Graph) -> Iterator[str]:
    computed = {tensor.name: tensor for node in graph.nodes for tensor in node.outputs} if plan.awq else {}
    for awq in plan.awq:
        tensor = computed.get(awq.tensor)
        if tensor is None:
            yield f"it has no tensor {awq.tensor!r} that is computed{did_you_mean(awq.tensor, computed)}"
        elif not tensor.shape or tensor.shape[-1] != len(awq.factors):
            extents = "of unknown shape" if tensor.shape is None else f"of shape {tensor.shape}"
            yield f"tensor {awq.tensor!r} is {extents}, found {len(awq.factors)} factors for its last axis"
        elif not all(0 < factor < math.inf for factor in awq.factors):
            yield f"the factors of tensor {awq.tensor!r} are above 0 and finite, found others"
