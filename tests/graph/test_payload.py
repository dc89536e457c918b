from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnxq.errors import ModelError
from onnxq.graph import ArrayPayload, Constant, PackedPayload, ProtoPayload, constant
from onnxq.graph.data_types import is_known, numpy_dtype, stored_bytes

NUMBERS = [
    value for name, value in TensorProto.DataType.items() if name not in ("UNDEFINED", "STRING") and is_known(value)
]
PACKED = [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@given(st.sampled_from(NUMBERS), shapes, st.integers(0, 2**32))
def test_raw_data_of_every_type_loads_and_streams_as_it_was_stored(data_type: int, shape, seed: int) -> None:
    size = stored_bytes(data_type, math.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    if data_type == TensorProto.BOOL:
        raw = bytes(byte & 1 for byte in raw)
    proto = TensorProto(name="t", data_type=data_type, dims=shape, raw_data=raw)
    payload = ProtoPayload(proto)

    assert payload.nbytes == size
    assert payload.dtype == numpy_dtype(data_type)
    assert same_bits(payload.load(), numpy_helper.to_array(proto))
    assert b"".join(payload.chunks()) == raw
    assert payload.to_proto("t") == proto


@given(st.sampled_from(NUMBERS), shapes, st.integers(0, 2**32))
def test_an_array_of_every_type_is_stored_as_onnx_stores_it(data_type: int, shape, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(numpy_dtype(data_type))
    payload = ArrayPayload(array)
    stored = payload.to_proto("t")

    assert stored == numpy_helper.from_array(array, "t")
    assert (payload.onnx_dtype, payload.shape, payload.nbytes) == (data_type, array.shape, len(stored.raw_data))
    assert same_bits(ProtoPayload(stored).load(), array)


@given(st.sampled_from(PACKED), shapes, st.integers(0, 2**32))
def test_packed_bytes_and_arrays_hold_the_same_values(dtype, shape, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    as_array = ArrayPayload(array)
    packed = PackedPayload(as_array.onnx_dtype, shape, as_array.to_proto("").raw_data)

    assert same_bits(packed.load(), array)
    assert packed.to_proto("t") == as_array.to_proto("t")


@pytest.mark.parametrize(
    "data", [b"\x21\x03", bytearray(b"\x21\x03"), memoryview(b"\x21\x03"), np.array([0x21, 3], np.uint8)]
)
def test_packed_data_may_be_any_buffer(data) -> None:
    assert PackedPayload(TensorProto.UINT4, (3,), data).load().tolist() == [1, 2, 3]


def test_big_and_small_arrays_in_any_layout_are_stored_in_row_order() -> None:
    array = np.arange(24, dtype=">i4").reshape(4, 6).T[::2]

    assert numpy_helper.to_array(ArrayPayload(array).to_proto("")).tolist() == array.tolist()


def test_arrays_are_streamed_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr("onnxq.graph.payload.CHUNK_BYTES", 16)
    array = np.arange(10, dtype=np.float32)

    assert [len(chunk) for chunk in ArrayPayload(array).chunks()] == [16, 16, 8]


@pytest.mark.parametrize(
    ("data_type", "values"),
    [
        (TensorProto.FLOAT16, [1.0, 2.0]),
        (TensorProto.BOOL, [True, False]),
        (TensorProto.UINT32, [1, 2**31]),
        (TensorProto.COMPLEX128, [1 + 2j, 3j]),
        (TensorProto.INT4, [1, -2, 3]),
    ],
)
def test_values_outside_of_raw_data_stream_as_raw_data(data_type: int, values) -> None:
    proto = helper.make_tensor("t", data_type, [len(values)], values)
    payload = ProtoPayload(proto)

    raw = TensorProto(data_type=data_type, dims=[len(values)], raw_data=b"".join(payload.chunks()))

    assert same_bits(numpy_helper.to_array(raw), payload.load())


def test_text_loads_as_str_and_other_strings_as_bytes() -> None:
    text = ProtoPayload(helper.make_tensor("t", TensorProto.STRING, [2], [b"a", b"b"])).load()
    other = ProtoPayload(helper.make_tensor("t", TensorProto.STRING, [1, 1], [b"\xff"])).load()

    assert text.tolist() == ["a", "b"]
    assert other.tolist() == [[b"\xff"]]


@pytest.mark.parametrize("array", [np.array(["a", "é"]), np.array([b"a", "é"], object)])
def test_arrays_of_text_are_stored_as_strings(array) -> None:
    assert list(constant("t", array).payload.to_proto("t").string_data) == [b"a", "é".encode()]


def test_loaded_values_are_read_only_and_assigned_ones_are_the_callers() -> None:
    read = Constant("t", ProtoPayload(numpy_helper.from_array(np.zeros(2, np.float32))))
    with pytest.raises(ValueError, match="read-only"):
        read.values[0] = 1

    mine = np.zeros(2, np.float32)
    read.values = mine
    read.values[0] = 1

    assert mine[0] == 1
    assert numpy_helper.to_array(read.payload.to_proto("t")).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.dims.append(-1), "cannot be negative"),
        (
            lambda t: t.dims.append(2),
            r"tensor 'w' of type float with shape \[3, 2\] needs 24 bytes of raw data, found 12",
        ),
        (lambda t: setattr(t, "raw_data", b"1"), "needs 12 bytes of raw data, found 1"),
        (lambda t: t.ClearField("raw_data"), "needs 3 entries of float_data, found 0"),
        (lambda t: setattr(t, "data_type", 0), "undefined"),
        (lambda t: setattr(t, "data_type", 99), "type 99"),
        (lambda t: t.dims.extend([2**40, 2**40]), "found 12"),
        (lambda t: setattr(t.segment, "begin", 0), "segments"),
    ],
)
def test_a_tensor_that_does_not_fit_its_description_is_refused_by_name(change, message: str) -> None:
    proto = numpy_helper.from_array(np.zeros(3, np.float32), "w")
    change(proto)

    with pytest.raises(ModelError, match=message):
        ProtoPayload(proto)


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
        PackedPayload(data_type, shape, b"123")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2], "must be a numpy array, found list"),
        (np.array([1, None], object), "only text"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
    ],
)
def test_a_constant_of_what_onnx_cannot_store_is_refused(values, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Constant("t", values)


def test_an_export_dtype_converts_the_values_at_once() -> None:
    made = Constant("t", np.ones(2, np.float32), export_dtype=TensorProto.BFLOAT16)

    assert made.dtype == np.dtype(ml_dtypes.bfloat16)
    assert made.payload.to_proto("t").raw_data == b"\x80\x3f\x80\x3f"


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
    assert Constant("t", values).payload.ends == expected
