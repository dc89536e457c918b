"""What constant codes mean: the float values of weights, equal bit for bit to what onnxruntime computes from them."""

from __future__ import annotations

from typing import Final

from onnxq.ir import Names, TensorData
from onnxq.rewrite.constant_folding import Array, computed, dequantize_linear

# What onnxq and onnxruntime.quantization append to the name of a weight.
_SUFFIXES: Final = (".codes", "_quantized")


def value_name(codes: str, names: Names, otherwise: str = "") -> str:
    """Return and take a name for the floats behind codes: what they were called before, where that is known and free.

    >>> from onnxq.ir import Graph
    >>> value_name("w.codes", Names(Graph())), value_name("c", Names(Graph()))
    ('w', 'c.values')
    """
    base = next((codes.removesuffix(suffix) for suffix in _SUFFIXES if codes.endswith(suffix)), "")
    if base and base not in names:
        return names.unique(base)
    return otherwise or names.unique(f"{codes}.values")


def dequantized(codes: TensorData, scale: TensorData, zero_point: TensorData | None, axis: int = 1) -> TensorData:
    """Return ``(codes - zero point) * scale`` in the type of the scale.

    Args:
        codes: of any integer or 8-bit float type.
        scale: one number, one for each index of ``axis``, or a shape that broadcasts against the codes.
        zero_point: of the scale's shape or one number; None for zero.
        axis: axis of the codes that a vector of scales lies along.
    """

    def compute() -> Array:
        zero = None if zero_point is None else zero_point.load()
        return dequantize_linear(codes.load(), scale.load(), zero, axis)

    return computed(compute, scale.onnx_dtype, codes.shape)
