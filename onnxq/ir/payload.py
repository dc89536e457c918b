"""Payloads: the values of a constant, kept in the form they came in until somebody asks for an array."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

from onnxq.errors import ModelError
from onnxq.ir.data_types import data_type_name, data_type_of, is_known, is_packed, numpy_dtype, stored_bytes

CHUNK_BYTES = 1 << 24
"""Pieces of at most this size are streamed from arrays."""

# What numpy 1 can hold, and far more than any operator takes.
_MOST_DIMENSIONS = 32

Keep: TypeAlias = "Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]]"
KEEP: ContextVar[Keep] = ContextVar("keep", default=lambda array: array)
"""Where the arrays of new constants are kept: in memory, unless somebody puts equal ones elsewhere."""

Bytes: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"


class Payload(LazyValues):
    """The values of one constant.

    Attributes:
        onnx_dtype: ``TensorProto.DataType`` of the elements.
        shape: the dimensions.
    """

    onnx_dtype: int
    shape: tuple[int, ...]

    @property
    def external(self) -> bool:
        """Whether the values lie in a file beside the model."""
        return False

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype of the loaded array."""
        dtype = numpy_dtype(self.onnx_dtype)
        assert dtype is not None, "every payload checks its type when it is made"
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form (packed types count packed); 0 for strings."""
        return stored_bytes(self.onnx_dtype, math.prod(self.shape))

    @property
    def stored(self) -> npt.NDArray[np.generic] | None:
        """The array whose bytes are the stored form; None where there is none."""
        return None

    @property
    def tensor(self) -> TensorProto:
        """The values as an unnamed TensorProto, for GraphSurgeon."""
        return self.to_proto("")

    @property
    def ends(self) -> str:
        """The first and the last element, which tell most constants apart without all being read.

        They stay where they are when the values are reshaped or transposed. Empty where they are not told: of strings,
        of packed types, and where there is no element.
        """
        if is_packed(self.onnx_dtype) or not self.nbytes:
            return ""
        values = self.load()
        return f"{values[(0,) * values.ndim].item()!r} {values[(-1,) * values.ndim].item()!r}"

    def load(self) -> npt.NDArray[np.generic]:
        """Return the values; the array is read-only unless the payload was made from an array."""
        array = np.asarray(numpy_helper.to_array(self.to_proto("")))
        array.flags.writeable = False
        return array

    def fill(self, proto: TensorProto, name: str) -> None:
        """Write name, type, shape and values into an empty TensorProto."""
        self.fill_without_values(proto, name)
        proto.raw_data = b"".join(self.chunks())

    def fill_without_values(self, proto: TensorProto, name: str) -> None:
        """Write everything but the values, and where they lie, into an empty TensorProto."""
        if name:
            proto.name = name
        proto.data_type = self.onnx_dtype
        proto.dims.extend(self.shape)

    def to_proto(self, name: str) -> TensorProto:
        """Return a new TensorProto that holds the values itself."""
        proto = TensorProto()
        self.fill(proto, name)
        return proto

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order, in pieces fit for writing to a file; strings have none."""
        yield memoryview(self.to_proto("").raw_data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({data_type_name(self.onnx_dtype)}, shape={self.shape})"

    __str__ = __repr__


@dataclass(frozen=True, eq=False, repr=False)
class ArrayPayload(Payload):
    """Values in a numpy array, which is not copied unless it is spilled to a file.

    Attributes:
        array: any array of a type that ONNX has.
    """

    array: npt.NDArray[np.generic]

    def __post_init__(self) -> None:
        data_type_of(self.array.dtype)
        object.__setattr__(self, "array", KEEP.get()(self.array))

    @property
    def onnx_dtype(self) -> int:  # type: ignore[override]
        """``TensorProto.DataType`` of the elements."""
        return data_type_of(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The dimensions."""
        return self.array.shape

    @property
    def stored(self) -> npt.NDArray[np.generic] | None:
        """The array, unless its elements are packed."""
        return None if is_packed(self.onnx_dtype) else self.array

    def load(self) -> npt.NDArray[np.generic]:
        """Return the array itself."""
        return self.array

    def fill(self, proto: TensorProto, name: str) -> None:
        """Write name, type, shape and values into an empty TensorProto."""
        if self.onnx_dtype != TensorProto.STRING:
            super().fill(proto, name)
            return
        self.fill_without_values(proto, name)
        proto.string_data.extend(x if isinstance(x, bytes) else str(x).encode() for x in self.array.reshape(-1))

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        native = self.array.dtype.newbyteorder("<") if self.array.dtype.kind in "iufc" else self.array.dtype
        if is_packed(self.onnx_dtype):
            yield memoryview(numpy_helper.from_array(self.array).raw_data)
            return
        flat = np.ascontiguousarray(self.array, native).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES].data


@dataclass(frozen=True, eq=False, repr=False)
class PackedPayload(Payload):
    """Raw data as ONNX stores it, for types that share bytes between elements and for any other.

    Attributes:
        onnx_dtype: ``TensorProto.DataType`` of the elements.
        shape: the dimensions, counted in elements.
        data: the bytes; 4-bit types put the first element in the low half, 2-bit types in the lowest quarter.

    >>> PackedPayload(TensorProto.INT4, (3,), bytes([0x21, 0x03])).load()
    array([1, 2, 3], dtype=int4)
    """

    onnx_dtype: int
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        check_type_and_dims("packed data", self.onnx_dtype, self.shape)
        if self.onnx_dtype == TensorProto.STRING:
            raise ModelError("packed data cannot hold strings; make the constant from an array")
        found = _bytes(self.data).nbytes
        if found != self.nbytes:
            raise ModelError(
                f"packed data of {data_type_name(self.onnx_dtype)} with shape {list(self.shape)} "
                f"takes {self.nbytes} bytes, found {found}"
            )
        # Arrays stay what they are, so that one that is kept somewhere already is not kept twice.
        stored = _as_bytes(self.data)
        if (kept := KEEP.get()(stored)) is not stored:
            object.__setattr__(self, "data", kept)

    @property
    def stored(self) -> npt.NDArray[np.generic] | None:
        """The bytes, where they are an array."""
        return self.data if isinstance(self.data, np.ndarray) else None

    def load(self) -> npt.NDArray[np.generic]:
        """Return the values; the array is read-only."""
        if is_packed(self.onnx_dtype):
            return super().load()
        array = np.frombuffer(_bytes(self.data), self.dtype).reshape(self.shape)
        array.flags.writeable = False
        return array

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        yield _bytes(self.data)


def check_type_and_dims(subject: str, data_type: int, dims: tuple[int, ...]) -> None:
    """Raise ModelError when no tensor can have this type and these dimensions."""
    if not is_known(data_type):
        raise ModelError(f"{subject} has {data_type_name(data_type)}, which this version of onnx cannot store")
    if len(dims) > _MOST_DIMENSIONS:
        raise ModelError(f"{subject} has {len(dims)} dimensions, expected at most {_MOST_DIMENSIONS}")
    if any(size < 0 for size in dims):
        raise ModelError(f"{subject} has the shape {list(dims)}; the dimensions of stored values cannot be negative")


def _as_bytes(data: Bytes) -> npt.NDArray[np.uint8]:
    if isinstance(data, np.ndarray) and data.flags.c_contiguous:
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(_bytes(data), np.uint8)


def _bytes(data: Bytes) -> memoryview:
    return (np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
