"""Payloads of what was read: tensors of a model, inline or in a file beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from onnxq.errors import ModelError
from onnxq.ir.data_types import bits_per_element, data_type_name, data_type_of, is_packed, numpy_dtype
from onnxq.ir.external import DataFolder, DataRange, locate
from onnxq.ir.payload import CHUNK_BYTES, ArrayPayload, Payload, check_type_and_dims

# Where each type lies when it is not raw, and how many entries one element takes there.
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
# What says neither values nor where they lie; protobuf copies whatever field it is asked for, such as all values.
_VALUES = {"raw_data", "int32_data", "external_data", "data_location", "segment"} | {
    x for x, _ in _TYPED_FIELDS.values()
}
_DESCRIBING = tuple(field.name for field in TensorProto.DESCRIPTOR.fields if field.name not in _VALUES)


@dataclass(frozen=True, eq=False, repr=False)
class ProtoPayload(Payload):
    """Values of a TensorProto as read from a model, inline or in an external file.

    Attributes:
        proto: the tensor; it is never changed.
        folder: where external data lies; None when the model came without a folder.

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
            found, expected, unit = len(self.proto.raw_data), self.nbytes, "bytes of raw data"
        else:
            field, width = _TYPED_FIELDS.get(self.onnx_dtype, ("int32_data", 1))
            found, expected, unit = len(getattr(self.proto, field)), elements * width, f"entries of {field}"
            if _shares_entries(self.onnx_dtype):
                expected = self.nbytes
        if found != expected:
            raise ModelError(
                f"tensor {self.proto.name!r} of type {data_type_name(self.onnx_dtype)} with shape {list(self.shape)} "
                f"needs {expected} {unit}, found {found}; the model is damaged"
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
        """Return whether the values are external data of a model in this folder, given as a resolved path."""
        return self.external and self.folder is not None and self.folder.path.resolve() == folder

    def data_range(self) -> DataRange:
        """Return where the external values lie.

        Raises:
            ModelError: the file is unsafe, missing or too short, or changed after the model was read.
        """
        return locate(self.proto, self.folder, self.nbytes)

    @cached_property
    def ends(self) -> str:
        """The first and the last element; what was read never changes."""
        return super().ends

    def load(self) -> npt.NDArray[np.generic]:
        """Return the values; the array is read-only, and mapped from the file when they are external."""
        if self.onnx_dtype == TensorProto.STRING:
            return _strings(self.proto.string_data, self.shape)
        if self.external and not is_packed(self.onnx_dtype):
            return self.data_range().view().view(self.dtype).reshape(self.shape)
        if self.proto.HasField("raw_data") and not is_packed(self.onnx_dtype) and self.nbytes:
            return np.frombuffer(self.proto.raw_data, self.dtype).reshape(self.shape)
        return super().load()

    def fill(self, proto: TensorProto, name: str) -> None:
        """Write everything that the source tensor says into an empty TensorProto; external values are read in."""
        if self.external:
            self.fill_without_values(proto, name)
            proto.raw_data = self.data_range().view().tobytes()
            return
        proto.CopyFrom(self.proto)
        _rename(proto, name)

    def fill_without_values(self, proto: TensorProto, name: str) -> None:
        """Write everything but the values and where they lie into an empty TensorProto."""
        for field in _DESCRIBING:
            if isinstance(value := getattr(self.proto, field), str | int):
                # What was not said is not said of the other either.
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
            yield from ArrayPayload(np.asarray(numpy_helper.to_array(self.proto))).chunks()


def as_payload(values: npt.NDArray[Any] | LazyValues, export_dtype: object = None) -> Payload:
    """Return a payload of an array or of GraphSurgeon's lazy values.

    Raises:
        ModelError: the values are sparse, or of a type that ONNX does not have.
    """
    if isinstance(values, Payload):
        return values
    if isinstance(values, SparseValues):
        raise ModelError("sparse values cannot become a Constant; give a dense array")
    if isinstance(values, LazyValues):
        return ProtoPayload(values.tensor)
    if not isinstance(values, np.ndarray | np.generic):
        raise ModelError(f"the values of a constant must be a numpy array, found {type(values).__name__}")
    array = np.asarray(values)
    try:
        if array.dtype == object and not all(isinstance(value, str | bytes) for value in array.flat):
            raise TypeError("only text can be stored as objects")  # noqa: TRY301 - one message for both
        if export_dtype is not None and data_type_of(export_dtype) != data_type_of(array.dtype):
            array = array.astype(numpy_dtype(data_type_of(export_dtype)))
        return ArrayPayload(array)
    except TypeError as error:
        raise ModelError(f"a constant cannot be made of {array.dtype} values: {error}") from error


def _shares_entries(data_type: int) -> bool:
    """Return whether several elements lie in one entry of ``int32_data``, as those do that fill a byte together."""
    return is_packed(data_type) and 8 % bits_per_element(data_type) == 0


def _strings(values: Iterable[bytes], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Return an array of text, of bytes where the values are not UTF-8."""
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
