"""The values of constants in the form in which they were read or made: arrays, packed bytes, protos, external data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from onnxq.errors import ModelError
from onnxq.ir.data_types import (
    bits_per_element,
    data_type_name,
    data_type_of,
    is_known,
    is_packed,
    numpy_dtype,
    stored_bytes,
)
from onnxq.ir.external_data import DataFolder, DataRange, locate

CHUNK_BYTES = 1 << 24
"""Values are streamed in pieces of at most this size."""

# The limit of numpy 1, far above the rank of any operator's inputs.
_MOST_DIMENSIONS = 32
# Bytes of packed data that distinguish most constants.
_LOOKED_AT = 64

Bytes: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"


class TensorData(LazyValues):
    """The values of one constant; ``onnx_dtype`` is the ``TensorProto.DataType`` of the elements."""

    onnx_dtype: int
    shape: tuple[int, ...]

    @property
    def external(self) -> bool:
        """Whether the values lie in a file beside the model."""
        return False

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype of `load`."""
        dtype = numpy_dtype(self.onnx_dtype)
        assert dtype is not None, "the type is checked when the tensor is made"
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form, packed if the type is packed; 0 for strings."""
        return stored_bytes(self.onnx_dtype, math.prod(self.shape))

    @property
    def stored(self) -> npt.NDArray[np.generic] | None:
        """The array whose bytes are the stored form; None if there is none."""
        return None

    @property
    def tensor(self) -> TensorProto:
        """The values as an unnamed TensorProto, for GraphSurgeon."""
        return self.to_proto("")

    @property
    def fingerprint(self) -> str:
        """The first and the last element, which distinguish most constants without reading all values.

        Reshaping and transposing keep both in their places. Of packed types, the first bytes. Empty for strings and
        tensors without elements.
        """
        if is_packed(self.onnx_dtype):
            return bytes(next(self.chunks(), b"")[:_LOOKED_AT]).hex()
        if not self.nbytes:
            return ""
        values = self.load()
        return f"{values[(0,) * values.ndim].item()!r} {values[(-1,) * values.ndim].item()!r}"

    def digest(self) -> bytes:
        """Return a 20-byte BLAKE2b hash of the stored bytes, which are read in chunks."""
        digest = hashlib.blake2b(digest_size=20)
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.digest()

    def load(self) -> npt.NDArray[np.generic]:
        """Return the values. The array is read-only unless it is an `ArrayData`."""
        array = np.asarray(numpy_helper.to_array(self.to_proto("")))
        array.flags.writeable = False
        return array

    def fill(self, proto: TensorProto, name: str) -> None:
        """Write name, type, shape and values into an empty TensorProto."""
        self.fill_without_values(proto, name)
        proto.raw_data = b"".join(self.chunks())

    def fill_without_values(self, proto: TensorProto, name: str) -> None:
        """Write name, type and shape into an empty TensorProto, without values or their location."""
        if name:
            proto.name = name
        proto.data_type = self.onnx_dtype
        proto.dims.extend(self.shape)

    def to_proto(self, name: str) -> TensorProto:
        """Return a new TensorProto that contains the values."""
        proto = TensorProto()
        self.fill(proto, name)
        return proto

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order, in pieces fit for writing to a file; strings have no raw data."""
        yield from ArrayData(self.load()).chunks()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({data_type_name(self.onnx_dtype)}, shape={self.shape})"

    __str__ = __repr__


@dataclass(frozen=True, eq=False, repr=False)
class ArrayData(TensorData):
    """Values in a numpy array, which is not copied."""

    array: npt.NDArray[np.generic]

    def __post_init__(self) -> None:
        data_type_of(self.array.dtype)

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
class PackedTensor(TensorData):
    """Raw data as ONNX stores it, for any type but strings.

    4-bit types store the first element in the low half of a byte, 2-bit types in the lowest quarter. The shape counts
    elements.

    >>> PackedTensor(TensorProto.INT4, (3,), bytes([0x21, 0x03])).load()
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
        if (size := _bytes(self.data).nbytes) != self.nbytes:
            raise ModelError(
                f"packed data of {data_type_name(self.onnx_dtype)} with shape {list(self.shape)} "
                f"takes {self.nbytes} bytes, found {size}"
            )

    @property
    def stored(self) -> npt.NDArray[np.generic] | None:
        """The bytes, if they are an array."""
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
    """Raise ModelError if no tensor can have this type and these dimensions."""
    if not is_known(data_type):
        raise ModelError(f"{subject} has {data_type_name(data_type)}, which this version of onnx cannot store")
    if len(dims) > _MOST_DIMENSIONS:
        raise ModelError(f"{subject} has {len(dims)} dimensions, expected at most {_MOST_DIMENSIONS}")
    if any(size < 0 for size in dims):
        raise ModelError(f"{subject} has the shape {list(dims)}; the dimensions of stored values cannot be negative")


def _bytes(data: Bytes) -> memoryview:
    return (np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


# Tensors as read from a model

# For each type, the field that stores it without raw data, and the number of entries per element.
_TYPED_FIELDS: Final[dict[int, tuple[str, int]]] = {
    TensorProto.FLOAT: ("float_data", 1),
    TensorProto.COMPLEX64: ("float_data", 2),
    TensorProto.DOUBLE: ("double_data", 1),
    TensorProto.COMPLEX128: ("double_data", 2),
    TensorProto.INT64: ("int64_data", 1),
    TensorProto.UINT32: ("uint64_data", 1),
    TensorProto.UINT64: ("uint64_data", 1),
    TensorProto.STRING: ("string_data", 1),
}
# `fill_without_values` copies fields one by one, because CopyFrom would copy all values.
_VALUES = {"raw_data", "int32_data", "external_data", "data_location", "segment"} | {
    x for x, _ in _TYPED_FIELDS.values()
}
_DESCRIBING = tuple(field.name for field in TensorProto.DESCRIPTOR.fields if field.name not in _VALUES)


@dataclass(frozen=True, eq=False, repr=False)
class ProtoTensor(TensorData):
    """Values of a TensorProto as read from a model, inline or in an external file. The proto is never changed.

    Raises:
        ModelError: type, dimensions and data do not fit together.
    """

    proto: TensorProto
    folder: DataFolder | None = None

    def __post_init__(self) -> None:
        check_type_and_dims(f"tensor {self.proto.name!r}", self.onnx_dtype, self.shape)
        if self.proto.HasField("segment"):
            raise ModelError(f"tensor {self.proto.name!r} is stored in segments, which ONNX never defined")
        if not self.external:
            self._check_inline_size()
        elif self.onnx_dtype == TensorProto.STRING:
            raise ModelError(f"tensor {self.proto.name!r} holds strings, which external data cannot store")
        elif self.folder is not None:
            locate(self.proto, self.folder, self.nbytes)

    def _check_inline_size(self) -> None:
        elements = math.prod(self.shape)
        if self.proto.HasField("raw_data"):
            actual, expected, unit = len(self.proto.raw_data), self.nbytes, "bytes of raw data"
        else:
            field, width = _TYPED_FIELDS.get(self.onnx_dtype, ("int32_data", 1))
            actual, expected, unit = len(getattr(self.proto, field)), elements * width, f"entries of {field}"
            if _shares_entries(self.onnx_dtype):
                expected = self.nbytes
        if actual != expected:
            raise ModelError(
                f"tensor {self.proto.name!r} of type {data_type_name(self.onnx_dtype)} with shape {list(self.shape)} "
                f"needs {expected} {unit}, found {actual}; the model is damaged"
            )

    @property
    def onnx_dtype(self) -> int:  # type: ignore[override]
        """``TensorProto.DataType`` of the elements."""
        return self.proto.data_type

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The dimensions."""
        return tuple(self.proto.dims)

    @property
    def external(self) -> bool:
        """Whether the values lie in a file beside the model."""
        return self.proto.data_location == TensorProto.EXTERNAL

    def lies_in(self, folder: Path) -> bool:
        """Return whether the values are external data of a model in this folder, a resolved path."""
        return self.external and self.folder is not None and self.folder.path.resolve() == folder

    def data_range(self) -> DataRange:
        """Return where the external values lie.

        Raises:
            ModelError: the file is unsafe, missing, too short, or changed after the model was read.
        """
        return locate(self.proto, self.folder, self.nbytes)

    @cached_property
    def fingerprint(self) -> str:
        """As `TensorData.fingerprint`, computed once because tensors that were read never change."""
        return super().fingerprint

    def load(self) -> npt.NDArray[np.generic]:
        """Return the values. The array is read-only; external values are mapped from the file."""
        if self.onnx_dtype == TensorProto.STRING:
            return _strings(self.proto.string_data, self.shape)
        if self.external and not is_packed(self.onnx_dtype):
            return self.data_range().view().view(self.dtype).reshape(self.shape)
        if self.proto.HasField("raw_data") and not is_packed(self.onnx_dtype) and self.nbytes:
            return np.frombuffer(self.proto.raw_data, self.dtype).reshape(self.shape)
        return super().load()

    def fill(self, proto: TensorProto, name: str) -> None:
        """Write all fields of the source tensor into an empty TensorProto; external values are read in."""
        if self.external:
            self.fill_without_values(proto, name)
            proto.raw_data = self.data_range().view().tobytes()
            return
        proto.CopyFrom(self.proto)
        _rename(proto, name)

    def fill_without_values(self, proto: TensorProto, name: str) -> None:
        """Write all fields except the values and their location into an empty TensorProto."""
        for field in _DESCRIBING:
            if isinstance(value := getattr(self.proto, field), str | int):
                if self.proto.HasField(field):
                    setattr(proto, field, value)
            else:
                getattr(proto, field).extend(value)
        _rename(proto, name)

    def fill_reference(self, proto: TensorProto, name: str) -> None:
        """Write the source tensor with its reference to external data into an empty TensorProto."""
        proto.CopyFrom(self.proto)
        _rename(proto, name)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the raw data in order."""
        if self.external:
            view = self.data_range().view()
            for start in range(0, view.size, CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES].data
        elif self.proto.HasField("raw_data"):
            yield memoryview(self.proto.raw_data)
        elif _shares_entries(self.onnx_dtype):
            yield memoryview(bytes(value & 0xFF for value in self.proto.int32_data))
        else:
            yield from ArrayData(np.asarray(numpy_helper.to_array(self.proto))).chunks()


def as_tensor_data(values: npt.NDArray[Any] | LazyValues, export_dtype: object = None) -> TensorData:
    """Return the data of an array, cast to ``export_dtype`` if it is given, or of GraphSurgeon's lazy values.

    Raises:
        ModelError: the values are sparse, or of a type that ONNX does not have.
    """
    if isinstance(values, TensorData):
        return values
    if isinstance(values, SparseValues):
        raise ModelError("sparse values cannot become a Constant; give a dense array")
    if isinstance(values, LazyValues):
        return ProtoTensor(values.tensor)
    if not isinstance(values, np.ndarray | np.generic):
        raise ModelError(f"the values of a constant must be a numpy array, found {type(values).__name__}")
    array = np.asarray(values)
    try:
        if array.dtype == object and not all(isinstance(value, str | bytes) for value in array.flat):
            raise TypeError("only text can be stored as objects")  # noqa: TRY301 - one message for both
        if export_dtype is not None and data_type_of(export_dtype) != data_type_of(array.dtype):
            array = array.astype(numpy_dtype(data_type_of(export_dtype)))
        return ArrayData(array)
    except TypeError as error:
        raise ModelError(f"a constant cannot be made of {array.dtype} values: {error}") from error


def _shares_entries(data_type: int) -> bool:
    return is_packed(data_type) and 8 % bits_per_element(data_type) == 0


def _strings(values: Iterable[bytes], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Return an array of text, or of bytes if a value is not UTF-8."""
    stored = list(values)
    array = np.empty(len(stored), object)
    try:
        array[:] = [value.decode() for value in stored]
    except UnicodeDecodeError:
        array[:] = stored
    array.flags.writeable = False
    return array.reshape(shape)


def _rename(proto: TensorProto, name: str) -> None:
    if proto.name != name:
        proto.name = name
