"""Weights without numbers that processors are slow to multiply by."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.ir import Constant, Graph, is_fixed, nodes, onnx_dtype
from onnxq.ops import Role, operator_of
from onnxq.rewrite import Changes, Pass

_PRODUCTS: Final = frozenset({Role.COMPUTE, Role.WEIGHTED})
# Beside a number so large, denormals are lost in the rounding of any sum.
_HIDES_DENORMALS: Final = 2.0**-100
# Of a float32 the bits of the exponent, which are zero in denormals and in zero, and those but for the sign.
_EXPONENT, _UNSIGNED = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


class FlushDenormals(Pass):
    """Set the elements of float32 weights to zero that are denormal, below 1.2e-38.

    Training with weight decay leaves such weights behind. No sum shows them, but processors take many times as long to
    multiply by one. Leaves constants that are no weights of products, such as what keeps a divisor from zero, and
    weights that hold nothing much larger.
    """

    def apply(self, graph: Graph) -> Changes:
        """Flush; ``changed`` holds the names of the weights."""
        weights: dict[Constant, None] = {}
        for _, node in nodes(graph):
            operator = operator_of(node)
            if operator is not None and operator.role in _PRODUCTS:
                read = (node.inputs[index] for index in operator.weights if index < len(node.inputs))
                weights.update(dict.fromkeys(tensor for tensor in read if is_fixed(tensor)))
        floats = (tensor for tensor in weights if onnx_dtype(tensor) == TensorProto.FLOAT)
        changed = [tensor for tensor in floats if _has_denormals(tensor) and _largest(tensor) >= _HIDES_DENORMALS]
        for tensor in changed:
            values = np.ascontiguousarray(tensor.values)
            tensor.values = np.where(_are_denormal(values.view(np.uint32)), np.float32(0), values)
        return Changes(tuple(tensor.name for tensor in changed))


def _has_denormals(tensor: Constant) -> bool:
    """Whether any element is denormal, read in pieces."""
    return any(bool(_are_denormal(np.frombuffer(piece, np.uint32)).any()) for piece in tensor.payload.chunks())


def _largest(tensor: Constant) -> float:
    """Return the largest finite magnitude, read in pieces."""
    pieces = (np.abs(np.frombuffer(piece, np.float32)) for piece in tensor.payload.chunks())
    return max((float(piece.max(initial=0.0, where=np.isfinite(piece))) for piece in pieces), default=0.0)


def _are_denormal(bits: NDArray[np.uint32]) -> NDArray[Any]:
    small: NDArray[Any] = (bits & _EXPONENT) == 0
    if small.any():
        small &= (bits & _UNSIGNED) != 0
    return small
