"""Where a bias can make up for what rounding a weight adds to the mean of each output channel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from onnx import TensorProto

from onnxq.ir import Graph, Node, Variable, is_fixed, onnx_dtype, operator_key, optional
from onnxq.ops import OPERATORS, operator_of
from onnxq.planning.obstacles import scales_its_terms, volume
from onnxq.planning.plan import Decision, Mean

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
    if not isinstance(data, Variable) or not is_fixed(weight):
        return None
    if onnx_dtype(data) not in _FLOATS or onnx_dtype(weight) not in _FLOATS:
        return None
    # A matrix product has none of its own.
    added = _added(node) if operator.bias is None and len(weight.shape) == 2 else None
    place = added if operator.bias is None else (node, operator.bias)
    bias = optional(*place) if place else None
    if place and bias is None and not operator.product:
        return place
    if not is_fixed(bias) or onnx_dtype(bias) not in _FLOATS:
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
    return (reader, index) if is_fixed(reader.inputs[index]) else None
