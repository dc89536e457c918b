"""ONNX tensor types and their numpy dtypes, including the small ones of ml_dtypes."""

from __future__ import annotations

from functools import cache
from typing import Final

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

# ONNX packs these into bytes: an element takes fewer bits in ONNX than in numpy.
_PACKED_BITS: Final = {
    "UINT4": 4,
    "INT4": 4,
    "FLOAT4E2M1": 4,
    "UINT2": 2,
    "INT2": 2,
    "FLOAT6E2M3": 6,
    "FLOAT6E3M2": 6,
}
_ML_DTYPES: Final = {
    "BFLOAT16": "bfloat16",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
    "UINT4": "uint4",
    "INT4": "int4",
    "FLOAT4E2M1": "float4_e2m1fn",
    "UINT2": "uint2",
    "INT2": "int2",
    "FLOAT6E2M3": "float6_e2m3fn",
    "FLOAT6E3M2": "float6_e3m2fn",
}


def _numpy_dtypes() -> dict[int, np.dtype[np.generic]]:
    table: dict[int, np.dtype[np.generic]] = {}
    for name, value in TensorProto.DataType.items():
        if name in _ML_DTYPES and hasattr(ml_dtypes, _ML_DTYPES[name]):
            table[value] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
        elif name != "UNDEFINED" and name not in _ML_DTYPES:
            table[value] = helper.tensor_dtype_to_np_dtype(value)
    return table


_NUMPY: Final = _numpy_dtypes()
_ONNX: Final = {dtype: value for value, dtype in _NUMPY.items()}
_BITS: Final = {
    value: _PACKED_BITS.get(TensorProto.DataType.Name(value), dtype.itemsize * 8) for value, dtype in _NUMPY.items()
}


def is_known(data_type: int) -> bool:
    """Return whether the installed onnx and ml_dtypes have this ``TensorProto.DataType``."""
    return data_type in _NUMPY


def numpy_dtype(data_type: int) -> np.dtype[np.generic] | None:
    """Return the numpy dtype of a ``TensorProto.DataType``; None if it is 0 or unknown.

    >>> numpy_dtype(TensorProto.INT4)
    dtype(int4)
    """
    return _NUMPY.get(data_type)


def data_type_of(dtype: object) -> int:
    """Return the ``TensorProto.DataType`` of a numpy dtype or of an ONNX type number; 0 for None.

    Raises:
        TypeError: ONNX has no such type.

    >>> data_type_of(np.float32) == data_type_of(TensorProto.FLOAT) == TensorProto.FLOAT
    True
    """
    if dtype is None:
        return 0
    if isinstance(dtype, int):
        return int(dtype)
    return _of_numpy(np.dtype(dtype))  # type: ignore[call-overload]


@cache
def _of_numpy(wanted: np.dtype[np.generic]) -> int:
    # Cached because every pass calls it for every tensor.
    if wanted.kind in "USO":
        return int(TensorProto.STRING)
    if wanted.newbyteorder("=") not in _ONNX:
        raise TypeError(f"ONNX has no tensor type for the numpy dtype {wanted}")
    return _ONNX[wanted.newbyteorder("=")]


def data_type_name(data_type: int) -> str:
    """Return the name of a ``TensorProto.DataType`` in lower case, or ``"type N"`` for an unknown number."""
    is_listed = data_type in TensorProto.DataType.values()
    return TensorProto.DataType.Name(data_type).lower() if is_listed else f"type {data_type}"


def bits_per_element(data_type: int) -> int:
    """Return the number of bits of one stored element; 0 for strings."""
    return 0 if data_type == TensorProto.STRING else _BITS[data_type]


def is_packed(data_type: int) -> bool:
    """Return whether several elements share a byte when stored."""
    return bits_per_element(data_type) not in (0, 8, 16, 32, 64, 128)


def stored_bytes(data_type: int, elements: int) -> int:
    """Return the number of bytes of ``elements`` values as raw data; 0 for strings.

    >>> stored_bytes(TensorProto.INT4, 3)
    2
    """
    return -(-elements * bits_per_element(data_type) // 8)
