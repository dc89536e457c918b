"""Payloads hold the values of a constant as arrays or packed bytes, and write them as ONNX stores them."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import SparseTensorProto, TensorProto, helper, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from stored_values import NUMBERS, same_bits

from onnxq.errors import ModelError
from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Names,
    Node,
    PackedTensor,
    ProtoTensor,
    Variable,
    constant,
    constants,
    load,
    save,
    spilling,
)
from onnxq.ir.data_types import numpy_dtype, stored_bytes
from onnxq.ir.external_data import DataFolder
from onnxq.ir.spilling import SMALLEST_SPILLED_BYTES, place_of, spill, spill_data
from onnxq.ir.tensor_data import as_tensor_data

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
        (np.array([1, 2], ml_dtypes.int4), "21"),
    ],
)
def test_a_fingerprint_is_both_ends_or_the_first_bytes_of_packed_types(values: np.ndarray, expected: str) -> None:
    assert Constant("t", values).tensor_data.fingerprint == expected


# Payloads of what was read give what the model stores, wherever and however it lies, and refuse what does not fit.

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def beside(folder: Path, data_type: int, shape: tuple[int, ...], raw: bytes, offset: int = 3) -> ProtoTensor:
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

    with pytest.raises(ModelError, match="needs bytes 3 to 27"):
        ProtoTensor(tensor_data.proto, DataFolder(tmp_path))
    with pytest.raises(ModelError, match="holds strings, which external data cannot store"):
        ProtoTensor(text, DataFolder(tmp_path))
    with pytest.raises(ModelError, match="the model has no folder"):
        ProtoTensor(tensor_data.proto).load()


@pytest.mark.parametrize(
    ("data_type", "shape", "stored", "message"),
    [
        (TensorProto.FLOAT, [3, -1], {"raw_data": bytes(12)}, "cannot be negative"),
        (TensorProto.FLOAT, [3, 2], {"raw_data": bytes(12)},
         r"of type float with shape \[3, 2\] needs 24 bytes of raw data, found 12; the model is damaged"),
        (TensorProto.FLOAT, [3], {"raw_data": b"1"}, "needs 12 bytes of raw data, found 1; the model is damaged"),
        (TensorProto.FLOAT, [3], {}, "needs 3 entries of float_data, found 0; the model is damaged"),
        (TensorProto.UNDEFINED, [3], {"raw_data": bytes(12)}, "undefined"),
        (99, [3], {"raw_data": bytes(12)}, "type 99"),
        (TensorProto.FLOAT, [3, 2**40, 2**40], {"raw_data": bytes(12)}, "found 12"),
        (TensorProto.FLOAT, [3], {"raw_data": bytes(12), "segment": TensorProto.Segment(begin=0)}, "segments"),
        *((kind, shape, {field: given}, f"{message}; the model is damaged") for kind, shape, field, given, message in [
            (TensorProto.COMPLEX64, [2], "float_data", [1, 2, 3], "needs 4 entries of float_data, found 3"),
            (TensorProto.DOUBLE, [2], "float_data", [1, 2], "needs 2 entries of double_data, found 0"),
            (TensorProto.UINT32, [2], "uint64_data", [1], "needs 2 entries of uint64_data, found 1"),
            (TensorProto.FLOAT16, [2], "int32_data", [1], "needs 2 entries of int32_data, found 1"),
            (TensorProto.INT4, [3], "int32_data", [1, 2, 3], "needs 2 entries of int32_data, found 3"),
            (TensorProto.STRING, [2], "string_data", [b"a"], "needs 2 entries of string_data, found 1")]),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_its_description_is_refused_by_name(
    data_type: int, shape: list[int], stored: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"tensor 'w' .*{message}"):
        ProtoTensor(TensorProto(name="w", data_type=data_type, dims=shape, **stored))


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
    lazy = as_tensor_data(gs.Constant("w", LazyValues(proto))._values)

    assert as_tensor_data(tensor_data) is tensor_data
    assert isinstance(lazy, ProtoTensor)
    assert lazy.proto is proto
    assert as_tensor_data(VALUES, np.float32).load() is VALUES


def test_sparse_values_are_refused() -> None:
    indices = numpy_helper.from_array(np.array([1], np.int64), "i")
    sparse = SparseTensorProto(values=numpy_helper.from_array(VALUES[0, :1], "w"), indices=indices, dims=[6])

    with pytest.raises(ModelError, match="sparse values cannot become a Constant; give a dense array"):
        as_tensor_data(SparseValues(sparse))


# Constants wait in a file and not in memory, and are the same.


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float16, ml_dtypes.bfloat16, ml_dtypes.int4, np.bool_])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_spilled_array_is_the_same(dtype: type, order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, (1031, 1033)).astype(dtype), order=order)
    with spilling(tmp_path):
        kept = spill(array), spill(array[::-1])
    for found, expected in zip(kept, (array, array[::-1]), strict=True):
        assert found.base is not None
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_small_arrays_text_and_whatever_is_outside_the_context_stay(tmp_path: Path) -> None:
    small, large, text = (
        np.zeros(SMALLEST_SPILLED_BYTES - 1, np.uint8),
        np.zeros(SMALLEST_SPILLED_BYTES, np.uint8),
        np.full(SMALLEST_SPILLED_BYTES, "a", object),
    )
    with spilling(tmp_path):
        assert spill(small) is small
        assert spill(text) is text
        kept = spill(large)
        assert spill(kept) is kept
    assert spill(large) is large


def test_new_constants_are_spilled_whatever_they_are_made_of(tmp_path: Path) -> None:
    quantized = np.random.default_rng(0).integers(0, 256, SMALLEST_SPILLED_BYTES, np.uint8)
    with spilling(tmp_path):
        plain = Names(Graph()).store("w", quantized)
        packed = spill_data(PackedTensor(TensorProto.INT4, (2 * SMALLEST_SPILLED_BYTES,), quantized.tobytes()))
        assert spill_data(ArrayData(plain.values)).load() is plain.values
        assert ArrayData(quantized).array is quantized
    assert not np.shares_memory(plain.values, quantized)
    np.testing.assert_array_equal(plain.values, quantized)
    assert b"".join(packed.chunks()) == quantized.tobytes()


def test_what_lies_in_a_file_is_not_written_again(tmp_path: Path) -> None:
    quantized = np.arange(2 * SMALLEST_SPILLED_BYTES, dtype=np.uint32).view(np.uint8)
    with spilling(tmp_path, "codes.data"):
        kept = spill(quantized).reshape(8, -1)
        again = spill_data(PackedTensor(TensorProto.UINT8, kept.shape, np.ascontiguousarray(kept).reshape(-1)))
        assert place_of(kept) == (tmp_path / "codes.data", 0)
        assert place_of(kept[1]) == (tmp_path / "codes.data", SMALLEST_SPILLED_BYTES)
        assert place_of(kept[:, ::2]) is None
        assert again.stored is not None
        assert place_of(again.stored) == place_of(kept)
    with spilling(tmp_path, "codes.data"):
        other = spill(np.ones(SMALLEST_SPILLED_BYTES, np.uint8))
    assert place_of(other) == (tmp_path / "codes.data", quantized.nbytes)
    assert (tmp_path / "codes.data").read_bytes() == quantized.tobytes() + other.tobytes()
    assert place_of(quantized) is None


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    with spilling(tmp_path):
        kept = spill(np.ones(SMALLEST_SPILLED_BYTES, np.uint8))
    assert list(tmp_path.iterdir()) == []
    assert kept.all()
    del kept
    gc.collect()


@pytest.mark.skipif(sys.platform != "linux", reason="counts anonymous memory as Linux does")
def test_memory_does_not_grow_with_what_is_spilled(tmp_path: Path) -> None:
    script = f"""
    from pathlib import Path
    import numpy as np
    from onnxq.ir import Graph, Names, spilling
    def anonymous():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
    before = anonymous()
    with spilling(Path({str(tmp_path)!r})):
        names = Names(Graph())
        kept = [names.store("w", np.full(16 << 20, i, np.uint8)) for i in range(10)]
    assert [int(each.values[-1]) for each in kept] == list(range(10))
    print((anonymous() - before) // 1024)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40


@pytest.mark.parametrize("linked", [True, False])
def test_a_spilled_array_is_referred_to_or_copied_from_its_file(linked: bool, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, SMALLEST_SPILLED_BYTES, np.uint8)
    x, y = (Variable(name, np.uint8, [SMALLEST_SPILLED_BYTES]) for name in "xy")
    with spilling(tmp_path, "spilled.data"):
        weight = constant("w", spill(values))
    graph = Graph([Node("Add", "a", inputs=[x, weight], outputs=[y])], [x], [y], opset=17)
    save(graph, tmp_path / "m.onnx", external_data=True, linked=linked)
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer[0]
    assert stored.external_data[0].value == ("spilled.data" if linked else "m.onnx.data")
    assert (tmp_path / "m.onnx.data").exists() is not linked
    np.testing.assert_array_equal(next(iter(constants(load(tmp_path / "m.onnx")))).values, values)
