"""Integer sums of a quantized model that may not fit the accumulators of some processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.certificate.certificate import Overflow
from onnxq.ir import Graph, Node, all_nodes, is_constant, producer
from onnxq.numerics.pairs import MOST, Pairs, kernel_order, row_shape

_MOST_NAMED = 8
# Largest rank of the weights of 1-D and 2-D convolutions.
_MOST_AXES = 4
_LARGEST_ACTIVATION, _LARGEST_PRODUCT, _LARGEST_SUM = 255, 255 * 128, 2**31 - 1
# The input of the weight of operators on integers; others read it from a DequantizeLinear.
_INTEGER = {"QLinearConv": 3, "QLinearMatMul": 3, "ConvInteger": 1, "MatMulInteger": 1, "DynamicQuantizeMatMul": 1}
_OWN = {"MatMulIntegerToFloat": 1, "QGemm": 3}


def find_overflow(graph: Graph) -> Overflow:
    """Return the nodes that multiply 8-bit activations with int8 weights whose sums may not fit.

    A pair fits if its weights of one sign add up to at most 128, see `onnxq.numerics.pairs`. A sum of 32 bits fits if
    the magnitudes of the weights of one output, times 255, do.
    """
    pairs, sums = [], []
    for _, node in all_nodes(graph):
        weight = _weight(node)
        if weight is None or weight.dtype != np.int8 or weight.ndim < 2:
            continue
        is_conv = node.op in ("Conv", "QLinearConv", "ConvInteger")
        if is_conv and weight.ndim <= _MOST_AXES and weight.shape[:2] == (node.attrs.get("group", 1), 1):
            # Kernels of depthwise convolutions add products in 32 bits.
            continue
        transposed = node.op in ("Gemm", "QGemm") and bool(node.attrs.get("transB"))
        axis, reduction = (0, 1) if is_conv or transposed else (-1, -2)
        ordered = weight.transpose(kernel_order(weight.ndim, axis, reduction)).astype(np.int16)
        rows = ordered.reshape(row_shape(ordered.shape, Pairs.ROW if is_conv else Pairs.TAP))
        name = node.name or node.outputs[0].name
        if _saturates(rows):
            pairs.append(name)
        may_exceed = rows.shape[1] * _LARGEST_PRODUCT > _LARGEST_SUM
        if may_exceed and np.abs(rows).sum(axis=1, dtype=np.int64).max(initial=0) * _LARGEST_ACTIVATION > _LARGEST_SUM:
            sums.append(name)
    return Overflow(_shortened(pairs), _shortened(sums))


def _weight(node: Node) -> npt.NDArray[Any] | None:
    """Return the int8 weight of a node whose activations have 8 bits too."""
    if node.op in _INTEGER or node.op in _OWN:
        tensor = node.inputs[{**_INTEGER, **_OWN}[node.op]]
        return tensor.values if is_constant(tensor) else None
    if node.op not in ("Conv", "MatMul", "Gemm"):
        return None
    data, weight = (producer(entry) for entry in node.inputs[:2])
    if data is None or weight is None or not data.op == weight.op == "DequantizeLinear":
        return None
    codes, activations = weight.inputs[0], data.inputs[0]
    # The zero point has the type of the quantized values, which the graph need not declare.
    dtype = data.inputs[2].dtype if len(data.inputs) > 2 else activations.dtype
    is_coded = is_constant(codes) and not is_constant(activations) and dtype in (None, np.uint8, np.int8)
    return codes.values if is_coded else None


def _saturates(rows: npt.NDArray[np.int16]) -> bool:
    even = rows.shape[1] // 2 * 2
    both = rows[:, :even:2], rows[:, 1:even:2]
    # The products of one sign alone, where the other activation is 0.
    most = sum(np.maximum(terms, 0) for terms in both), sum(np.maximum(-terms, 0) for terms in both)
    return any(int(np.max(sums, initial=0)) > MOST for sums in most)


def _shortened(names: list[str]) -> tuple[str, ...]:
    more = len(names) - _MOST_NAMED
    return tuple(names) if more <= 0 else (*names[:_MOST_NAMED], f"and {more} more")
