"""onnxruntime's own operators decode packed codes to what numpy decodes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, QuantSpec, Storage
from onnxq.ir import Graph, Names, Tensor, Variable, constant, to_model
from onnxq.lowering import (
    NodeBuilder,
    gather_block_quantized,
    is_kernel_block,
    kernel_supports,
    matmul_nbits,
)
from onnxq.numerics.affine import QTensor
from onnxq.runtime.sessions import open_session, run

FLOAT = np.dtype(np.float32)
SPECS = [
    QuantSpec("int4", (16,)),
    QuantSpec("int4", (32,), scale="bfloat16"),
    QuantSpec("uint4", (32,), symmetric=False),
    QuantSpec("int8-narrow", (64,)),
    QuantSpec("uint8", (16,), symmetric=False),
    QuantSpec("int2", (16,), scale="ue4m3", two_level=True),
    QuantSpec("uint2", (32,), symmetric=False, scale="e8m0"),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.format}-{spec.per}-{spec.scale}")


def quantized(spec: QuantSpec, shape: tuple[int, int], axis: int) -> QTensor:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return encode_array(weight, spec, channel_axis=1 - axis, reduction_axis=axis)


def outputs_of(chain: NodeBuilder, given: Variable, made: Variable) -> Graph:
    made.dtype = FLOAT
    return Graph(chain.nodes, [given], [made], "blobs", opset=24)


@every_spec
@pytest.mark.parametrize("bias", [None, np.linspace(-1, 1, 24, dtype=np.float32)], ids=["plain", "bias"])
def test_matmulnbits_multiplies_what_numpy_decodes(spec: QuantSpec, bias: np.ndarray | None) -> None:
    weight = quantized(spec, (70, 24), 0)
    chain, data = NodeBuilder("w", Names(Graph())), Variable("x", FLOAT, ["n", 70])
    added: Tensor | None = None if bias is None else constant("b", bias)
    product = matmul_nbits(chain, weight, spec, data, added, TensorProto.FLOAT)
    # One of each row has an exact 8-bit code, whatever the runtime makes of data.
    (found,) = run(open_session(to_model(outputs_of(chain, data, product))), {"x": np.eye(70, dtype=np.float32)})
    expected = weight.dequantize() + (0 if bias is None else bias)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@every_spec
def test_gatherblockquantized_looks_up_what_numpy_decodes(spec: QuantSpec) -> None:
    table = quantized(spec, (30, 64), 1)
    chain, indices = NodeBuilder("w", Names(Graph())), Variable("i", np.dtype(np.int64), ["a", "b"])
    found = gather_block_quantized(chain, table, spec, indices, TensorProto.FLOAT)
    given = np.array([[0, 29], [7, -1]])
    (rows,) = run(open_session(to_model(outputs_of(chain, indices, found))), {"i": given})
    np.testing.assert_array_equal(rows, table.dequantize()[given], strict=True)


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        *((spec, True) for spec in SPECS),
        (QuantSpec("int4", (8,)), False),
        (QuantSpec("int4", (48,)), False),
        (QuantSpec("int4", (2, 16)), False),
        (QuantSpec("int4", Granularity.CHANNEL), False),
        (QuantSpec("int4", (32,), storage=Storage.WORDS), False),
        (QuantSpec("int16", (32,)), False),
        (QuantSpec("float4e2m1", (32,)), False),
    ],
    ids=str,
)
def test_they_take_small_integers_in_blocks_of_a_power_of_two(spec: QuantSpec, fits: bool) -> None:
    assert kernel_supports(spec, "MatMul") is kernel_supports(spec, "Gather") is fits
    assert not kernel_supports(spec, "Conv")
    assert is_kernel_block(spec.per) or not fits
