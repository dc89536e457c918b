"""DequantizeWeights replaces decoders of constants by what they give."""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from onnx import ModelProto, TensorProto, numpy_helper

from onnxq.ir import Constant, Graph, as_graph, constants, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DequantizeWeights, RemoveUnused
from onnxq.rewrite import Changes

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
    codes = small(code_type, (16, 24))
    scale = np.full((2, 24), 0.25, np.float32).astype(np.dtype(getattr(ml_dtypes, scale_type, scale_type)))
    kind = "bfloat16" if scale_type == "bfloat16" else "float"
    attributes = "axis = 0, block_size = 8" + (", output_dtype = 1" if "e8m0" in scale_type else "")
    made = product(f"w = DequantizeLinear <{attributes}> (c, s)", opset=24, kind=kind, c=codes, s=scale)
    graph, _ = dequantized(made)
    weight = node_named(graph, "dot").inputs[1]
    assert weight.dtype == (ml_dtypes.bfloat16 if kind == "bfloat16" else FLOAT)
    np.testing.assert_array_equal(weight.values.astype(np.float32), codes.astype(np.float32) / 4)


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
    "of codes, each row with its scale": ("a = Gather(c, i)  b = Cast <to = 1> (a)  r = Gather(rs, i)  y = Mul(b, r)"),
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
    assert DequantizeWeights().apply(graph).left == (("b", "it is far larger than what it is computed from"),)


def test_large_weights_are_not_kept_in_memory() -> None:
    codes = GENERATOR.integers(-127, 128, (512, 512)).astype(np.int8)
    made = model(
        "g (float[1, 512] x) => (float[1, 512] y) { d = Cast <to = 1> (c)  w = Mul(d, s)  y = MatMul(x, w) }",
        c=codes, s=np.array(0.5, np.float32),
    )  # fmt: skip
    graph, _ = dequantized(made)
    (weight,) = (tensor for tensor in constants(graph) if tensor.outputs)
    assert type(weight.tensor_data).__name__ == "ComputedPayload"
    stored = {tensor.name: tensor for tensor in to_model(graph).graph.initializer}["w"]
    np.testing.assert_array_equal(numpy_helper.to_array(stored), codes.astype(np.float32) / 2)
