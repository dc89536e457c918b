"""Decoders run on onnxruntime and give what numpy gives, bit for bit, in every combination that a spec can name."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from lowering.combinations import OPERATORS, STORED, calls, expected, matrix, run_decoders, specs
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rounding, Storage
from onnxq.ir import Graph, Names, to_model
from onnxq.lowering import NodeBuilder, decode_folded, decode_linear, is_linear
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import format_named
from onnxq.planning.weights import decide_weights

# Convolutions multiply no codes, so that weight-only stores their weights.
MATRICES = [
    *((op, Mode.STORAGE) for op in OPERATORS),
    *((op, Mode.WEIGHT_ONLY) for op in ("MatMul", "Gemm", "Gather")),
]


def matrix_of(spec: QuantSpec, rows: int = 24, columns: int = 20) -> QTensor:
    weight = np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
    return encode_array(weight, spec, channel_axis=1, reduction_axis=0)


def ops(chain: NodeBuilder) -> list[str]:
    return [node.op for node in chain.nodes]


def new_chain() -> NodeBuilder:
    return NodeBuilder("w", Names(Graph()))


# --- the matrix -----------------------------------------------------------------------------------------------------


def test_what_is_no_spec_is_refused_with_a_sentence() -> None:
    found, refused = specs()
    assert (len(found), sum(refused.values())) == (1240, 1112)
    assert all("; " in sentence for sentence in refused)


@pytest.mark.parametrize(("op", "mode"), MATRICES)
def test_every_decoded_weight_equals_that_of_numpy_bit_for_bit(op: str, mode: Mode) -> None:
    found = matrix(op, mode)
    assert found.wrong == []
    assert found.exact + found.modes[Mode.FLOAT] == len(specs()[0])


def test_the_combinations_are_counted() -> None:
    exact = {(op, mode): matrix(op, mode).exact for op, mode in MATRICES}
    assert exact == {
        ("MatMul", Mode.STORAGE): 1023,
        ("Gemm", Mode.STORAGE): 1023,
        ("Conv", Mode.STORAGE): 1240,
        ("ConvTranspose", Mode.STORAGE): 1240,
        ("Gather", Mode.STORAGE): 1023,
        ("MatMul", Mode.WEIGHT_ONLY): 1023,
        ("Gemm", Mode.WEIGHT_ONLY): 1023,
        ("Gather", Mode.WEIGHT_ONLY): 1023,
    }
    refused: Counter[str] = Counter()
    for op, mode in MATRICES:
        refused.update(matrix(op, mode).unfit)
    assert refused == {"its weight of rank 2 has no blocks of 3 axes": 6 * 217}
    assert (sum(exact.values()), sum(refused.values())) == (8618, 1302)


@pytest.mark.parametrize(
    ("op", "modes"),
    [
        ("MatMul", {Mode.WEIGHT_ONLY: 285, Mode.STORAGE: 738, Mode.FLOAT: 217}),
        ("Gemm", {Mode.WEIGHT_ONLY: 285, Mode.STORAGE: 738, Mode.FLOAT: 217}),
        ("Gather", {Mode.WEIGHT_ONLY: 806, Mode.STORAGE: 217, Mode.FLOAT: 217}),
    ],
)
def test_weight_only_falls_back_where_nothing_uses_codes(op: str, modes: dict[Mode, int]) -> None:
    assert matrix(op, Mode.WEIGHT_ONLY).modes == modes


@pytest.mark.parametrize("op", OPERATORS)
def test_stored_weights_leave_nothing_to_run(op: str) -> None:
    assert matrix(op, Mode.STORAGE).runs == {}


# --- other shapes and types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 64, 10), (3, 30, 17)])
@pytest.mark.parametrize("per", [(16,), (2, 8, 4), (1, 1, 5, 3), (7, 3)])
def test_stacks_of_matrices_decode_exactly(shape: tuple[int, ...], per: tuple[int, ...]) -> None:
    weight = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    nodes = calls("MatMul", weight, 1)
    decision = decide_weights(nodes[0], Mode.STORAGE, QuantSpec("int4", per), "asked for", in_body=False)
    (decoded,), left = run_decoders(nodes, [decision])
    np.testing.assert_array_equal(decoded, expected(weight, decision), strict=True)
    assert not left


@pytest.mark.parametrize("op", ["Conv", "Gather"])
# With 16 bits and scales beside them nothing would be gained, and the weight stays as it is.
@pytest.mark.parametrize("format", [name for name in STORED if format_named(name).bits < 16])
def test_float16_weights_are_decoded_in_float32_and_rounded_last(format: str, op: str) -> None:
    weight = np.random.default_rng(3).normal(size=(44, 24)).astype(np.float16)
    nodes = calls(op, weight, 1)
    spec = QuantSpec(format, (8,), symmetric=not format.startswith("u"))
    decision = decide_weights(nodes[0], Mode.WEIGHT_ONLY, spec, "asked for", in_body=False)
    (decoded,), _ = run_decoders(nodes, [decision])
    np.testing.assert_array_equal(decoded, expected(weight, decision), strict=True)


def test_bfloat16_weights_are_rounded_last() -> None:
    weight = np.random.default_rng(3).normal(size=(24, 20)).astype(ml_dtypes.bfloat16)
    spec = QuantSpec("int4", (8,))
    chain = new_chain()
    decode_folded(chain, encode_array(weight, spec, channel_axis=1, reduction_axis=0), spec, TensorProto.BFLOAT16)
    assert chain.nodes[-1].attrs == {"to": TensorProto.BFLOAT16}


# --- what is appended -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (QuantSpec("int8", Granularity.CHANNEL), ["Cast", "Mul"]),
        (QuantSpec("uint4", symmetric=False), ["Cast", "Cast", "Sub", "Mul"]),
        (QuantSpec("int4", (8,)), ["Cast", "Reshape", "Mul", "Reshape"]),
        (QuantSpec("int4", (16,)), ["Cast", "Pad", "Reshape", "Mul", "Reshape", "Slice"]),
        (
            QuantSpec("float4e2m1", (8,), scale="e8m0"),
            ["Cast", "Gather", "Reshape", "Cast", "Gather", "Mul", "Reshape"],
        ),
        (QuantSpec("int8", Granularity.CHANNEL, scale="ue4m3", two_level=True), ["Cast", "Cast", "Mul", "Mul"]),
        (
            QuantSpec("uint8", symmetric=False, storage=Storage.WORDS),
            ["Unsqueeze", "BitwiseAnd", "BitShift", "Reshape", "Cast", "Cast", "Sub", "Mul"],
        ),
    ],
    ids=str,
)
def test_a_decoder_has_no_node_that_it_does_not_need(spec: QuantSpec, found: list[str]) -> None:
    chain = new_chain()
    decode_folded(chain, matrix_of(spec), spec, TensorProto.FLOAT)
    assert ops(chain) == found


@pytest.mark.parametrize(
    ("spec", "linear"),
    [
        (QuantSpec("int8"), True),
        (QuantSpec("int8", Granularity.CHANNEL), True),
        (QuantSpec("float8e4m3fn", (16,)), True),
        (QuantSpec("int4", (8,), storage=Storage.WORDS), True),
        (QuantSpec("float4e2m1", (8,), storage=Storage.WORDS), False),
        (QuantSpec("int4", (4, 8)), False),
    ],
    ids=str,
)
def test_one_dequantizelinear_expresses_one_blocked_axis(spec: QuantSpec, linear: bool) -> None:
    assert is_linear(matrix_of(spec), spec) is linear


# --- strict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "opset", "codes", "scale"),
    [
        (QuantSpec("float4e2m1", (8,), scale="e8m0", scale_rounding=Rounding.FLOOR), 24, "FLOAT4E2M1", "FLOAT8E8M0"),
        (QuantSpec("float4e2m1", (8,), scale="ue4m3", two_level=True), 23, "FLOAT4E2M1", "FLOAT8E4M3FN"),
        (QuantSpec("float8e5m2", (8,), scale="bfloat16"), 23, "FLOAT8E5M2", "BFLOAT16"),
        (QuantSpec("int8", Granularity.CHANNEL, scale="float16", two_level=True), 13, "INT8", "FLOAT16"),
        (QuantSpec("uint2", (8,), symmetric=False, scale="ue4m3"), 25, "UINT2", "FLOAT8E4M3FN"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_strict_keeps_every_type_and_is_valid_onnx(
    spec: QuantSpec, opset: int, codes: str, scale: str, dtype: int
) -> None:
    chain = new_chain()
    quantized = matrix_of(spec)
    decoded = decode_linear(chain, quantized, spec, dtype, strict=True)
    decoded.shape = [24, 20]
    decoded.dtype = np.dtype(np.float32 if dtype == TensorProto.FLOAT else np.float16)
    model = to_model(Graph(chain.nodes, outputs=[decoded], name="strict", opset=opset))
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    assert (stored["w.codes"], stored["w.scale"]) == (codes, scale)
