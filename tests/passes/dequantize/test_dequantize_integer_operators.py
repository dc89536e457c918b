"""Operators on quantized values become float operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from integer_operators import CONV, DOT, EXAMPLES, FILTERS, GEMM, encodings_of, example
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from onnx import ModelProto, numpy_helper

from onnxq.errors import ModelError
from onnxq.ir import Constant, Graph, as_graph, constants, to_model
from onnxq.ops import INTEGER_OPERATORS
from onnxq.passes import (
    DequantizeWeights,
    NameNodes,
    RemoveQuantizeDequantize,
    RemoveUnused,
    ReplaceIntegerOperators,
    ReplaceIntegerProducts,
)

NOISE = 0.03


def replaced(made: ModelProto) -> Graph:
    graph = named_graph(made)
    assert apply_once(ReplaceIntegerOperators(), graph).changed == ("op",)
    return graph


@pytest.mark.parametrize(("made", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_the_float_operator_computes_the_same_but_for_rounding(made: ModelProto, expected: list[str]) -> None:
    graph = replaced(made)
    before = to_model(graph)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == expected
    if expected == ["ReduceMean"]:
        # No kernel on a CPU runs the other one.
        return
    inputs = {name: array.clip(-3, 3) for name, array in sample(made).items()}
    for found in (before, graph):
        assert difference(outputs(found, inputs), outputs(made, inputs)) <= NOISE


def test_every_row_of_the_table_has_an_example() -> None:
    of_its_own = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QLinearConvTranspose"}
    assert {name.split()[0] for name in EXAMPLES} | of_its_own == set(INTEGER_OPERATORS)


def by_dequantize_linear(quantized: Array, scale: Array, zero_point: Array, axis: int) -> Array:
    made = model(
        f"g () => (float y) {{ y = DequantizeLinear <axis = {axis}> (c, s, z) }}", c=quantized, s=scale, z=zero_point
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return outputs(made, {})["y"]


def test_weights_and_biases_are_what_dequantize_linear_gives_bit_for_bit() -> None:
    graph = replaced(EXAMPLES["QLinearConv"][0])
    conv = node_named(graph, "op.float")
    weight, bias = (tensor.values for tensor in conv.inputs[1:])
    np.testing.assert_array_equal(weight, by_dequantize_linear(CONV["w"], CONV["ws"], CONV["wz"], 0), strict=True)
    product = np.float32(0.03) * FILTERS
    np.testing.assert_array_equal(bias, by_dequantize_linear(CONV["b"], product, np.zeros(4, np.int32), 0), strict=True)
    gemm = node_named(replaced(EXAMPLES["QGemm"][0]), "op.float")
    expected = by_dequantize_linear(GEMM["w"], GEMM["ws"], GEMM["wz"], 0)
    np.testing.assert_array_equal(gemm.inputs[1].values, expected, strict=True)
    dot = node_named(replaced(EXAMPLES["QLinearMatMul"][0]), "op.float")
    expected = by_dequantize_linear(DOT["w"], DOT["ws"], DOT["wz"], 1)
    np.testing.assert_array_equal(dot.inputs[1].values, expected, strict=True)


def test_a_float_result_of_gemm_is_scaled_by_alpha() -> None:
    made = model(
        """g (float[7, 6] x) => (float y) {
            qx = QuantizeLinear(x, s, z)
            [op] y = com.microsoft.QGemm <transB = 1, alpha = 0.5> (qx, s, z, w, ws, wz, b)
        }""",
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8), **GEMM,
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["Gemm"]
    inputs = {"x": sample(made)["x"].clip(-3, 3)}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


@pytest.mark.parametrize("bias", [True, False])
def test_what_the_runtime_fuses_dynamic_products_to_is_undone(bias: bool) -> None:
    end = ", b" if bias else ""
    made = model(
        f"""g (float[7, 6] x) => (float[7, 5] y, float[7, 5] u) {{
            [op] y = com.microsoft.DynamicQuantizeMatMul(x, w, ws, wz{end})
            q, s, z = DynamicQuantizeLinear(x)
            [second] u = com.microsoft.MatMulIntegerToFloat(q, w, s, ws, z, wz{end})
        }}""",
        **DOT, b=np.linspace(-1, 1, 5, dtype=np.float32),
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = as_graph(made)
    NameNodes().apply(graph)
    assert ReplaceIntegerOperators().apply(graph).changed == ("op", "second")
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["MatMul", "Add"] * 2 if bias else ["MatMul"] * 2
    assert len([tensor for tensor in constants(graph) if tensor.shape == (6, 5) and tensor.outputs]) == 1
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_recurrent_layer_gets_its_weights_back_the_right_way_round(directions: int, per_channel: bool) -> None:
    size, hidden = 5, 4
    scale_shape = (directions, 4 * hidden) if per_channel else (directions,)
    generator = np.random.default_rng(0)
    stored: dict[str, Any] = {}
    for name, extent in (("w", size), ("r", hidden)):
        stored[name] = generator.integers(-64, 65, (directions, extent, 4 * hidden)).astype(np.int8)
        stored[f"{name}s"] = generator.uniform(0.003, 0.006, scale_shape).astype(np.float32)
        stored[f"{name}z"] = np.zeros(scale_shape, np.int8)
    direction = "bidirectional" if directions == 2 else "forward"
    made = model(
        f"""g (float[3, 2, {size}] x) => (float y, float h) {{
            [op] y, h = com.microsoft.DynamicQuantizeLSTM <hidden_size = {hidden}, direction = "{direction}">
                (x, w, r, b, , , , , ws, wz, rs, rz)
        }}""",
        b=values(directions, 8 * hidden), **stored,
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    for output in made.graph.output:
        output.type.tensor_type.ClearField("shape")
    graph = replaced(made)
    assert ops(graph) == ["LSTM"]
    spread = stored["ws"].reshape(directions, 1, -1)
    expected = (stored["w"].astype(np.float32) * spread).transpose(0, 2, 1)
    np.testing.assert_array_equal(node_named(graph, "op.float").inputs[1].values, expected, strict=True)
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


def test_attention_becomes_the_float_operator() -> None:
    hidden = 8
    made = model(
        f"""g (float[2, 3, {hidden}] x) => (float[2, 3, {hidden}] y) {{
            q, s, z = DynamicQuantizeLinear(x)
            [op] y = com.microsoft.QAttention <num_heads = 2> (q, w, b, s, ws, , z, wz)
        }}""",
        w=encodings_of(values(hidden, 3 * hidden), 0.02), ws=np.array(0.02, np.float32), wz=np.array(0, np.int8),
        b=values(3 * hidden),
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert [(node.op, node.domain) for node in graph.nodes] == [("Attention", "com.microsoft")]
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2 * NOISE


def test_weights_around_a_body_are_decoded_for_the_body() -> None:
    made = model(
        """g (float[2, 3, 6, 6] x, bool c) => (float y) {
            q = QuantizeLinear(x, s, z)
            y = If (c) <
                then_branch = yes () => (float t) {
                    [op] a = QLinearMatMul(q, s, z, w, ws, wz, s, z)  t = DequantizeLinear(a, s, z) },
                else_branch = no () => (float e) { e = DequantizeLinear(q, s, z) }>
        }""",
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8), **DOT,
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["If", "MatMul", "Identity"]
    onnx.checker.check_model(to_model(graph))
    inputs = {name: array.clip(-3, 3) if name == "x" else array for name, array in sample(made).items()}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2 * NOISE


def test_weights_take_their_old_names() -> None:
    made = EXAMPLES["QLinearConv"][0]
    renamed = ModelProto()
    renamed.CopyFrom(made)
    for tensor in renamed.graph.initializer:
        tensor.name = {"w": "kernel_quantized", "b": "bias.codes"}.get(tensor.name, tensor.name)
    node = next(node for node in renamed.graph.node if node.name == "op")
    node.input[3], node.input[8] = "kernel_quantized", "bias.codes"
    found = node_named(replaced(renamed), "op.float").inputs
    assert [tensor.name for tensor in found[1:]] == ["kernel", "bias"]
    assert all(isinstance(tensor, Constant) for tensor in found[1:])


REFUSED = {
    "qy = QLinearAveragePool <kernel_shape = [2, 2], channels_last = 1> (qx, s, z, t, v)": (
        r"node op \(QLinearAveragePool\) has its channels last"
    ),
    "qy = QLinearSoftmax <axis = 1, opset = 11> (qx, s, z, t, v)": (
        r"node op \(QLinearSoftmax\) follows opset 11, expected that of the model, 17"
    ),
    "qy = QLinearMatMul(qx, s, z, w, ds, wz, t, v)": r"node op \(QLinearMatMul\) reads ds, which is computed",
}


@pytest.mark.parametrize(("body", "message"), REFUSED.items())
def test_what_is_not_known_is_refused_by_name(body: str, message: str) -> None:
    made = example(body, **DOT)
    made.graph.node.insert(0, onnx.helper.make_node("Identity", ["ws"], ["ds"]))
    made.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "unused"))
    graph = as_graph(made)
    with pytest.raises(ModelError, match=message):
        ReplaceIntegerOperators().apply(graph)


def test_a_weight_that_is_read_along_either_axis_has_floats_for_each() -> None:
    quantized = np.random.default_rng(0).integers(-127, 127, (4, 4)).astype(np.int8)
    made = model(
        """g (float[7, 4] x) => (float[7, 4] a, float[7, 4] b) {
            qx = QuantizeLinear(x, s, z)
            [one] a = com.microsoft.QGemm (qx, s, z, w, ws, wz)
            [other] b = com.microsoft.QGemm <transB = 1> (qx, s, z, w, ws, wz)
        }""",
        s=np.array(0.02, np.float32), z=np.array(128, np.uint8), w=quantized,
        ws=np.array([0.001, 0.01, 0.1, 1], np.float32), wz=np.zeros(4, np.int8),
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = named_graph(made)
    ReplaceIntegerOperators().apply(graph)
    weights = [node_named(graph, f"{name}.float").inputs[1].values for name in ("one", "other")]
    scales = np.array([0.001, 0.01, 0.1, 1], np.float32)
    np.testing.assert_array_equal(weights[0], quantized * scales, strict=True)
    np.testing.assert_array_equal(weights[1], quantized * scales[:, None], strict=True)


# ReplaceIntegerProducts multiplies floats where integers were multiplied and scaled back.

PRODUCT_NOISE = 0.02
"""Data on 8 bits and nothing else."""

DOT_SCALE = np.linspace(0.01, 0.02, 5, dtype=np.float32)
# Two products with 8 bits fit 16, as processors without VNNI add them.
PRODUCT = {
    "w": np.random.default_rng(0).integers(-64, 65, (6, 5)).astype(np.int8),
    "ws": DOT_SCALE, "wz": np.arange(5, dtype=np.int8),
}  # fmt: skip
KERNEL_SCALE = np.linspace(0.01, 0.02, 4, dtype=np.float32)
KERNEL = {
    "w": np.random.default_rng(1).integers(0, 256, (4, 6, 3, 3)).astype(np.uint8),
    "ws": KERNEL_SCALE.reshape(4, 1, 1), "wz": np.array(131, np.uint8), "b": values(4),
}  # fmt: skip
MEASURE = "q, s, z = DynamicQuantizeLinear(x)"


def dot(body: str, measure: str = MEASURE, **more: np.ndarray) -> ModelProto:
    made = model(f"g (float[7, 6] x) => (float y) {{ {measure} {body} }}", **PRODUCT, **more)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


def conv(body: str) -> ModelProto:
    made = model(f"g (float[2, 6, 8, 8] x) => (float y) {{ {MEASURE} {body} }}", **KERNEL, shape=np.array([1, 4, 1, 1]))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


PRODUCTS: dict[str, tuple[ModelProto, list[str]]] = {
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
    "with quantized values that were moved": (
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


def replaced_products(made: ModelProto) -> Graph:
    graph = named_graph(made)
    assert apply_once(ReplaceIntegerProducts(), graph).changed == ("op",)
    return graph


@pytest.mark.parametrize(("made", "expected"), PRODUCTS.values(), ids=PRODUCTS)
def test_the_float_product_computes_the_same_but_for_rounding(made: ModelProto, expected: list[str]) -> None:
    graph = replaced_products(made)
    inputs = {name: array.clip(-3, 3) for name, array in sample(made).items()}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= PRODUCT_NOISE
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == expected
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= PRODUCT_NOISE


def test_the_weight_is_what_dequantize_linear_gives_bit_for_bit() -> None:
    for name, parts, axis in (("as quantize_dynamic writes it", PRODUCT, 1), ("convolution", KERNEL, 0)):
        quantized, scale, zero_point = (parts[key] for key in ("w", "ws", "wz"))
        scale, zero_point = scale.reshape(-1), np.broadcast_to(zero_point, scale.size).copy()
        decoder = model(
            f"g () => (float y) {{ y = DequantizeLinear <axis = {axis}> (c, s, z) }}",
            c=quantized,
            s=scale,
            z=zero_point,
        )
        decoder.graph.output[0].type.tensor_type.ClearField("shape")
        weight = node_named(replaced_products(PRODUCTS[name][0]), "op.float").inputs[1]
        np.testing.assert_array_equal(weight.values, outputs(decoder, {})["y"], strict=True)


def test_a_bias_along_the_channels_becomes_that_of_the_convolution() -> None:
    made = conv("""t = Mul(s, scale)  f = Div(b, t)  g = Floor(f)  h = Cast <to = 6> (g)  i = Reshape(h, shape)
                   [op] a = ConvInteger(q, w, z, wz)  j = Add(a, i)  k = Cast <to = 1> (j)  y = Mul(k, t)""")
    tensor = made.graph.initializer.add()
    tensor.CopyFrom(model("g () => () {}", scale=np.array(0.015, np.float32)).graph.initializer[0])
    graph = replaced_products(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["Conv"]
    assert [one.name for one in graph.nodes[0].inputs[2:]] == ["b"]
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= PRODUCT_NOISE


def test_products_in_bodies_read_what_was_measured_around_them() -> None:
    made = model(
        """g (float[7, 6] x, bool c) => (float y) {
            q, s, z = DynamicQuantizeLinear(x)
            y = If (c) <
                then_branch = yes () => (float t) {
                    [op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  d = Mul(s, ws)  t = Mul(b, d) },
                else_branch = no () => (float e) { e = DequantizeLinear(q, s, z) }>
        }""",
        **PRODUCT,
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced_products(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["If", "MatMul", "Identity"]
    for seed in (0, 1):
        inputs = sample(made, seed)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) <= PRODUCT_NOISE


CODED = {
    "a": np.array(0.03, np.float32), "za": np.array(120, np.uint8), "t": np.array(0.5, np.float32),
    "odd": np.arange(1, 8, dtype=np.float32).reshape(7, 1), "k": np.arange(5, dtype=np.int32),
    "rows": np.random.default_rng(2).integers(0, 256, (9, 6)).astype(np.uint8),
    "zeros": np.full(1, 120, np.uint8),
}  # fmt: skip
STATIC = "[op] p = MatMulInteger(q, w, za, wz)"
OTHERWISE: dict[str, tuple[str, list[str]]] = {
    "a factor that belongs to no operand": (
        f"{STATIC}  b = Cast <to = 1> (p)  c = Mul(a, odd)  y = Mul(b, c)",
        ["MatMul", "Mul"],
    ),
    "a factor that is computed": (
        f"{STATIC}  b = Cast <to = 1> (p)  m = ReduceMax <axes = [1]> (x)  c = Mul(a, m)  y = Mul(b, c)",
        ["ReduceMax", "MatMul", "Mul"],
    ),
    "no scale of the data": (f"{STATIC}  b = Cast <to = 1> (p)  y = Mul(b, ws)", ["MatMul"]),
    "no scale at all": (
        f"{STATIC}  b = Cast <to = 1> (p)  y = Neg(b)",
        ["MatMul", "Round", "Cast", "Cast", "Neg"],
    ),
    "integers that are returned": (f"{STATIC}  b = Add(p, k)  y = Cast <to = 1> (b)", []),
    "a bias that is no float": (f"{STATIC}  i = Add(p, k)  b = Cast <to = 1> (i)  c = Mul(a, ws)  y = Mul(b, c)", []),
    "a bias divided by another scale": (
        f"""c = Mul(a, ws)  d = Mul(c, t)  f = Div(t, d)  g = Round(f)  h = Cast <to = 6> (g)
            {STATIC}  i = Add(p, h)  b = Cast <to = 1> (i)  y = Mul(b, c)""",
        [],
    ),
    "a square of what comes out": (f"{STATIC}  b = Cast <to = 1> (p)  y = Mul(b, b)", []),
    "rows of codes": (
        """n = ArgMax <axis = 1, keepdims = 0> (x)  g = Gather(rows, n)
           [op] p = MatMulInteger(g, w, za, wz)  b = Cast <to = 1> (p)  c = Mul(t, ws)
           y = Mul(b, c)""",
        ["ArgMax", "Gather", "MatMul"],
    ),
    "rows of quantized values that are decoded elsewhere": (
        """n = ArgMax <axis = 1, keepdims = 0> (x)  g = Gather(rows, n)
           d = DequantizeLinear(g, t, za)  [op] p = MatMulInteger(g, w, za, wz)
           b = Cast <to = 1> (p)  c = Mul(a, t)  f = Mul(b, c)  e = MatMul(d, d2)  y = Add(e, f)""",
        ["ArgMax", "Gather", "MatMul", "MatMul", "Add"],
    ),
    "a zero point that is a vector of one": (
        "[op] p = MatMulInteger(q, w, zeros, wz)  b = Cast <to = 1> (p)  c = Mul(a, ws)  y = Mul(b, c)",
        ["MatMul"],
    ),
    "codes of two scales": (
        """r = QuantizeLinear(x, t, za)  u = Concat <axis = 0> (q, r)
           [op] p = MatMulInteger(u, w, za, wz)  b = Cast <to = 1> (p)  c = Mul(a, ws)  y = Mul(b, c)""",
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), OTHERWISE.values(), ids=OTHERWISE)
def test_products_that_are_scaled_otherwise_compute_the_same_as_well(body: str, expected: list[str]) -> None:
    made = model(
        f"g (float[7, 6] x) => (float y) {{ q = QuantizeLinear(x, a, za)  {body} }}",
        **PRODUCT, **CODED, d2=values(6, 5),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced_products(made)
    DequantizeWeights().apply(graph)
    RemoveQuantizeDequantize().apply(graph)
    RemoveUnused().apply(graph)
    assert not {"MatMulInteger", "QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    assert not expected or sorted(ops(graph)) == sorted(expected)
    inputs = {"x": np.float32(0.03 * np.random.default_rng(3).integers(-100, 100, (7, 6)))}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2e-6


def test_a_scale_along_the_rows_is_not_taken_for_one_of_the_columns() -> None:
    square = np.random.default_rng(2).integers(-64, 65, (6, 7)).astype(np.int8)
    made = model(
        """g (float[7, 6] x) => (float y) {
            q = QuantizeLinear(x, a, za)  [op] p = MatMulInteger(q, v, za)  b = Cast <to = 1> (p)  c = Mul(a, odd)
            y = Mul(b, c)
        }""",
        v=square, **CODED,
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced_products(made)
    RemoveQuantizeDequantize().apply(graph)
    inputs = {"x": np.float32(0.03 * np.arange(42).reshape(7, 6))}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2e-6


def test_a_bias_along_the_columns_of_an_image_is_not_that_of_the_channels() -> None:
    made = conv("""t = Mul(s, scale)  f = Div(b, t)  g = Floor(f)  h = Cast <to = 6> (g)  i = Reshape(h, row)
                   [op] a = ConvInteger(q, w, z, wz)  j = Add(a, i)  k = Cast <to = 1> (j)  y = Mul(k, t)""")
    made.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 6
    more = model("g () => () {}", scale=np.array(0.015, np.float32), row=np.array([1, 1, 1, 4]))
    made.graph.initializer.extend(more.graph.initializer)
    with pytest.raises(ModelError, match="the measured scale of q is not among its factors"):
        replaced_products(made)


REFUSED_PRODUCTS = (
    "[op] y = MatMulInteger(q, w, z, wz)",
    "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  y = Neg(b)",
    "[op] a = MatMulInteger(q, w, z, wz)  b = Cast <to = 1> (a)  y = Mul(b, ws)",
    "[op] a = MatMulInteger(q, w, z, wz)  i = Add(a, k)  b = Cast <to = 1> (i)  c = Mul(s, ws)  y = Mul(b, c)",
)


@pytest.mark.parametrize("body", REFUSED_PRODUCTS)
def test_what_is_not_scaled_by_the_measured_scale_is_refused_by_name(body: str) -> None:
    graph = as_graph(dot(body, k=np.ones(5, np.int32)))
    reason = "the measured scale of q is not among its factors"
    with pytest.raises(ModelError, match=rf"node op \(MatMulInteger\) gives integers .*{reason}"):
        ReplaceIntegerProducts().apply(graph)
