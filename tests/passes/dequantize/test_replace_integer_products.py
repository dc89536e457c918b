"""ReplaceIntegerProducts multiplies floats where integers were multiplied and scaled back."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.graph import Graph
from onnxq.modelfile import as_graph
from onnxq.passes import RemoveQuantizeDequantize, ReplaceIntegerProducts

NOISE = 0.02
"""Data on 8 bits and nothing else."""

DOT_SCALE = np.linspace(0.01, 0.02, 5, dtype=np.float32)
# Two products with 8 bits fit 16, as processors without VNNI add them.
DOT = {
    "w": np.random.default_rng(0).integers(-64, 65, (6, 5)).astype(np.int8),
    "ws": DOT_SCALE, "wz": np.arange(5, dtype=np.int8),
}  # fmt: skip
KERNEL_SCALE = np.linspace(0.01, 0.02, 4, dtype=np.float32)
CONV = {
    "w": np.random.default_rng(1).integers(0, 256, (4, 6, 3, 3)).astype(np.uint8),
    "ws": KERNEL_SCALE.reshape(4, 1, 1), "wz": np.array(131, np.uint8), "b": values(4),
}  # fmt: skip
MEASURE = "q, s, z = DynamicQuantizeLinear(x)"


def dot(body: str, measure: str = MEASURE, **more: np.ndarray) -> ModelProto:
    made = model(f"g (float[7, 6] x) => (float y) {{ {measure} {body} }}", **DOT, **more)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


def conv(body: str) -> ModelProto:
    made = model(f"g (float[2, 6, 8, 8] x) => (float y) {{ {MEASURE} {body} }}", **CONV, shape=np.array([1, 4, 1, 1]))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


EXAMPLES: dict[str, tuple[ModelProto, list[str]]] = {
    "as quantize_dynamic writes it": (
        dot("[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, ws)  y = Mul(b, c)"),
        ["MatMul"],
    ),
    "with its factors the other way round": (
        dot("[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(ws, s)  y = Mul(c, b)"),
        ["MatMul"],
    ),
    "one factor after the other": (
        dot("[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(b, s)  y = Mul(c, ws)"),
        ["MatMul"],
    ),
    "followed by a factor of the float model": (
        dot(
            "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, ws)  d = Mul(b, c)  y = Mul(d, f)",
            f=np.array(2.5, np.float32),
        ),
        ["MatMul", "Mul"],
    ),
    "with codes that were moved": (
        dot("""t = Transpose(q)  u = Transpose(t)
               [op] a = MatMulInteger(u, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, ws)  y = Mul(b, c)"""),
        ["Transpose", "Transpose", "MatMul"],
    ),
    "of static codes": (
        dot(
            "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, ws)  y = Mul(b, c)",
            "q = QuantizeLinear(x, s, z)", s=np.array(0.03, np.float32), z=np.array(120, np.uint8),
        ),
        ["MatMul"],
    ),
    "of two measured operands": (
        dot("""r = Transpose(x)  p, t, v = DynamicQuantizeLinear(r)
               [op] a = MatMulInteger(q, p, z, v)  b = Cast <to = 1> (a)  c = Mul(s, t)  y = Mul(b, c)"""),
        ["Transpose", "MatMul"],
    ),
    "with a bias behind it": (
        dot(
            "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, ws)  d = Mul(b, c)  y = Add(d, e)",
            e=values(5),
        ),
        ["MatMul", "Add"],
    ),
    "with a bias in integers": (
        dot(
            """c = Mul(s, ws)  f = Div(e, c)  g = Floor(f)  h = Cast <to = 6> (g)
               [op] a = MatMulInteger(q, w, z, wz)  i = Add(a, h)  b = Cast <to = 1> (i)  y = Mul(b, c)""",
            e=values(5),
        ),
        ["MatMul", "Add"],
    ),
    "convolution": (
        conv("""[op] a = ConvInteger <pads = [1, 1, 1, 1], strides = [2, 2]> (q, w, z, wz)
                k = Cast <to = 1> (a)  c = Mul(s, ws)  y = Mul(k, c)"""),
        ["Conv"],
    ),
    "convolution with a bias in integers": (
        conv("""r = Reshape(ws, shape)  t = Mul(s, r)  one = Reshape(b, shape)  f = Div(one, t)  g = Floor(f)
                h = Cast <to = 6> (g)  [op] a = ConvInteger(q, w, z, wz)  i = Add(a, h)
                j = Cast <to = 1> (i)  c = Mul(s, ws)  y = Mul(j, c)"""),
        ["Reshape", "Conv", "Add"],
    ),
}  # fmt: skip


def replaced(made: ModelProto) -> Graph:
    graph = named_graph(made)
    assert apply_once(ReplaceIntegerProducts(), graph).changed == ("op",)
    return graph


@pytest.mark.parametrize(("made", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_the_float_product_computes_the_same_but_for_rounding(made: ModelProto, expected: list[str]) -> None:
    graph = replaced(made)
    inputs = {name: array.clip(-3, 3) for name, array in sample(made).items()}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == expected
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


def test_the_weight_is_what_dequantize_linear_gives_bit_for_bit() -> None:
    for name, parts, axis in (("as quantize_dynamic writes it", DOT, 1), ("convolution", CONV, 0)):
        codes, scale, zero_point = (parts[key] for key in ("w", "ws", "wz"))
        scale, zero_point = scale.reshape(-1), np.broadcast_to(zero_point, scale.size).copy()
        decoder = model(
            f"g () => (float y) {{ y = DequantizeLinear <axis = {axis}> (c, s, z) }}", c=codes, s=scale, z=zero_point
        )
        decoder.graph.output[0].type.tensor_type.ClearField("shape")
        weight = node_named(replaced(EXAMPLES[name][0]), "op.float").inputs[1]
        np.testing.assert_array_equal(weight.values, outputs(decoder, {})["y"], strict=True)


def test_a_bias_along_the_channels_becomes_that_of_the_convolution() -> None:
    made = conv("""t = Mul(s, scale)  f = Div(b, t)  g = Floor(f)  h = Cast <to = 6> (g)  i = Reshape(h, shape)
                   [op] a = ConvInteger(q, w, z, wz)  j = Add(a, i)  k = Cast <to = 1> (j)  y = Mul(k, t)""")
    tensor = made.graph.initializer.add()
    tensor.CopyFrom(model("g () => () {}", scale=np.array(0.015, np.float32)).graph.initializer[0])
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["Conv"]
    assert [one.name for one in graph.nodes[0].inputs[2:]] == ["b"]
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


def test_products_in_bodies_read_what_was_measured_around_them() -> None:
    made = model(
        """g (float[7, 6] x, bool c) => (float y) {
            q, s, z = DynamicQuantizeLinear(x)
            y = If (c) <
                then_branch = yes () => (float t) {
                    [op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  d = Mul(s, ws)  t = Mul(b, d) },
                else_branch = no () => (float e) { e = DequantizeLinear(q, s, z) }>
        }""",
        **DOT,
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["If", "MatMul", "Identity"]
    for seed in (0, 1):
        inputs = sample(made, seed)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


REFUSED = {
    "[op] y = MatMulInteger(q, w, z, wz)": "no Cast to floats is what alone reads it",
    "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  y = Neg(b)": "no Mul with a scale is what alone reads",
    "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  y = Mul(b, ws)": "the scale of q is not among its",
    "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, x)  y = Mul(b, c)": (
        "the scale or the zero point of its weight is computed"
    ),
    "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  c = Mul(s, odd)  y = Mul(b, c)": (
        "its weight has 7 scales, expected 1 or 5"
    ),
    "[op] a = MatMulInteger(q, w, z, wz)  i = Add(a, k)  b = Cast <to = 1> (i)  c = Mul(s, ws)  y = Mul(b, c)": (
        "k is added to it, expected a bias divided by the scale"
    ),
}


@pytest.mark.parametrize(("body", "reason"), REFUSED.items())
def test_what_is_not_scaled_back_is_refused_by_name(body: str, reason: str) -> None:
    made = dot(body, odd=np.ones((7, 1), np.float32), k=np.ones(5, np.int32))
    graph = as_graph(made)
    with pytest.raises(ModelError, match=rf"node op \(MatMulInteger\) gives integers .*{reason}"):
        ReplaceIntegerProducts().apply(graph)
