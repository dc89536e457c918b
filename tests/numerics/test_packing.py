"""Codes to bytes and back: published bytes, onnx's own packing, and exact inverses."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxq.errors import SchemeError
from onnxq.numerics import packing
from onnxq.numerics.blocks import PIECE
from onnxq.numerics.formats import FORMATS, Format
from onnxq.numerics.packing import pack, pack_rows, pack_words, unpack, unpack_rows, unpack_words

ALL = list(FORMATS.values())
WORDS = [format for format in ALL if format.bits in (2, 4, 8)]
every_format = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)


def codes_of(format: Format, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.generic]:
    """Return codes of which every bit pattern is one."""
    generator = np.random.default_rng(seed)
    if format.is_float:
        return generator.integers(0, 2**format.bits, shape).astype(np.uint8).view(format.dtype)
    low = -(2 ** (format.bits - 1)) if format.signed else 0
    return generator.integers(low, low + 2**format.bits, shape).astype(format.dtype)


def same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("int4", [-8, -1, 0, 7, 3], "f87003"),
        ("uint4", [1, 2, 3, 15, 9], "21f309"),
        ("int2", [-2, -1, 0, 1, 1], "4e01"),
        ("float4e2m1", [0.5, 6, -6, 1.5, -0.5], "713f09"),
        ("float6e2m3", [1, 2, 3, 7.5], "08447d"),
        ("float6e3m2", [1, 2, 3, 28], "0c247d"),
    ],
)
def test_published_bytes(name: str, values: list[float], expected: str) -> None:
    codes = FORMATS[name].round(np.array(values))
    assert pack(codes, FORMATS[name]).tobytes().hex() == expected


@every_format
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 7), (2, 3, 4), (PIECE + 3,)])
def test_bytes_are_those_of_onnx(format: Format, shape: tuple[int, ...]) -> None:
    codes = codes_of(format, shape)
    dtype = helper.tensor_dtype_to_np_dtype(format.onnx_type)
    typed = codes.view(dtype) if codes.dtype.itemsize == dtype.itemsize and format.is_float else codes.astype(dtype)
    tensor = numpy_helper.from_array(typed, "codes")
    assert tensor.data_type == format.onnx_type
    assert pack(codes, format).tobytes() == tensor.raw_data
    assert same(unpack(np.frombuffer(tensor.raw_data, np.uint8), format, shape), codes)


@given(st.sampled_from(ALL), st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(format: Format, shape: tuple[int, ...], seed: int) -> None:
    codes = codes_of(format, shape, seed)
    packed = pack(codes, format)
    assert packed.size == -(-codes.size * format.bits // 8)
    assert same(unpack(packed, format, shape), codes)


@pytest.mark.parametrize("name", ["int4", "int2", "float6e3m2"])
def test_pieces_of_a_large_tensor_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of(FORMATS[name], (1001,))
    whole = pack(codes, FORMATS[name])
    monkeypatch.setattr(packing, "PIECE", 64)
    np.testing.assert_array_equal(pack(codes, FORMATS[name]), whole)
    assert same(unpack(whole, FORMATS[name], (1001,)), codes)


def test_turned_codes_are_packed_in_their_own_order() -> None:
    codes = codes_of(FORMATS["int4"], (6, 4))
    np.testing.assert_array_equal(pack(codes.T, FORMATS["int4"]), pack(codes.T.copy(), FORMATS["int4"]))


@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_rows_end_at_whole_bytes(bits: int, rows: int, extent: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, extent)).astype(np.uint8)
    packed = pack_rows(codes, bits)
    assert packed.shape == (rows, -(-extent * bits // 8))
    for row, line in zip(packed, codes, strict=True):
        assert row.tobytes() == pack(line, FORMATS[f"uint{bits}"]).tobytes()
    np.testing.assert_array_equal(unpack_rows(packed, bits, extent), codes)


# --- words ----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(WORDS),
    st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    st.integers(-3, 2),
    st.integers(0, 2**32 - 1),
)
def test_words_are_undone_along_any_axis(format: Format, shape: tuple[int, ...], axis: int, seed: int) -> None:
    axis = axis % len(shape) - len(shape)
    codes = codes_of(format, shape, seed)
    words = pack_words(codes, format, axis)
    assert words.dtype == np.uint32
    assert words.shape[axis] == -(-shape[axis] * format.bits // 32)
    assert same(unpack_words(words, format, shape[axis], axis), codes)
    last = pack_words(np.ascontiguousarray(np.moveaxis(codes, axis, -1)), format)
    np.testing.assert_array_equal(np.moveaxis(words, axis, -1), last)


@pytest.mark.parametrize("format", WORDS, ids=lambda format: format.name)
def test_a_field_of_a_word_holds_one_code(format: Format) -> None:
    fields = 32 // format.bits
    codes = codes_of(format, (fields,))
    (word,) = pack_words(codes, format).tolist()
    patterns = codes.view(np.uint8) & (2**format.bits - 1)
    assert word == sum(int(pattern) << (format.bits * place) for place, pattern in enumerate(patterns))
    # Where the last axis is filled, the words are the bytes of an ONNX tensor.
    assert pack_words(codes, format).astype("<u4").tobytes() == pack(codes, format).tobytes()


@pytest.mark.parametrize("name", ["float6e2m3", "int16", "int32"])
def test_codes_that_fill_no_word_are_told(name: str) -> None:
    for refused in (
        lambda: pack_words(np.zeros(8, np.uint8), FORMATS[name]),
        lambda: unpack_words(np.zeros(2, np.uint32), FORMATS[name], 8),
    ):
        with pytest.raises(SchemeError, match=rf"^words hold codes of 2, 4 or 8 bits and {name} has"):
            refused()


def test_the_raw_data_is_what_onnx_reads() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    raw = pack(codes, FORMATS["int4"]).tobytes()
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=[2, 8], raw_data=raw)
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).astype(np.int8), codes)
