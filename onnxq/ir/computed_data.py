"""Values of constants that each load computes again, so that a model of them need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.errors import ModelError
from onnxq.ir.data_types import data_type_of
from onnxq.ir.tensor_data import ArrayData, TensorData
from onnxq.numerics.affine import Array

# Results below this many bytes are computed at once and kept.
_COMPUTED_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class LazyTensor(TensorData):
    """Values that each load computes again, so that a model of them need not fit into memory.

    Attributes:
        compute: returns the values.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    compute: Callable[[], Array]

    def load(self) -> Array:
        """Return the values, computed again.

        Raises:
            ModelError: The computation fails, or gives another type or shape than declared.
        """
        values = ArrayData(_sound(self.compute))
        if (values.onnx_dtype, values.shape) != (self.onnx_dtype, self.shape):
            raise ModelError(
                f"a dequantized weight is {values}, expected {self} as the model declares; correct its type or shape"
            )
        return values.array


def computed(compute: Callable[[], Array], onnx_type: int = 0, shape: Sequence[object] | None = None) -> TensorData:
    """Return tensor data that ``compute`` gives.

    A result of 64 KiB or more is not kept. If ``onnx_type`` and ``shape`` are given, it is not even computed now.
    """
    sizes = tuple(size for size in shape or () if isinstance(size, int))
    if onnx_type and shape is not None and len(sizes) == len(shape):
        tensor_data = LazyTensor(onnx_type, sizes, compute)
        return tensor_data if tensor_data.nbytes >= _COMPUTED_AT_ONCE else ArrayData(tensor_data.load())
    values = ArrayData(_sound(compute))
    return LazyTensor(values.onnx_dtype, values.shape, compute) if values.nbytes >= _COMPUTED_AT_ONCE else values


def _sound(compute: Callable[[], Array]) -> Array:
    """Report invalid shapes and types of the model, at which numpy raises."""
    try:
        return compute()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"quantized values, scale and zero point of a weight do not fit together: {error}; check the model"
        ) from error


@dataclass(frozen=True, eq=False, repr=False)
class DerivedTensor(TensorData):
    """Values of another tensor in another layout or type, derived on each load.

    Attributes:
        source: the other tensor.
        derive: makes these values of the values of ``source``.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    source: TensorData
    derive: Callable[[Array], Array]

    def load(self) -> Array:
        """Return the values as a contiguous array."""
        # A loop, not recursion: a chain is as long as the chain of nodes behind it.
        derivations, source = [self.derive], self.source
        while isinstance(source, DerivedTensor):
            derivations.append(source.derive)
            source = source.source
        values = source.load()
        for derive in reversed(derivations):
            values = derive(values)
        return np.ascontiguousarray(values).reshape(self.shape)


def derived(source: TensorData, derive: Callable[[Array], Array], dtype: np.dtype[Any] | None = None) -> TensorData:
    """Return tensor data that ``derive`` makes of ``source``; results of less than 64 KiB are computed at once.

    Args:
        source: kept instead of a large result.
        derive: makes a view of any array of that shape and type, or casts each element.
        dtype: the type of a cast; None for views.

    Raises:
        ValueError: ``derive`` fails for this shape.
    """
    if source.nbytes < _COMPUTED_AT_ONCE:
        return ArrayData(np.asarray(derive(source.load())))
    if dtype is not None:
        return DerivedTensor(data_type_of(dtype), source.shape, source, derive)
    # A broadcast single element gives the shape without loading values.
    shape = derive(np.broadcast_to(np.zeros((), source.dtype), source.shape)).shape
    return DerivedTensor(source.onnx_dtype, shape, source, derive)
