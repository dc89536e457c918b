"""Weights back to floats: subgraphs of constants, and packed blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, defs, helper, numpy_helper, parser

from onnxq.errors import ModelError
from onnxq.ir import Constant, Graph, Node, Variable, as_graph, constant, constants, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DequantizeWeights, RemoveUnused, UnpackBlockWeights
from onnxq.passes.dequantize.weights import DequantizedResult, DequantSubgraphs, GatheredRows
from onnxq.rewrite import Changes

BYTES = np.arange(12, dtype=np.int8).reshape(4, 3)
STORED = {
    "c": BYTES, "s": np.array(0.5, np.float32), "w": np.ones((4, 3), np.float32), "u": np.arange(4, dtype=np.uint32),
    "four": np.array(4, np.uint32), "shape": np.array([3, 4]),
}  # fmt: skip


def graph_of(text: str, opset: int = 18) -> Graph:
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "my.own" : 1, "com.microsoft" : 1]>'
    made: ModelProto = parser.parse_model(f"{header} g {text}")
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in STORED.items())
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    infer_shapes(graph)
    return graph


def found(body: str) -> dict[str, DequantizedResult]:
    graph = graph_of(f"(float[4, 3] x, int64[2] i, int64[5] j) => (float y) {{ {body} }}")
    return {one.tensor.name: one for one in DequantSubgraphs.of(graph).results(graph.opset)}


def loaded(one: DequantizedResult) -> NDArray[np.generic]:
    assert one.tensor_data is not None
    return one.tensor_data.load()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = DequantizeLinear(c, s)  y = Add(a, x)", {"a": "c"}),
        ("a = Cast <to = 1> (c)  b = Mul(a, s)  y = Add(b, x)", {"b": "c"}),
        ("a = Cast <to = 1> (c)  b = Mul(a, s)  d = Add(b, x)  y = Add(a, d)", {"a": "c", "b": "c"}),
        ('a = BitShift <direction = "RIGHT"> (u, four)  b = Cast <to = 1> (a)  y = Mul(b, s)', {"y": "u"}),
        ("a = Mul(w, s)  y = Add(a, x)", {}),
        ("a = Cast <to = 1> (shape)  y = Mul(a, s)", {}),
        ("a = Add(x, x)  y = Mul(a, s)", {}),
        ("a = Cast <to = 7> (c)  b = Cast <to = 7> (x)  d = Add(a, b)  y = Cast <to = 1> (d)", {}),
        ("a = Cast <to = 1> (c)  b = my.own.Odd(a)  y = Add(b, x)", {"a": "c"}),
        ("a = com.microsoft.DequantizeLinear(c, s)  y = Add(a, x)", {"a": "c"}),
        ("a = RandomNormalLike(w)  b = Cast <to = 1> (c)  d = Add(a, b)  y = Add(d, x)", {"b": "c"}),
    ],
)
def test_results_are_floats_from_codes_that_the_rest_reads(body: str, expected: dict[str, str]) -> None:
    assert {name: one.quantized for name, one in found(body).items()} == expected


def test_results_have_values_a_scope_and_no_obstacle() -> None:
    one = found("a = Cast <to = 1> (c)  b = Mul(a, s)  d = Reshape(b, shape)  e = Flatten(x)  y = MatMul(x, d)")["d"]
    np.testing.assert_array_equal(loaded(one), (BYTES * np.float32(0.5)).reshape(3, 4))
    assert (one.scope.name, one.rows) == ("g", None)


def test_rows_that_an_index_chooses_have_the_whole_table_as_values() -> None:
    one = found("a = Gather(c, i)  b = Cast <to = 1> (a)  y = Mul(b, s)")["y"]
    np.testing.assert_array_equal(loaded(one), BYTES * np.float32(0.5))
    assert one.rows is not None
    assert (one.rows.indices.name, one.rows.count) == ("i", 4)
    assert one.rows == GatheredRows(one.rows.indices, 4)


def test_equal_recipes_are_equal_whatever_the_names() -> None:
    results = found(
        """a = Cast <to = 1> (c)  b = Mul(a, s)  d = Cast <to = 1> (c)  e = Mul(d, s)  f = Mul(d, w)
           g = Add(b, x)  h = Add(e, g)  y = Add(f, h)"""
    )
    assert results["b"].computation == results["e"].computation
    assert results["b"].computation != results["f"].computation


def test_rows_of_one_table_have_equal_recipes_whatever_chooses_them() -> None:
    results = found(
        """a = Gather(c, i)  b = Cast <to = 1> (a)  d = Gather(c, j)  e = Cast <to = 1> (d)  h = Cast <to = 1> (c)
           f = MatMul(b, x)  g = MatMul(e, x)  k = MatMul(h, x)  y = Concat <axis = 0> (f, g, k)"""
    )
    assert results["b"].computation == results["e"].computation
    assert results["b"].computation != results["h"].computation


def test_the_scales_of_kernels_on_blocks_count_though_they_are_no_codes() -> None:
    graph = graph_of("(float[4, 3] x) => (float y) { a = Mul(w, s)  y = com.microsoft.MatMulNBits(x, c, a) }")
    assert [one.tensor.name for one in DequantSubgraphs.of(graph).results(18)] == ["a"]


def test_nodes_that_nothing_reads_are_told_from_those_that_something_does() -> None:
    graph = graph_of(
        """(float[4, 3] x) => (float y) {
            [dead] a = Cast <to = 1> (c)  [deader] b = Mul(a, s)  [live] d = Cast <to = 1> (c)  y = Add(d, x)
        }"""
    )
    assert {node.name for node in DequantSubgraphs.of(graph).unread()} == {"dead", "deader"}


def test_a_chain_of_thousands_is_found_in_no_time_and_without_recursion() -> None:
    steps = "".join(f"a{i + 1} = Add(a{i}, a0) " for i in range(3000))
    results = found(f"a0 = Cast <to = 1> (c) {steps} y = Add(a3000, x)")
    np.testing.assert_array_equal(loaded(results["a3000"]), BYTES * np.float32(3001))


def test_onnx_has_every_operator_that_decoders_are_made_of() -> None:
    from onnxq.passes.dequantize.weights import _DECODING

    assert all(onnx.defs.has(op) for op in _DECODING)


# DequantizeWeights replaces decoders of constants by what they give.

GENERATOR = np.random.default_rng(0)
CODES = GENERATOR.integers(-127, 128, (16, 24)).astype(np.int8)
COLUMN_SCALES = np.linspace(0.001, 0.01, 24, dtype=np.float32)
WORDS = GENERATOR.integers(0, 2**32, (16, 3), dtype=np.uint64).astype(np.uint32)
FLOAT = np.dtype(np.float32)


def dequantized(made: ModelProto | Graph) -> tuple[Graph, Changes]:
    graph = named_graph(made)
    changes = apply_once(DequantizeWeights(), graph)
    RemoveUnused().apply(graph)
    infer_shapes(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return graph, changes


def product(decoder: str, opset: int = 17, kind: str = "float", **weights: Array) -> ModelProto:
    """Data of 16 columns times a weight ``w`` that the nodes of ``decoder`` make."""
    return model(
        f"g ({kind}[3, 16] x) => ({kind}[3, 24] y) {{ {decoder} [dot] y = MatMul(x, w) }}",
        opset=opset, ir_version=10, **weights,
    )  # fmt: skip


def small(name: str, shape: Iterable[int]) -> Array:
    patterns = GENERATOR.integers(0, 256, tuple(shape)).astype(np.uint8)
    if name.startswith(("int", "uint")):
        return (patterns % 4).astype(getattr(ml_dtypes, name))
    return (GENERATOR.normal(size=tuple(shape)) * 2).astype(np.float32).astype(getattr(ml_dtypes, name))


DECODERS: dict[str, ModelProto] = {
    "linear": product("w = DequantizeLinear(c, s)", c=CODES, s=np.array(0.01, np.float32)),
    "linear, with a zero point for each column": product(
        "w = DequantizeLinear <axis = 1> (c, s, z)", c=CODES, s=COLUMN_SCALES, z=np.arange(24, dtype=np.int8)
    ),
    "linear in blocks": product(
        "w = DequantizeLinear <axis = 0, block_size = 8> (c, s)", opset=21,
        c=CODES, s=np.linspace(0.01, 0.02, 48, dtype=np.float32).reshape(2, 24),
    ),
    "linear with scales on two levels": product(
        "t = DequantizeLinear(u, g)  w = DequantizeLinear <axis = 0, block_size = 8> (c, t)", opset=21,
        c=CODES, u=small("float8_e4m3fn", (2, 24)), g=np.array(0.01, np.float32),
    ),
    "linear of another domain": product(
        "w = com.microsoft.DequantizeLinear <axis = 1> (c, s, z)",
        c=CODES, s=COLUMN_SCALES, z=np.zeros(24, np.int8),
    ),
    "stored": product("d = Cast <to = 1> (c)  w = Mul(d, s)", c=CODES, s=COLUMN_SCALES),
    "stored with a scale in bfloat16": product(
        "d = Cast <to = 1> (c)  t = Cast <to = 1> (s)  w = Mul(d, t)",
        c=CODES, s=COLUMN_SCALES.astype(ml_dtypes.bfloat16),
    ),
    "stored with powers of two": product(
        "d = Cast <to = 1> (c)  t = Cast <to = 1> (s)  w = Mul(d, t)", opset=24,
        c=small("float8_e5m2", (16, 24)), s=np.full(24, 120, np.uint8).view(ml_dtypes.float8_e8m0fnu),
    ),
    "stored in blocks": product(
        """d = Cast <to = 1> (c)  e = Reshape(d, split)  f = Mul(e, s)  g = Reshape(f, whole)
           w = Transpose(g)""",
        c=CODES.T.copy(), s=np.linspace(0.01, 0.02, 48, dtype=np.float32).reshape(24, 2, 1),
        split=np.array([24, 2, 8]), whole=np.array([24, 16]),
    ),
    "words": product(
        """a = Unsqueeze(c, last)  b = BitShift <direction = "RIGHT"> (a, shifts)  d = BitwiseAnd(b, mask)
           e = BitwiseXor(d, sign)  f = Cast <to = 1> (e)  g = Sub(f, half)  h = Reshape(g, whole)  w = Mul(h, s)""",
        opset=18, c=WORDS, last=np.array([-1]), shifts=np.arange(0, 32, 4, dtype=np.uint32),
        mask=np.array(15, np.uint32), sign=np.array(8, np.uint32), half=np.array(8, np.float32),
        whole=np.array([16, 24]), s=COLUMN_SCALES,
    ),
    "looked up in a table": product(
        "i = Cast <to = 6> (c)  d = Gather(t, i)  w = Mul(d, s)", opset=21,
        c=small("uint4", (16, 24)), t=np.linspace(-1, 1, 16, dtype=np.float32), s=COLUMN_SCALES,
    ),
    "rounded to float16 last": product(
        "d = Cast <to = 1> (c)  e = Mul(d, s)  w = Cast <to = 10> (e)", kind="float16", c=CODES, s=COLUMN_SCALES
    ),
    "quantized and dequantized": product(
        "q = QuantizeLinear(v, s, z)  w = DequantizeLinear(q, s, z)",
        v=values(16, 24), s=np.array(0.01, np.float32), z=np.array(3, np.int8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("made", DECODERS.values(), ids=DECODERS)
def test_the_weight_is_what_onnxruntime_decodes_bit_for_bit(made: ModelProto) -> None:
    if made.opset_import[0].version > 23 and onnx.defs.onnx_opset_version() < 25:
        pytest.skip("an old onnxruntime")
    graph, _ = dequantized(made)
    assert ops(graph) == ["MatMul"]
    weight = node_named(graph, "dot").inputs[1]
    assert isinstance(weight, Constant)
    assert weight.shape == (16, 24)
    shown = ModelProto()
    shown.CopyFrom(made)
    kind = TensorProto.FLOAT16 if weight.dtype == np.float16 else TensorProto.FLOAT
    shown.graph.output.append(onnx.helper.make_tensor_value_info("w", kind, [16, 24]))
    inputs = sample(made)
    expected = outputs(shown, inputs)
    np.testing.assert_array_equal(weight.values, expected["w"], strict=True)
    assert difference(outputs(graph, inputs), {"y": expected["y"]}) <= (2e-6 if weight.dtype == FLOAT else 1e-3)


@pytest.mark.parametrize("scale_type", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("code_type", ["float4_e2m1fn", "int4", "float8_e4m3fn"])
def test_what_onnxruntime_has_no_kernel_for_is_decoded_by_definition(code_type: str, scale_type: str) -> None:
    stored = small(code_type, (16, 24))
    scale = np.full((2, 24), 0.25, np.float32).astype(np.dtype(getattr(ml_dtypes, scale_type, scale_type)))
    kind = "bfloat16" if scale_type == "bfloat16" else "float"
    attributes = "axis = 0, block_size = 8" + (", output_dtype = 1" if "e8m0" in scale_type else "")
    made = product(f"w = DequantizeLinear <{attributes}> (c, s)", opset=24, kind=kind, c=stored, s=scale)
    graph, _ = dequantized(made)
    weight = node_named(graph, "dot").inputs[1]
    assert weight.dtype == (ml_dtypes.bfloat16 if kind == "bfloat16" else FLOAT)
    np.testing.assert_array_equal(weight.values.astype(np.float32), stored.astype(np.float32) / 4)


def renamed(made: ModelProto, **names: str) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(made)
    for tensor in copy.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in copy.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    return copy


def test_a_weight_takes_its_old_name_where_that_is_free() -> None:
    graph, changes = dequantized(renamed(DECODERS["stored"], c="kernel.codes"))
    assert changes.changed == ("kernel",)
    assert node_named(graph, "dot").inputs[1].name == "kernel"
    kept, _ = dequantized(renamed(DECODERS["stored"], c="x.codes"))
    assert node_named(kept, "dot").inputs[1].name == "w"


def test_weights_that_are_decoded_alike_are_one() -> None:
    made = model(
        """g (float[3, 16] x) => (float[3, 24] y, float[3, 24] z, float[3, 24] u) {
            v = DequantizeLinear(c, s)  [a] y = MatMul(x, v)
            w = DequantizeLinear(c, s)  [b] z = MatMul(x, w)
            t = DequantizeLinear(c, r)  [c] u = MatMul(x, t)
        }""",
        c=CODES, s=np.array(0.01, np.float32), r=np.array(0.02, np.float32),
    )  # fmt: skip
    graph, changes = dequantized(made)
    weights = [node_named(graph, name).inputs[1] for name in "abc"]
    assert weights[0] is weights[1]
    assert weights[0] is not weights[2]
    assert changes.changed == ("v", "w", "t")


def test_bodies_get_weights_that_are_decoded_around_or_inside_of_them() -> None:
    made = model(
        """g (float[3, 16] x, bool c) => (float[3, 24] y) {
            w = DequantizeLinear(codes, s)
            y = If (c) <
                then_branch = yes () => (float[3, 24] t) { [outer] t = MatMul(x, w) },
                else_branch = no () => (float[3, 24] e) {
                    d = Cast <to = 1> (codes)  v = Mul(d, s)  [inner] e = MatMul(x, v) }>
        }""",
        codes=CODES, s=np.array(0.01, np.float32),
    )  # fmt: skip
    graph, _ = dequantized(made)
    assert ops(graph) == ["If", "MatMul", "MatMul"]
    for seed in (0, 1):
        inputs = sample(made, seed)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2e-6


def test_a_weight_that_is_returned_is_made_by_a_node() -> None:
    made = model("g () => (float[16, 24] y) { y = DequantizeLinear(c, s) }", c=CODES, s=np.array(0.01, np.float32))
    graph, _ = dequantized(made)
    assert ops(graph) == ["Identity"]
    np.testing.assert_array_equal(outputs(graph, {})["y"], outputs(made, {})["y"], strict=True)


ROWS = {
    "of codes": "a = Gather(c, i)  b = Cast <to = 1> (a)  y = Mul(b, s)",
    "of quantized values, each row with its scale": (
        "a = Gather(c, i)  b = Cast <to = 1> (a)  r = Gather(rs, i)  y = Mul(b, r)"
    ),
    "by DequantizeLinear": "a = Gather(c, i)  y = DequantizeLinear(a, s)",
    "by DequantizeLinear along the last axis": "a = Gather(c, i)  y = DequantizeLinear <axis = -1> (a, cs)",
    "in blocks": """a = Gather(c, i)  b = Cast <to = 1> (a)  d = Reshape(b, split)  e = Mul(d, bs)
                    y = Reshape(e, whole)""",
}


@pytest.mark.parametrize("body", ROWS.values(), ids=ROWS)
def test_decoding_rows_becomes_choosing_rows_of_the_decoded_table(body: str) -> None:
    made = model(
        f"g (int64[N, 3] i) => (float[N, 3, 24] y) {{ {body} }}",
        c=CODES, s=np.array(0.01, np.float32), cs=COLUMN_SCALES, bs=np.linspace(1, 2, 3, dtype=np.float32)[:, None],
        rs=np.linspace(0.1, 0.2, 16, dtype=np.float32)[:, None], split=np.array([0, 0, 3, 8]),
        whole=np.array([0, 0, 24]),
    )  # fmt: skip
    graph, _ = dequantized(made)
    assert ops(graph) == ["Gather"]
    assert [tensor.shape for tensor in constants(graph) if tensor.outputs] == [(16, 24)]
    inputs = {"i": np.array([[0, 15, 3], [-1, 7, 7]])}
    np.testing.assert_array_equal(outputs(graph, inputs)["y"], outputs(made, inputs)["y"], strict=True)


MIXED = {
    "by the shape of the indices": "d = Reshape(b, turned)  y = Mul(d, s)",
    "by their place": "y = Mul(b, s)",
    "by their place in a column": "y = Mul(b, t)",
    "by their neighbours": (
        "d = Reshape(b, flat)  e = Slice(d, one, end, none)  f = Pad(e, more)  y = Reshape(f, turned)"
    ),
}


@pytest.mark.parametrize("body", MIXED.values(), ids=MIXED)
def test_what_depends_on_more_than_the_index_of_a_row_is_left_behind_decoded_rows(body: str) -> None:
    made = model(
        f"g (int64[2, 3] i) => (float[2, 3, 24] y) {{ a = Gather(c, i)  b = Cast <to = 1> (a) {body} }}",
        c=CODES, s=np.linspace(1, 2, 144, dtype=np.float32).reshape(2, 3, 24), turned=np.array([2, 3, 24]),
        t=np.array([1, 2], np.float32).reshape(2, 1, 1), flat=np.array([-1, 24]), one=np.array([1]),
        end=np.array([99]), none=np.array([0]), more=np.array([0, 0, 1, 0]),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    assert DequantizeWeights().apply(graph) == Changes(("b",), (("y", "its rows cannot be computed one by one"),))
    inputs = {"i": np.array([[0, 15, 3], [-1, 7, 7]])}
    np.testing.assert_array_equal(outputs(graph, inputs)["y"], outputs(made, inputs)["y"], strict=True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("d = DequantizeLinear(c, s)  g = Gather(d, i)  y = Reshape(g, flat)", ["Gather", "Reshape"]),
        ("d = DequantizeLinear(c, s)  n = Squeeze(i)  y = Gather(d, n)", ["Squeeze", "Gather"]),
        ("d = DequantizeLinear(c, s)  y = Expand(d, large)", ["Expand"]),
        (
            "d = DequantizeLinear(c, s)  g = Gather(d, i)  q = QuantizeLinear(g, t, z)  r = Transpose(q)"
            "  y = DequantizeLinear(r, t, z)",
            ["Gather", "QuantizeLinear", "Transpose", "DequantizeLinear"],
        ),
        ("d = Cast <to = 1> (c)  e = Mul(d, s)  f = Cast <to = 7> (e)  y = Gather(f, i)", ["Cast", "Gather"]),
    ],
)
def test_the_largest_part_of_a_decoder_goes_whose_values_can_take_its_place(body: str, expected: list[str]) -> None:
    made = model(
        f"g (int64[1, 3] i) => (float y) {{ {body} }}",
        c=CODES, s=np.array(0.5, np.float32), t=np.array(0.25, np.float32), z=np.array(3, np.int8),
        flat=np.array([1, -1]), large=np.array([5000, 16, 24]),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    if "Cast" in expected:
        made.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    graph, _ = dequantized(made)
    assert ops(graph) == expected
    inputs = {"i": np.array([[0, 15, 3]])}
    np.testing.assert_array_equal(outputs(graph, inputs)["y"], outputs(made, inputs)["y"], strict=True)


FLOAT_MODELS = {
    "arithmetic of shapes": (
        "a = Shape(x)  b = Gather(a, n)  d = Concat <axis = 0> (b, n)  e = Cast <to = 1> (d)  y = Add(e, e)"
    ),
    "constants of other types": "a = Cast <to = 1> (n)  b = Mul(a, a)  y = Add(x, b)",
    "a mask in bytes": "a = Cast <to = 9> (m)  y = Where(a, x, x)",
    "rows of floats": "a = Cast <to = 7> (x)  y = Gather(f, a)",
    "bfloat16": "a = Cast <to = 1> (h)  y = Add(x, a)",
}


@pytest.mark.parametrize("body", FLOAT_MODELS.values(), ids=FLOAT_MODELS)
def test_constants_of_float_models_are_left(body: str) -> None:
    made = model(
        f"g (float[2, 2] x) => (float y) {{ {body} }}",
        n=np.array([0, 1]), m=np.array([[1, 0]], np.uint8), f=values(4, 4), h=values(2, 2).astype(ml_dtypes.bfloat16),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    infer_shapes(graph)
    assert DequantizeWeights().apply(graph) == Changes()


def test_a_result_far_larger_than_its_codes_is_left() -> None:
    made = model(
        "g (float[1] x) => (float[3000, 3000] y) { a = Expand(c, n)  b = Cast <to = 1> (a)  y = Add(x, b) }",
        c=np.ones((1, 1), np.int8), n=np.array([3000, 3000]),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    assert DequantizeWeights().apply(graph).skipped == (
        ("b", "it is far larger than the constants that it is computed from"),
    )


def test_large_weights_are_not_kept_in_memory() -> None:
    integers = GENERATOR.integers(-127, 128, (512, 512)).astype(np.int8)
    made = model(
        "g (float[1, 512] x) => (float[1, 512] y) { d = Cast <to = 1> (c)  w = Mul(d, s)  y = MatMul(x, w) }",
        c=integers, s=np.array(0.5, np.float32),
    )  # fmt: skip
    graph, _ = dequantized(made)
    (weight,) = (tensor for tensor in constants(graph) if tensor.outputs)
    assert type(weight.tensor_data).__name__ == "LazyTensor"
    stored = {tensor.name: tensor for tensor in to_model(graph).graph.initializer}["w"]
    np.testing.assert_array_equal(numpy_helper.to_array(stored), integers.astype(np.float32) / 2)


# UnpackBlockWeights gives the float weights that onnxruntime's kernels on blocks multiply by.

DOMAIN = "com.microsoft"
RECENT = pytest.mark.skipif(defs.onnx_opset_version() < 25, reason="an old onnxruntime without these kernels")
PACKED_ROWS, COLUMNS, BLOCK = 80, 6, 32
"""The last block of each column is partial."""


def kernel(op: str, data: Array, inputs: list[Array | None], **attributes: Any) -> Graph:
    """A model of one node; the data is its first input for products and its second for lookups."""
    fed = Variable("x", data.dtype, list(data.shape))
    given = [Variable("") if array is None else constant(f"i{n}", array) for n, array in enumerate(inputs)]
    given.insert(1 if op == "GatherBlockQuantized" else 0, fed)
    floats = [array.dtype for array in inputs if array is not None and array.dtype.name.startswith("float")]
    output = Variable("y", floats[-1] if op == "GatherBlockQuantized" else data.dtype)
    node = Node(op, "op", attributes, given, [output], DOMAIN)
    return Graph([node], [fed], [output], "g", opset=21, import_domains=[helper.make_opsetid(DOMAIN, 1)])


def unpacked(graph: Graph) -> Graph:
    copy = as_graph(to_model(graph))
    assert UnpackBlockWeights().apply(copy).changed == ("op",)
    assert not UnpackBlockWeights().apply(copy)
    return copy


def packed_bytes(*shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


# With 8 bits the kernel takes no float zero points.
@RECENT
@pytest.mark.parametrize(
    ("bits", "zero_points"),
    [(bits, kind) for bits in (2, 4, 8) for kind in ("none", "packed", "float") if (bits, kind) != (8, "float")],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_of_n_bits_multiply_by_the_same_weight_bit_for_bit(bits: int, dtype: Any, zero_points: str) -> None:
    blocks = -(-PACKED_ROWS // BLOCK)
    generator = np.random.default_rng(1)
    zeros = {
        "none": None,
        "packed": packed_bytes(COLUMNS, -(-blocks * bits // 8)),
        "float": generator.uniform(0, 2**bits, (COLUMNS, blocks)).astype(dtype),
    }[zero_points]
    scales = generator.uniform(-0.1, 0.1, (COLUMNS, blocks)).astype(dtype)
    stored = packed_bytes(COLUMNS, blocks, BLOCK * bits // 8)
    # Each row of the product with the identity is a row of the weight.
    identity = np.eye(PACKED_ROWS, dtype=dtype)
    graph = kernel(
        "MatMulNBits",
        identity,
        [stored, scales, zeros],
        K=PACKED_ROWS,
        N=COLUMNS,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=0,
    )
    found = unpacked(graph)
    assert ops(found) == ["MatMul"]
    weight = node_named(found, "op.float").inputs[1].values
    np.testing.assert_array_equal(weight, outputs(graph, {"x": identity})["y"], strict=True)
    data = generator.normal(size=(2, 3, PACKED_ROWS)).astype(dtype)
    graph.inputs[0].shape = found.inputs[0].shape = [2, 3, PACKED_ROWS]
    tolerance = 2e-6 if dtype == np.float32 else 2e-3
    assert difference(outputs(found, {"x": data}), outputs(graph, {"x": data})) <= tolerance


def test_the_bias_is_added() -> None:
    bias = np.linspace(-1, 1, COLUMNS, dtype=np.float32)
    inputs = [packed_bytes(COLUMNS, 3, 16), np.full((COLUMNS, 3), 0.1, np.float32), None, None, bias]
    data = np.random.default_rng(0).normal(size=(5, PACKED_ROWS)).astype(np.float32)
    graph = kernel("MatMulNBits", data, inputs, K=PACKED_ROWS, N=COLUMNS, bits=4, block_size=BLOCK)
    found = unpacked(graph)
    assert ops(found) == ["MatMul", "Add"]
    assert difference(outputs(found, {"x": data}), outputs(graph, {"x": data})) <= 2e-6


@RECENT
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lookups_in_bytes_give_the_same_rows_bit_for_bit(bits: int, dtype: Any, shifted: bool) -> None:
    count, extent, block = 10, 48, 16
    zeros = packed_bytes(count, -(-3 * bits // 8)) if shifted else None
    scales = np.random.default_rng(1).uniform(-0.1, 0.1, (count, 3)).astype(dtype)
    indices = np.array([[3, 0], [9, 3]])
    graph = kernel(
        "GatherBlockQuantized", indices, [packed_bytes(count, extent * bits // 8), scales, zeros],
        bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    found = unpacked(graph)
    assert ops(found) == ["Gather"]
    for name, expected in outputs(graph, {"x": indices}).items():
        np.testing.assert_array_equal(outputs(found, {"x": indices})[name], expected, strict=True)


@RECENT
@pytest.mark.parametrize(("quantized", "gathered"), [(1, 0), (0, 1), (-1, 0), (0, 0)])
@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_lookups_in_small_types_give_the_same_rows_bit_for_bit(name: str, quantized: int, gathered: int) -> None:
    dtype, shape, block = np.dtype(getattr(ml_dtypes, name)), (32, 48), 16
    stored = np.random.default_rng(0).integers(0, 8, shape).astype(np.float32).astype(dtype)
    grid = tuple(extent // (block if axis == quantized % 2 else 1) for axis, extent in enumerate(shape))
    scales = np.random.default_rng(1).uniform(-0.1, 0.1, grid).astype(np.float32)
    zeros = None if "float" in name else np.random.default_rng(2).integers(0, 8, grid).astype(dtype)
    indices = np.array([3, 0, 31])
    graph = kernel(
        "GatherBlockQuantized", indices, [stored, scales, zeros],
        block_size=block, gather_axis=gathered, quantize_axis=quantized,
    )  # fmt: skip
    expected, found = outputs(graph, {"x": indices})["y"], outputs(unpacked(graph), {"x": indices})["y"]
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("quant_type", [0, 1])
def test_products_of_bitsandbytes_codes_multiply_by_the_same_weight_bit_for_bit(quant_type: int) -> None:
    rows, columns, block = 48, 5, 32
    largest = np.random.default_rng(1).uniform(0.1, 2, -(-rows * columns // block)).astype(np.float32)
    identity = np.eye(rows, dtype=np.float32)
    graph = kernel(
        "MatMulBnb4", identity, [packed_bytes(rows * columns // 2), largest],
        K=rows, N=columns, block_size=block, quant_type=quant_type,
    )  # fmt: skip
    found = unpacked(graph)
    weight = node_named(found, "op.float").inputs[1].values
    np.testing.assert_array_equal(weight, outputs(graph, {"x": identity})["y"], strict=True)


def test_a_weight_that_two_nodes_share_is_decoded_once() -> None:
    data = np.zeros((5, PACKED_ROWS), np.float32)
    inputs: list[Array | None] = [packed_bytes(COLUMNS, 3, 16), np.full((COLUMNS, 3), 0.1, np.float32)]
    graph = kernel("MatMulNBits", data, inputs, K=PACKED_ROWS, N=COLUMNS, bits=4, block_size=BLOCK)
    first = graph.nodes[0]
    graph.nodes.append(first.copy(first.inputs, [Variable("z", np.dtype(np.float32))]))
    graph.outputs.append(graph.nodes[1].outputs[0])
    first.inputs[1].name = "w.codes"
    UnpackBlockWeights().apply(graph)
    one, other = (node.inputs[1] for node in graph.nodes)
    assert one is other
    assert isinstance(one, Constant)
    assert one.name == "w"


@pytest.mark.parametrize("change", ["groups", "prepacked", "computed"])
def test_what_is_not_known_is_refused_by_name(change: str) -> None:
    inputs: list[Array | None] = [packed_bytes(COLUMNS, 3, 16), np.full((COLUMNS, 3), 0.1, np.float32)]
    attributes = {"weight_prepacked": 1} if change == "prepacked" else {}
    if change == "groups":
        inputs += [None, np.zeros(PACKED_ROWS, np.int32)]
    graph = kernel("MatMulNBits", np.zeros((5, PACKED_ROWS), np.float32), inputs, K=PACKED_ROWS, N=COLUMNS, bits=4,
                   block_size=BLOCK, **attributes)  # fmt: skip
    if change == "computed":
        graph.nodes[0].inputs[2] = Variable("scales")
    message = "reads scales, which is computed" if change == "computed" else "has a weight with an index of groups"
    with pytest.raises(ModelError, match=rf"node op \(MatMulNBits\) {message}"):
        UnpackBlockWeights().apply(graph)
