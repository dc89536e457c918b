"""Blobs of onnxruntime's block kernels: the kernels decode them to what the codes stand for, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxq.algorithms.encoders import encode_array
from onnxq.errors import SchemeError
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.kernel_blobs import (
    Blobs,
    pack_gather_blocks,
    pack_matmul_nbits,
    unpack_gather_blocks,
    unpack_matmul_nbits,
)
from onnxq.numerics.numerics import QTensor
from onnxq.numerics.spec import Granularity, Spec
from onnxq.runtime.sessions import open_session, run

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


def named(blobs: Blobs) -> dict[str, NDArray[np.generic]]:
    inputs = {"codes": blobs.codes, "scales": blobs.scales}
    return inputs if blobs.zero_points is None else {**inputs, "zero_points": blobs.zero_points}


def encoded(name: str, shape: tuple[int, int], per: object, reduction_axis: int, affine: bool = False) -> QTensor:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    spec = Spec(name, per=per, symmetric=FORMATS[name].signed and not affine)
    return encode_array(weight, spec, channel_axis=1 - reduction_axis, reduction_axis=reduction_axis)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("rows", "columns", "block", "per"), CASES)
@pytest.mark.parametrize("affine", [False, True])
def test_matmul_nbits_decodes_the_weight(
    name: str, rows: int, columns: int, block: int, per: object, affine: bool
) -> None:
    tensor = encoded(name, (rows, columns), per, 0, affine)
    blobs = pack_matmul_nbits(tensor, block)
    bits, blocks = tensor.format.bits, -(-rows // block)
    assert blobs.codes.shape == (columns, blocks, block * bits // 8)
    assert blobs.scales.shape == (columns, blocks)
    assert (blobs.zero_points is None) == (tensor.parameters.zero_point is None)
    # Each row of the identity picks a row of the weight.
    inputs = {"data": np.eye(rows, dtype=np.float32), **named(blobs)}
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": block, "accuracy_level": 0}
    np.testing.assert_array_equal(executed("MatMulNBits", inputs, **attributes), tensor.dequantize())
    back = unpack_matmul_nbits(*blobs, bits=bits, block_size=block, rows=rows)
    np.testing.assert_array_equal(back.dequantize(), tensor.dequantize())
    again = pack_matmul_nbits(back, block)
    np.testing.assert_array_equal(again.codes, blobs.codes)
    np.testing.assert_array_equal(again.scales, blobs.scales)


def test_float_zero_points_of_others_are_read() -> None:
    generator = np.random.default_rng(1)
    codes = generator.integers(0, 256, (3, 2, 8)).astype(np.uint8)
    scales = generator.uniform(0.1, 1, (3, 2)).astype(np.float32)
    offsets = generator.uniform(6, 9, (3, 2)).astype(np.float32)
    inputs = {"data": np.eye(32, dtype=np.float32), "codes": codes, "scales": scales, "zero_points": offsets}
    expected = executed("MatMulNBits", inputs, K=32, N=3, bits=4, block_size=16, accuracy_level=0)
    found = unpack_matmul_nbits(codes, scales, offsets, bits=4, block_size=16, rows=32)
    np.testing.assert_allclose(found.dequantize(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("extent", "rows", "block", "per"), [case for case in CASES if case[3] != (32, 3)])
@pytest.mark.parametrize("affine", [False, True])
def test_gather_block_quantized_decodes_the_table(
    name: str, extent: int, rows: int, block: int, per: object, affine: bool
) -> None:
    tensor = encoded(name, (rows, extent), per, 1, affine)
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
    back = unpack_gather_blocks(*blobs, bits=bits, block_size=block, extent=extent)
    np.testing.assert_array_equal(back.dequantize(), tensor.dequantize())


@pytest.mark.parametrize(
    ("name", "per", "block", "message"),
    [
        ("float8e4m3fn", (32,), 32, "MatMulNBits reads integers of 2, 4 or 8 bits, found float8e4m3fn"),
        ("int16", (32,), 32, "MatMulNBits reads integers of 2, 4 or 8 bits, found int16"),
        ("int4", (32,), 24, "blocks of MatMulNBits are a power of two of at least 16, found 24"),
        ("int4", (32,), 8, "blocks of MatMulNBits are a power of two of at least 16, found 8"),
        ("int4", (24,), 16, "blocks of 24 are no multiple of the 16 that MatMulNBits is to read"),
        ("int4", (16,), 32, "blocks of 16 are no multiple of the 32 that MatMulNBits is to read"),
    ],
)
def test_what_the_kernel_cannot_read_is_told(name: str, per: object, block: int, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        pack_matmul_nbits(encoded(name, (96, 4), per, 0), block)
    assert str(caught.value).startswith(message)


def test_a_row_that_ends_within_a_byte_is_told() -> None:
    with pytest.raises(SchemeError, match=r"^GatherBlockQuantized reads rows of whole bytes, and 35 codes of 4 bits"):
        pack_gather_blocks(encoded("int4", (4, 35), (16,), 1), 16)
