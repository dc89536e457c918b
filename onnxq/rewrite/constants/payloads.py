"""Values of constants that are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.errors import ModelError
from onnxq.ir import ArrayPayload, Payload
from onnxq.ir.data_types import data_type_of

Array = npt.NDArray[Any]

# Results of fewer bytes are computed at once and kept.
_SMALL = 1 << 16


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


@dataclass(frozen=True, eq=False, repr=False)
class DerivedPayload(Payload):
    """Values of another payload, laid out or typed otherwise whenever they are asked for.

    Attributes:
        onnx_dtype: ``TensorProto.DataType`` of the elements.
        shape: the dimensions.
        source: what they come from.
        derive: returns them, given those of the source.
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    source: Payload
    derive: Callable[[Array], Array]

    def load(self) -> Array:
        """Return the values, one row behind the other in memory."""
        # A loop: chains of these are as long as those of the nodes that they stand for.
        derivations, source = [self.derive], self.source
        while isinstance(source, DerivedPayload):
            derivations.append(source.derive)
            source = source.source
        values = source.load()
        for derive in reversed(derivations):
            values = derive(values)
        return np.ascontiguousarray(values).reshape(self.shape)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        yield from ArrayPayload(self.load()).chunks()


def derived(source: Payload, derive: Callable[[Array], Array], dtype: np.dtype[Any] | None = None) -> Payload:
    """Return a payload of what ``derive`` makes of the values of another, at once where these are few.

    Args:
        source: the payload that is kept in the place of a large result.
        derive: makes a view of any array of that shape and type, or casts each element.
        dtype: what is cast to; None for views.

    Raises:
        ValueError: the values cannot be derived.
    """
    if source.nbytes < _SMALL:
        return ArrayPayload(np.asarray(derive(source.load())))
    if dtype is not None:
        return DerivedPayload(data_type_of(dtype), source.shape, source, derive)
    # One element that is seen as all of them tells the shape.
    shape = derive(np.broadcast_to(np.zeros((), source.dtype), source.shape)).shape
    return DerivedPayload(source.onnx_dtype, shape, source, derive)
