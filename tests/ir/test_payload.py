"""Payloads hold the values of a constant as arrays or packed bytes, and write them as ONNX stores them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from stored_values import NUMBERS, same_bits

from onnxq.errors import ModelError
from onnxq.ir import ArrayData, Constant, PackedTensor, ProtoTensor, constant
from onnxq.ir.data_types import numpy_dtype

PACKED = [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.sampled_from(NUMBERS), shapes, st.integers(0, 2**32))
def test_an_array_of_every_type_is_stored_as_onnx_stores_it(data_type: int, shape, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(numpy_dtype(data_type))
    tensor_data = ArrayData(array)
    stored = tensor_data.to_proto("t")

    assert stored == numpy_helper.from_array(array, "t")
    assert (tensor_data.onnx_dtype, tensor_data.shape, tensor_data.nbytes) == (
        data_type,
        array.shape,
        len(stored.raw_data),
    )
    assert same_bits(ProtoTensor(stored).load(), array)


@given(st.sampled_from(PACKED), shapes, st.integers(0, 2**32))
def test_packed_bytes_and_arrays_hold_the_same_values(dtype, shape, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    as_array = ArrayData(array)
    packed = PackedTensor(as_array.onnx_dtype, shape, as_array.to_proto("").raw_data)

    assert same_bits(packed.load(), array)
    assert packed.to_proto("t") == as_array.to_proto("t")


@pytest.mark.parametrize(
    "data", [b"\x21\x03", bytearray(b"\x21\x03"), memoryview(b"\x21\x03"), np.array([0x21, 3], np.uint8)]
)
def test_packed_data_may_be_any_buffer(data) -> None:
    assert PackedTensor(TensorProto.UINT4, (3,), data).load().tolist() == [1, 2, 3]


def test_big_and_small_arrays_in_any_layout_are_stored_in_row_order() -> None:
    array = np.arange(24, dtype=">i4").reshape(4, 6).T[::2]

    assert numpy_helper.to_array(ArrayData(array).to_proto("")).tolist() == array.tolist()


def test_arrays_are_streamed_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr("onnxq.ir.tensor_data.CHUNK_BYTES", 16)
    array = np.arange(10, dtype=np.float32)

    assert [len(chunk) for chunk in ArrayData(array).chunks()] == [16, 16, 8]


@pytest.mark.parametrize("array", [np.array(["a", "é"]), np.array([b"a", "é"], object)])
def test_arrays_of_text_are_stored_as_strings(array) -> None:
    assert list(constant("t", array).tensor_data.to_proto("t").string_data) == [b"a", "é".encode()]


def test_loaded_values_are_read_only_and_assigned_ones_are_the_callers() -> None:
    read = Constant("t", ProtoTensor(numpy_helper.from_array(np.zeros(2, np.float32))))
    with pytest.raises(ValueError, match="read-only"):
        read.values[0] = 1

    mine = np.zeros(2, np.float32)
    read.values = mine
    read.values[0] = 1

    assert mine[0] == 1
    assert numpy_helper.to_array(read.tensor_data.to_proto("t")).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("data_type", "shape", "message"),
    [
        (TensorProto.INT4, (3,), "takes 2 bytes, found 3"),
        (TensorProto.INT4, (-1,), "cannot be negative"),
        (TensorProto.STRING, (3,), "cannot hold strings"),
    ],
)
def test_packed_data_must_have_the_size_of_its_shape(data_type: int, shape, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PackedTensor(data_type, shape, b"123")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.float32([[1.5, 2], [3, 4]]), "1.5 4.0"),
        (np.float32([[1.5, 2], [3, 4]]).T, "1.5 4.0"),
        (np.array(np.nan), "nan nan"),
        (np.array([-1, 7], ">i4"), "-1 7"),
        (np.array([0.5], ml_dtypes.bfloat16), "0.5 0.5"),
        (np.zeros((0, 2), np.float32), ""),
        (np.array(["text"]), ""),
        (np.array([1, 2], ml_dtypes.int4), ""),
    ],
)
def test_ends_stay_where_they_are_and_are_told_of_whole_numbers_of_bytes(values: np.ndarray, expected: str) -> None:
    assert Constant("t", values).tensor_data.fingerprint == expected
