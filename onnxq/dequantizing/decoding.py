"""What constant codes mean: the float values of weights, equal bit for bit to what onnxruntime computes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.errors import ModelError
from onnxq.graph import ArrayPayload, Names, Payload

Array = npt.NDArray[Any]

# Results of fewer bytes are computed at once and kept.
_SMALL = 1 << 16
# What onnxq and onnxruntime.quantization append to the name of a weight.
_SUFFIXES: Final = (".codes", "_quantized")


@dataclass(frozen=True, eq=False, repr=False)
class ComputedPayload(Payload):
    """Values that are computed whenever they are asked for, so that a model of them need not fit into memory.

    Attributes:
        onnx_dtype: ``TensorProto.DataType`` of the elements.
        shape: the dimensions.
        compute: returns the values.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    compute: Callable[[], Array]

    def load(self) -> Array:
        """Return the values, computed anew.

        Raises:
            ModelError: they cannot be computed, or have another type or shape than the model says.
        """
        found = ArrayPayload(_sound(self.compute))
        if (found.onnx_dtype, found.shape) != (self.onnx_dtype, self.shape):
            raise ModelError(f"decoding a weight gave {found}, but the model says {self}; correct its declarations")
        return found.array

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        yield from ArrayPayload(self.load()).chunks()


def computed(compute: Callable[[], Array], onnx_type: int = 0, shape: Sequence[object] | None = None) -> Payload:
    """Return a payload of what ``compute`` gives; large values are not kept where type and shape are known."""
    sizes = tuple(size for size in shape or () if isinstance(size, int))
    if onnx_type and shape is not None and len(sizes) == len(shape):
        payload = ComputedPayload(onnx_type, sizes, compute)
        return payload if payload.nbytes >= _SMALL else ArrayPayload(payload.load())
    found = ArrayPayload(_sound(compute))
    return ComputedPayload(found.onnx_dtype, found.shape, compute) if found.nbytes >= _SMALL else found


def _sound(compute: Callable[[], Array]) -> Array:
    """Compute; what numpy refuses is a fault of the model."""
    try:
        return compute()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"codes, scale and zero point of a weight do not fit together: {error}; check the model"
        ) from error


def value_name(codes: str, names: Names, otherwise: str = "") -> str:
    """Return and take a name for the floats behind codes: what they were called before, where that is known and free.

    >>> from onnxq.graph import Graph
    >>> value_name("w.codes", Names(Graph())), value_name("c", Names(Graph()))
    ('w', 'c.values')
    """
    base = next((codes.removesuffix(suffix) for suffix in _SUFFIXES if codes.endswith(suffix)), "")
    if base and base not in names:
        return names.fresh(base)
    return otherwise or names.fresh(f"{codes}.values")


def dequantized(codes: Payload, scale: Payload, zero_point: Payload | None, axis: int = 1) -> Payload:
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
    values = codes.astype(np.float32)
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
