"""Payloads of what was read give what the model stores, wherever and however it lies, and refuse what does not fit."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import SparseTensorProto, TensorProto, helper, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from stored_values import NUMBERS, same_bits

from onnxq.errors import ModelError
from onnxq.ir import ArrayData, Constant, ProtoTensor
from onnxq.ir.data_types import numpy_dtype, stored_bytes
from onnxq.ir.external_data import DataFolder
from onnxq.ir.tensor_data import as_tensor_data

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def beside(folder: Path, data_type: int, shape: tuple[int, ...], raw: bytes, offset: int = 4) -> ProtoTensor:
    """Return a tensor_data of a tensor ``w`` whose bytes lie in a file of that folder, behind others."""
    (folder / "w.bin").write_bytes(b"\xee" * offset + raw + b"\xee")
    proto = TensorProto(name="w", data_type=data_type, dims=shape, data_location=TensorProto.EXTERNAL, doc_string="why")
    for key, value in {"location": "w.bin", "offset": str(offset), "length": str(len(raw))}.items():
        proto.external_data.add(key=key, value=value)
    return ProtoTensor(proto, DataFolder(folder))


@given(st.sampled_from(NUMBERS), shapes, st.integers(0, 2**32))
def test_raw_data_of_every_type_loads_and_streams_as_it_was_stored(data_type: int, shape, seed: int) -> None:
    size = stored_bytes(data_type, math.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    if data_type == TensorProto.BOOL:
        raw = bytes(byte & 1 for byte in raw)
    proto = TensorProto(name="t", data_type=data_type, dims=shape, raw_data=raw)
    tensor_data = ProtoTensor(proto)

    assert tensor_data.nbytes == size
    assert tensor_data.dtype == numpy_dtype(data_type)
    assert same_bits(tensor_data.load(), numpy_helper.to_array(proto))
    assert b"".join(tensor_data.chunks()) == raw
    assert tensor_data.to_proto("t") == proto


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
    tensor_data = ProtoTensor(proto)

    raw = TensorProto(data_type=data_type, dims=[len(values)], raw_data=b"".join(tensor_data.chunks()))

    assert same_bits(numpy_helper.to_array(raw), tensor_data.load())


def test_text_loads_as_str_and_other_strings_as_bytes() -> None:
    text = ProtoTensor(helper.make_tensor("t", TensorProto.STRING, [2], [b"a", b"b"])).load()
    other = ProtoTensor(helper.make_tensor("t", TensorProto.STRING, [1, 1], [b"\xff"])).load()

    assert text.tolist() == ["a", "b"]
    assert other.tolist() == [[b"\xff"]]


@pytest.mark.parametrize("data_type", NUMBERS)
def test_typed_fields_hold_what_raw_data_holds(data_type: int) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(numpy_dtype(data_type))
    typed = helper.make_tensor("t", data_type, array.shape, array.reshape(-1).tolist())
    raw = numpy_helper.from_array(array, "t")

    assert not typed.HasField("raw_data")
    assert same_bits(ProtoTensor(typed).load(), ProtoTensor(raw).load())
    assert b"".join(ProtoTensor(typed).chunks()) == raw.raw_data
    assert ProtoTensor(typed).to_proto("u") == TensorProto.FromString(
        helper.make_tensor("u", data_type, array.shape, array.reshape(-1).tolist()).SerializeToString()
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16, ml_dtypes.int4, np.bool_])
def test_values_beside_a_model_load_as_those_in_it(tmp_path: Path, dtype: type) -> None:
    inline = numpy_helper.from_array((VALUES % 2).astype(dtype), "w")
    tensor_data = beside(tmp_path, inline.data_type, VALUES.shape, inline.raw_data)

    assert tensor_data.external
    assert same_bits(tensor_data.load(), ProtoTensor(inline).load())
    assert b"".join(tensor_data.chunks()) == inline.raw_data
    with pytest.raises(ValueError, match="read-only"):
        tensor_data.load()[...] = 0


def test_values_beside_a_model_are_read_in_or_referred_to(tmp_path: Path) -> None:
    tensor_data = beside(tmp_path, TensorProto.FLOAT, VALUES.shape, VALUES.tobytes())
    alone, bare, reference = tensor_data.to_proto("v"), TensorProto(), TensorProto()
    tensor_data.fill_without_values(bare, "v")
    tensor_data.fill_reference(reference, "v")

    assert alone == TensorProto(
        name="v", data_type=TensorProto.FLOAT, dims=VALUES.shape, doc_string="why", raw_data=VALUES.tobytes()
    )
    assert bare == TensorProto(name="v", data_type=TensorProto.FLOAT, dims=VALUES.shape, doc_string="why")
    assert (reference.name, reference.external_data) == ("v", tensor_data.proto.external_data)
    assert reference.data_location == TensorProto.EXTERNAL
    assert tensor_data.proto.name == "w"


def test_large_values_beside_a_model_are_streamed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.ir.tensor_data.CHUNK_BYTES", 10)
    tensor_data = beside(tmp_path, TensorProto.FLOAT, VALUES.shape, VALUES.tobytes())

    assert [len(chunk) for chunk in tensor_data.chunks()] == [10, 10, 4]


def test_a_payload_knows_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    tensor_data = beside(tmp_path, TensorProto.FLOAT, VALUES.shape, VALUES.tobytes())
    linked = ProtoTensor(tensor_data.proto, DataFolder(tmp_path / "link"))

    assert tensor_data.lies_in(tmp_path.resolve())
    assert linked.lies_in(tmp_path.resolve())
    assert not tensor_data.lies_in((tmp_path / "other").resolve())
    assert not ProtoTensor(numpy_helper.from_array(VALUES), DataFolder(tmp_path)).lies_in(tmp_path.resolve())


def test_what_lies_beside_a_model_has_to_stay_as_it_was_read(tmp_path: Path) -> None:
    tensor_data = beside(tmp_path, TensorProto.FLOAT, VALUES.shape, VALUES.tobytes())
    ends = tensor_data.fingerprint
    (tmp_path / "w.bin").write_bytes(bytes(100))

    assert ends == tensor_data.fingerprint == "0.0 5.0"
    for read in (
        tensor_data.load,
        tensor_data.data_range().view,
        lambda: list(tensor_data.chunks()),
        lambda: tensor_data.to_proto(""),
    ):
        with pytest.raises(ModelError, match="tensor 'w', changed after the model was read"):
            read()


def test_values_beside_a_model_are_checked_when_it_is_read(tmp_path: Path) -> None:
    tensor_data = beside(tmp_path, TensorProto.FLOAT, VALUES.shape, VALUES.tobytes())
    text = TensorProto(name="w", data_type=TensorProto.STRING, dims=[1], data_location=TensorProto.EXTERNAL)
    (tmp_path / "w.bin").write_bytes(bytes(10))

    with pytest.raises(ModelError, match="needs bytes 4 to 28"):
        ProtoTensor(tensor_data.proto, DataFolder(tmp_path))
    with pytest.raises(ModelError, match="holds strings, which external data cannot store"):
        ProtoTensor(text, DataFolder(tmp_path))
    with pytest.raises(ModelError, match="the model has no folder"):
        ProtoTensor(tensor_data.proto).load()


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
        ProtoTensor(proto)


@pytest.mark.parametrize(
    ("data_type", "shape", "field", "values", "message"),
    [
        (TensorProto.COMPLEX64, [2], "float_data", [1, 2, 3], "needs 4 entries of float_data, found 3"),
        (TensorProto.DOUBLE, [2], "float_data", [1, 2], "needs 2 entries of double_data, found 0"),
        (TensorProto.UINT32, [2], "uint64_data", [1], "needs 2 entries of uint64_data, found 1"),
        (TensorProto.FLOAT16, [2], "int32_data", [1], "needs 2 entries of int32_data, found 1"),
        (TensorProto.INT4, [3], "int32_data", [1, 2, 3], "needs 2 entries of int32_data, found 3"),
        (TensorProto.STRING, [2], "string_data", [b"a"], "needs 2 entries of string_data, found 1"),
    ],
)
def test_typed_fields_have_to_hold_as_many_entries_as_the_shape_says(
    data_type: int, shape: list[int], field: str, values: list[object], message: str
) -> None:
    proto = TensorProto(name="w", data_type=data_type, dims=shape)
    getattr(proto, field).extend(values)

    with pytest.raises(ModelError, match=f"tensor 'w' .* {message}; the model is damaged"):
        ProtoTensor(proto)


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
    assert made.tensor_data.to_proto("t").raw_data == b"\x80\x3f\x80\x3f"


def test_what_is_stored_already_stays_as_it_is() -> None:
    tensor_data, proto = ArrayData(VALUES), numpy_helper.from_array(VALUES, "w")
    lazy = as_tensor_data(LazyValues(proto))

    assert as_tensor_data(tensor_data) is tensor_data
    assert isinstance(lazy, ProtoTensor)
    assert lazy.proto is proto
    assert as_tensor_data(VALUES, np.float32).load() is VALUES


def test_sparse_values_are_refused() -> None:
    indices = numpy_helper.from_array(np.array([1], np.int64), "i")
    sparse = SparseTensorProto(values=numpy_helper.from_array(VALUES[0, :1], "w"), indices=indices, dims=[6])

    with pytest.raises(ModelError, match="sparse values cannot become a Constant; give a dense array"):
        as_tensor_data(SparseValues(sparse))


def test_values_that_graphsurgeon_read_are_stored_without_being_loaded() -> None:
    lazy = gs.Constant("w", LazyValues(numpy_helper.from_array(VALUES, "w")))

    assert same_bits(as_tensor_data(lazy._values).load(), VALUES)
