"""Codes in the ONNX type of their format, or in one that onnxruntime can read and that loses nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from lowering.combinations import (
    MATRICES,
    OPERATORS,
    STORED,
    calls,
    chosen_specs,
    expected,
    matrix,
    run_decoders,
    specs,
)
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Storage
from onnxq.ir import Constant, Graph, Names, Node, NodeBuilder, Variable, to_model
from onnxq.lowering import decode_folded, decode_linear, decode_rows, is_linear
from onnxq.lowering.decode import (
    is_packed,
    native_numbers,
    numbers_in,
    scale_tensor,
    store_bytes,
    zero_point_numbers,
)
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS, QuantDType, format_named
from onnxq.planning.weights import decide_weights
from onnxq.runtime.sessions import open_session, run


def new_chain() -> NodeBuilder:
    return NodeBuilder("w", Names(Graph()))


def with_scale_one(values: npt.NDArray[Any], format: QuantDType) -> QTensor:
    return QTensor(values, QuantParams(np.ones((), np.float32), None), format)


@pytest.mark.parametrize(
    ("name", "element", "nbytes"),
    [
        ("float4e2m1", "uint4", 4),
        ("float6e2m3", "float8e4m3fn", 8),
        ("float6e3m2", "float8e4m3fn", 8),
        ("float8e5m2", "float8e5m2", 8),
        ("int2", "int2", 2),
    ],
)
def test_types_without_kernels_are_stored_in_others(name: str, element: str, nbytes: int) -> None:
    format = FORMATS[name]
    chain = new_chain()
    native_numbers(chain, with_scale_one(format.round(np.linspace(-2, 2, 8)), format))
    stored = chain.nodes[0].inputs[0]
    assert stored.tensor_data.onnx_dtype == FORMATS[element].onnx_type
    assert stored.nbytes == nbytes


def test_nothing_is_shifted_out_that_a_division_would_round() -> None:
    chain = new_chain()
    stored = store_bytes(chain, with_scale_one(np.arange(-8, 8, dtype=np.int8)[None], FORMATS["int4"]))
    numbers_in(chain, stored, (0, 16), FORMATS["int4"], stored.dtype)
    shift = next(node for node in chain.nodes if node.op == "BitShift")
    mask, shifts = shift.inputs[0].inputs[0].inputs[1].values, shift.inputs[1].values
    assert not (mask % (1 << shifts)).any()


def test_typed_codes_have_the_type_of_the_format() -> None:
    chain, spec = new_chain(), QuantSpec("int4", (4,), storage=Storage.WORDS)
    decode_linear(chain, quantized(spec), spec, TensorProto.FLOAT)
    assert chain.nodes[-2].attrs == {"to": TensorProto.INT4}


# Scales keep the format that they are stored in until a node needs another.


def quantized(spec: QuantSpec) -> QTensor:
    return encode_array(np.linspace(-3, 5, 64, dtype=np.float32).reshape(8, 8), spec, channel_axis=0, reduction_axis=1)


@pytest.mark.parametrize("name", SCALE_FORMATS)
def test_a_scale_is_stored_in_its_format_and_cast(name: str) -> None:
    chain, spec = new_chain(), QuantSpec("int8", (4,), scale=name)
    scale = scale_tensor(chain, quantized(spec), spec, (8, 2), TensorProto.FLOAT)
    stored = scale if isinstance(scale, Constant) else chain.nodes[0].inputs[0]
    assert stored.tensor_data.onnx_dtype == (TensorProto.UINT8 if name == "e8m0" else SCALE_FORMATS[name].onnx_type)
    assert stored.shape == (8, 2)
    assert [node.op for node in chain.nodes] == {"float32": [], "e8m0": ["Cast", "Gather"]}.get(name, ["Cast"])
    values = stored.values.view(SCALE_FORMATS[name].dtype).astype(np.float32)
    np.testing.assert_array_equal(values, quantized(spec).parameters.scale)


@pytest.mark.parametrize(("in_bytes", "dtype"), [(True, TensorProto.UINT8), (False, TensorProto.UINT4)])
def test_a_zero_point_takes_the_type_of_the_codes_or_bytes(in_bytes: bool, dtype: int) -> None:
    chain, spec = new_chain(), QuantSpec("uint4", (4,), symmetric=False)
    zero_point_numbers(chain, quantized(spec), (8, 2), in_bytes=in_bytes)
    assert chain.nodes[0].inputs[0].tensor_data.onnx_dtype == dtype


# Decoders run on onnxruntime and give what numpy gives, bit for bit, in every combination that a spec can name.


def matrix_of(spec: QuantSpec, rows: int = 24, columns: int = 20) -> QTensor:
    weight = np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
    return encode_array(weight, spec, channel_axis=1, reduction_axis=0)


def ops(chain: NodeBuilder) -> list[str]:
    return [node.op for node in chain.nodes]


# --- the matrix -----------------------------------------------------------------------------------------------------


def test_what_is_no_spec_is_refused_with_a_sentence() -> None:
    found, refused = specs()
    assert len(found) > sum(refused.values()) > 1000
    assert all("; " in sentence for sentence in refused)


@pytest.mark.parametrize(("op", "mode"), MATRICES)
def test_every_decoded_weight_equals_that_of_numpy_bit_for_bit(op: str, mode: Mode) -> None:
    found = matrix(op, mode)
    assert found.wrong == []
    assert found.exact + found.modes[Mode.FLOAT] == len(chosen_specs(op, mode))


def test_each_matrix_has_each_choice_and_all_together_have_each_spec() -> None:
    every = specs()[0]
    for name in ("format", "granularity", "symmetric", "scale", "two_level", "storage"):
        for op, mode in MATRICES:
            assert {getattr(one, name) for one in chosen_specs(op, mode)} == {getattr(one, name) for one in every}
    assert {spec for op, mode in MATRICES for spec in chosen_specs(op, mode)} == set(every)


def test_what_a_weight_does_not_take_is_a_block_of_more_axes() -> None:
    # 3-axis blocks fit the weights of convolutions alone.
    refused: Counter[str] = Counter()
    for op, mode in MATRICES:
        refused.update(matrix(op, mode).unfit)
        assert matrix(op, mode).exact > 100
    assert set(refused) == {"its weight has rank 2, too few for blocks of 3 axes"}


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gather"])
def test_weight_only_falls_back_where_nothing_uses_codes(op: str) -> None:
    assert matrix(op, Mode.WEIGHT_ONLY).modes.keys() == {Mode.WEIGHT_ONLY, Mode.STORAGE, Mode.FLOAT}


@pytest.mark.parametrize("op", OPERATORS)
def test_stored_weights_leave_nothing_to_run(op: str) -> None:
    assert matrix(op, Mode.STORAGE).runs == {}


# --- other shapes and types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 64, 10), (3, 30, 17)])
@pytest.mark.parametrize("granularity", [(16,), (2, 8, 4), (1, 1, 5, 3), (7, 3)])
def test_stacks_of_matrices_decode_exactly(shape: tuple[int, ...], granularity: tuple[int, ...]) -> None:
    weight = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    nodes = calls("MatMul", weight, 1)
    decision = decide_weights(nodes[0], Mode.STORAGE, QuantSpec("int4", granularity), "asked for", in_body=False)
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


# Rows that are looked up quantized equal the rows of the decoded table, bit for bit.

TABLE = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
INT64 = np.dtype(np.int64)


def table(spec: QuantSpec) -> QTensor:
    return encode_array(TABLE, spec, channel_axis=0, reduction_axis=-1)


def rows(spec: QuantSpec, indices: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[Node]]:
    """What onnxruntime looks up when the extents of the indices are only known at run time, and the nodes."""
    chain = NodeBuilder("w", Names(Graph()))
    given = Variable("i", indices.dtype, [None] * indices.ndim)
    found = decode_rows(chain, table(spec), spec, given, indices.ndim, TensorProto.FLOAT)
    found.dtype = np.dtype(np.float32)
    model = to_model(Graph(chain.nodes, [given], [found], "rows", opset=25))
    (values,) = run(open_session(model), {"i": indices})
    return values, chain.nodes


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 1, 3, 2)])
@pytest.mark.parametrize("storage", Storage)
def test_indices_have_any_rank_and_extent(shape: tuple[int, ...], storage: Storage) -> None:
    spec = QuantSpec("int4", (16,), storage=storage)
    indices = np.random.default_rng(0).integers(-50, 50, shape)
    found, _ = rows(spec, np.asarray(indices, INT64))
    np.testing.assert_array_equal(found, table(spec).dequantize()[indices], strict=True)


@pytest.mark.parametrize("format", STORED)
def test_the_table_is_never_decoded_as_a_whole(format: str) -> None:
    _, nodes = rows(QuantSpec(format, (8,), symmetric=not format.startswith("u")), np.array([3]))
    first = next(node for node in nodes if node.op == "Gather" and node.inputs[1].name == "i")
    assert first.inputs[0].shape[0] == len(TABLE)
    assert first.inputs[0].nbytes * 8 >= TABLE.size * min(format_named(format).bits, 8)
    assert all(
        node.inputs[0].shape is None or node.inputs[0].shape[0] != len(TABLE) for node in nodes if node.op == "Mul"
    )


@pytest.mark.parametrize(
    ("format", "storage", "words"),
    [
        ("int4", Storage.NATIVE, True),
        ("float4e2m1", Storage.NATIVE, True),
        ("int8", Storage.NATIVE, False),
        ("int8", Storage.WORDS, True),
        ("float6e2m3", Storage.NATIVE, False),
    ],
)
def test_parts_of_bytes_are_packed(format: str, storage: Storage, words: bool) -> None:
    assert is_packed(QuantSpec(format, storage=storage), format_named(format)) is words
