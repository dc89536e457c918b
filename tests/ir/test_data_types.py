from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from onnxq.ir.data_types import (
    bits_per_element,
    data_type_name,
    data_type_of,
    is_known,
    is_packed,
    numpy_dtype,
    stored_bytes,
)

KNOWN = [value for value in TensorProto.DataType.values() if is_known(value)]


@pytest.mark.parametrize("data_type", KNOWN, ids=data_type_name)
def test_every_type_has_one_numpy_dtype_in_any_byte_order(data_type: int) -> None:
    dtype = numpy_dtype(data_type)
    assert dtype is not None
    assert data_type_of(dtype) == data_type_of(data_type) == data_type
    if dtype.isbuiltin == 1:
        assert data_type_of(dtype.newbyteorder(">")) == data_type


@pytest.mark.parametrize(
    ("data_type", "bits", "five"),
    [
        (TensorProto.BOOL, 8, 5),
        (TensorProto.COMPLEX128, 128, 80),
        (TensorProto.BFLOAT16, 16, 10),
        (TensorProto.FLOAT8E5M2, 8, 5),
        (TensorProto.INT4, 4, 3),
        (TensorProto.FLOAT4E2M1, 4, 3),
        (TensorProto.STRING, 0, 0),
    ],
)
def test_several_small_elements_share_a_byte(data_type: int, bits: int, five: int) -> None:
    assert (bits_per_element(data_type), stored_bytes(data_type, 5)) == (bits, five)
    assert is_packed(data_type) == (bits == 4)


def test_no_type_and_types_of_the_future_are_unknown() -> None:
    assert (data_type_of(None), numpy_dtype(TensorProto.UNDEFINED), numpy_dtype(9999)) == (0, None, None)
    assert not is_known(9999)
    assert (data_type_name(TensorProto.INT4), data_type_name(9999)) == ("int4", "type 9999")


def test_text_is_string_and_what_onnx_cannot_store_is_refused() -> None:
    assert {data_type_of(kind) for kind in (np.dtype("U3"), np.dtype("S3"), object)} == {TensorProto.STRING}
    assert data_type_of(ml_dtypes.bfloat16) == TensorProto.BFLOAT16
    with pytest.raises(TypeError, match="ONNX has no tensor type for the numpy dtype datetime64"):
        data_type_of(np.dtype("M8[s]"))
