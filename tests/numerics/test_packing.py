"""Packing and unpacking: published bytes, the packing of onnx, the layouts of onnxruntime kernels, exact inverses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxq.algorithms.encoders import encode_array
from onnxq.errors import SchemeError
from onnxq.numerics import packing
from onnxq.numerics.affine import QTensor
from onnxq.numerics.blocks import PIECE
from onnxq.numerics.formats import FORMATS, QuantDType
from onnxq.numerics.ort_packing import PackedWeights, pack_gather_blocks, pack_matmul_nbits, unpack_matmul_nbits
from onnxq.numerics.packing import pack, pack_rows, pack_words, unpack, unpack_rows, unpack_words
from onnxq.numerics.spec import Granularity, QuantSpec
from onnxq.runtime.sessions import open_session, run

ALL = list(FORMATS.values())
WORDS = [format for format in ALL if format.bits in (2, 4, 8)]
every_format = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)


def encodings_of(format: QuantDType, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.generic]:
    """Return quantized values of which every bit pattern is one."""
    generator = np.random.default_rng(seed)
    if format.is_float:
        return generator.integers(0, 2**format.bits, shape).astype(np.uint8).view(format.dtype)
    low = -(2 ** (format.bits - 1)) if format.signed else 0
    return generator.integers(low, low + 2**format.bits, shape).astype(format.dtype)


def same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@every_format
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 7), (2, 3, 4), (PIECE + 3,)])
def test_bytes_are_those_of_onnx(format: QuantDType, shape: tuple[int, ...]) -> None:
    quantized = encodings_of(format, shape)
    dtype = helper.tensor_dtype_to_np_dtype(format.onnx_type)
    typed = (
        quantized.view(dtype)
        if quantized.dtype.itemsize == dtype.itemsize and format.is_float
        else quantized.astype(dtype)
    )
    tensor = numpy_helper.from_array(typed, "codes")
    assert tensor.data_type == format.onnx_type
    assert pack(quantized, format).tobytes() == tensor.raw_data
    assert same(unpack(np.frombuffer(tensor.raw_data, np.uint8), format, shape), quantized)


@pytest.mark.parametrize("name", ["int4", "int2", "float6e3m2"])
def test_pieces_of_a_large_tensor_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = encodings_of(FORMATS[name], (1001,))
    whole = pack(quantized, FORMATS[name])
    monkeypatch.setattr(packing, "PIECE", 64)
    np.testing.assert_array_equal(pack(quantized, FORMATS[name]), whole)
    assert same(unpack(whole, FORMATS[name], (1001,)), quantized)


def test_turned_codes_are_packed_in_their_own_order() -> None:
    quantized = encodings_of(FORMATS["int4"], (6, 4))
    np.testing.assert_array_equal(pack(quantized.T, FORMATS["int4"]), pack(quantized.T.copy(), FORMATS["int4"]))


@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_rows_end_at_whole_bytes(bits: int, rows: int, extent: int, seed: int) -> None:
    quantized = np.random.default_rng(seed).integers(0, 2**bits, (rows, extent)).astype(np.uint8)
    packed = pack_rows(quantized, bits)
    assert packed.shape == (rows, -(-extent * bits // 8))
    for row, line in zip(packed, quantized, strict=True):
        assert row.tobytes() == pack(line, FORMATS[f"uint{bits}"]).tobytes()
    np.testing.assert_array_equal(unpack_rows(packed, bits, extent), quantized)


# --- words ----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(WORDS),
    st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    st.integers(-3, 2),
    st.integers(0, 2**32 - 1),
)
def test_words_are_undone_along_any_axis(format: QuantDType, shape: tuple[int, ...], axis: int, seed: int) -> None:
    axis = axis % len(shape) - len(shape)
    quantized = encodings_of(format, shape, seed)
    words = pack_words(quantized, format, axis)
    assert words.dtype == np.uint32
    assert words.shape[axis] == -(-shape[axis] * format.bits // 32)
    assert same(unpack_words(words, format, shape[axis], axis), quantized)
    last = pack_words(np.ascontiguousarray(np.moveaxis(quantized, axis, -1)), format)
    np.testing.assert_array_equal(np.moveaxis(words, axis, -1), last)


@pytest.mark.parametrize("format", WORDS, ids=lambda format: format.name)
def test_a_field_of_a_word_holds_one_code(format: QuantDType) -> None:
    fields = 32 // format.bits
    quantized = encodings_of(format, (fields,))
    (word,) = pack_words(quantized, format).tolist()
    patterns = quantized.view(np.uint8) & (2**format.bits - 1)
    assert word == sum(int(pattern) << (format.bits * place) for place, pattern in enumerate(patterns))
    # Where the last axis is filled, the words are the bytes of an ONNX tensor.
    assert pack_words(quantized, format).astype("<u4").tobytes() == pack(quantized, format).tobytes()


@pytest.mark.parametrize("name", ["float6e2m3", "int16", "int32"])
def test_codes_that_fill_no_word_are_told(name: str) -> None:
    for refused in (
        lambda: pack_words(np.zeros(8, np.uint8), FORMATS[name]),
        lambda: unpack_words(np.zeros(2, np.uint32), FORMATS[name], 8),
    ):
        with pytest.raises(SchemeError, match=rf"^words hold values of 2, 4 or 8 bits and {name} has"):
            refused()


# PackedWeights of onnxruntime's block kernels: the kernels decode them to what the quantized values stand for, bit for
# bit.

FIELDS = ["int8", "int8-7bit", "uint8", "int4", "int4-narrow", "uint4", "int2", "uint2"]
# Rows, columns, the kernel's block, and what shares a scale.
CASES = [
    (64, 8, 32, (32,)),
    (72, 5, 16, (16,)),
    (72, 5, 16, (32,)),
    (40, 6, 32, Granularity.CHANNEL),
    (40, 6, 32, Granularity.TENSOR),
    (64, 7, 32, (32, 3)),
    (16, 1, 128, (128,)),
]


def executed(op: str, inputs: dict[str, NDArray[np.generic]], **attributes: int) -> NDArray[np.float32]:
    node = helper.make_node(op, list(inputs), ["y"], domain="com.microsoft", **attributes)
    ends = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    graph = helper.make_graph([node], op, ends, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return run(open_session(helper.make_model(graph, opset_imports=opsets, ir_version=10)), inputs)[0]


def named(blobs: PackedWeights) -> dict[str, NDArray[np.generic]]:
    inputs = {"codes": blobs.values, "scales": blobs.scales}
    return inputs if blobs.zero_points is None else {**inputs, "zero_points": blobs.zero_points}


def encoded(
    name: str, shape: tuple[int, int], granularity: object, reduction_axis: int, affine: bool = False
) -> QTensor:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    spec = QuantSpec(name, granularity=granularity, symmetric=FORMATS[name].signed and not affine)
    return encode_array(weight, spec, channel_axis=1 - reduction_axis, reduction_axis=reduction_axis)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("rows", "columns", "block", "granularity"), CASES)
@pytest.mark.parametrize("affine", [False, True])
def test_matmul_nbits_decodes_the_weight(
    name: str, rows: int, columns: int, block: int, granularity: object, affine: bool
) -> None:
    tensor = encoded(name, (rows, columns), granularity, 0, affine)
    blobs = pack_matmul_nbits(tensor, block)
    bits, blocks = tensor.format.bits, -(-rows // block)
    assert blobs.values.shape == (columns, blocks, block * bits // 8)
    assert blobs.scales.shape == (columns, blocks)
    assert (blobs.zero_points is None) == (tensor.parameters.zero_point is None)
    # Each row of the identity picks a row of the weight.
    inputs = {"data": np.eye(rows, dtype=np.float32), **named(blobs)}
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": block, "accuracy_level": 0}
    np.testing.assert_array_equal(executed("MatMulNBits", inputs, **attributes), tensor.dequantize())
    back = unpack_matmul_nbits(*blobs, bits=bits, block_size=block, rows=rows)
    np.testing.assert_array_equal(back.dequantize(), tensor.dequantize())
    again = pack_matmul_nbits(back, block)
    np.testing.assert_array_equal(again.values, blobs.values)
    np.testing.assert_array_equal(again.scales, blobs.scales)


def test_float_zero_points_of_others_are_read() -> None:
    generator = np.random.default_rng(1)
    quantized = generator.integers(0, 256, (3, 2, 8)).astype(np.uint8)
    scales = generator.uniform(0.1, 1, (3, 2)).astype(np.float32)
    offsets = generator.uniform(6, 9, (3, 2)).astype(np.float32)
    inputs = {"data": np.eye(32, dtype=np.float32), "codes": quantized, "scales": scales, "zero_points": offsets}
    expected = executed("MatMulNBits", inputs, K=32, N=3, bits=4, block_size=16, accuracy_level=0)
    found = unpack_matmul_nbits(quantized, scales, offsets, bits=4, block_size=16, rows=32)
    np.testing.assert_allclose(found.dequantize(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("extent", "rows", "block", "granularity"), [case for case in CASES if case[3] != (32, 3)])
@pytest.mark.parametrize("affine", [False, True])
def test_gather_block_quantized_decodes_the_table(
    name: str, extent: int, rows: int, block: int, granularity: object, affine: bool
) -> None:
    tensor = encoded(name, (rows, extent), granularity, 1, affine)
    bits, blocks = tensor.format.bits, -(-extent // block)
    if tensor.parameters.zero_point is not None and bits == 4 and blocks % 2:
        with pytest.raises(SchemeError, match=rf"whole bytes, and {blocks} zero points of {bits} bits end within one"):
            pack_gather_blocks(tensor, block)
        return
    blobs = pack_gather_blocks(tensor, block)
    inputs = named(blobs)
    order = np.random.default_rng(2).integers(0, rows, 9)
    inputs = {"codes": inputs.pop("codes"), "indices": order, **inputs}
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    np.testing.assert_array_equal(executed("GatherBlockQuantized", inputs, **attributes), tensor.dequantize()[order])


@pytest.mark.parametrize(
    ("name", "granularity", "block", "message"),
    [
        ("float8e4m3fn", (32,), 32, "MatMulNBits reads integers of 2, 4 or 8 bits, found float8e4m3fn"),
        ("int16", (32,), 32, "MatMulNBits reads integers of 2, 4 or 8 bits, found int16"),
        ("int4", (32,), 24, "blocks of MatMulNBits are a power of two of at least 16, found 24"),
        ("int4", (32,), 8, "blocks of MatMulNBits are a power of two of at least 16, found 8"),
        ("int4", (24,), 16, "blocks of 24 are no multiple of the 16 that MatMulNBits is to read"),
        ("int4", (16,), 32, "blocks of 16 are no multiple of the 32 that MatMulNBits is to read"),
    ],
)
def test_what_the_kernel_cannot_read_is_told(name: str, granularity: object, block: int, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        pack_matmul_nbits(encoded(name, (96, 4), granularity, 0), block)
    assert str(caught.value).startswith(message)


def test_a_row_that_ends_within_a_byte_is_told() -> None:
    with pytest.raises(
        SchemeError, match=r"^GatherBlockQuantized reads rows of whole bytes, and 35 quantized values of 4 bits"
    ):
        pack_gather_blocks(encoded("int4", (4, 35), (16,), 1), 16)
