"""What DequantizeLinear means, equal bit for bit to what onnxruntime computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def dequantize_linear(
    codes: Array,
    scale: Array,
    zero_point: Array | None = None,
    axis: int = 1,
    block_size: int = 0,
    dtype: npt.DTypeLike | None = None,
) -> Array:
    """Return what ONNX's DequantizeLinear gives, computed in float32 and rounded last, as onnxruntime does.

    Args:
        codes: of any integer or small float type.
        scale: a number, a vector along ``axis``, blocks along it, or a shape that broadcasts against the codes.
        zero_point: of the scale's shape or one number; None for zero.
        axis: axis that a vector or blocks of scales lie along.
        block_size: codes along ``axis`` that share a scale; 0 when each index has its own.
        dtype: of the result; by default that of the scale.

    >>> dequantize_linear(np.array([[1, 3], [5, 7]], np.uint8), np.float32([0.5, 2]), np.uint8([1, 3]))
    array([[0., 0.],
           [2., 8.]], dtype=float32)
    """
    wanted = np.dtype(scale.dtype if dtype is None else dtype)
    spread = partial(_spread, shape=codes.shape, axis=axis, block_size=block_size)
    if zero_point is not None and codes.dtype.kind in "iu" and codes.dtype.itemsize > 2:
        # float32 does not hold every difference of codes so wide.
        codes, zero_point = np.subtract(codes, spread(zero_point), dtype=np.int64), None
    # Differences of single numbers are no arrays.
    values = np.array(codes, np.float32)
    if zero_point is not None:
        np.subtract(values, spread(zero_point.astype(np.float32)), out=values)
    with np.errstate(all="ignore"):
        np.multiply(values, spread(scale.astype(np.float32)), out=values)
        return values.astype(wanted, copy=False)


def _spread(parameter: Array, *, shape: tuple[int, ...], axis: int, block_size: int) -> Array:
    """Return a scale or zero point in a shape that broadcasts against the codes."""
    if parameter.size == 1:
        return parameter.reshape(())
    along = axis % len(shape) if axis < len(shape) else 0
    if block_size:
        return np.repeat(parameter, block_size, axis=along)[(slice(None),) * along + (slice(shape[along]),)]
    if parameter.ndim == 1:
        return parameter.reshape([-1 if index == along else 1 for index in range(len(shape))])
    return parameter
