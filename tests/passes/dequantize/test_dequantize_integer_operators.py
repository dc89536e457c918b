"""Operators on quantized values become float operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from onnx import ModelProto
from rule_cases import Case, Rule, check_valid, table

from onnxq.errors import ModelError
from onnxq.ir import Graph, as_graph, constants, to_model
from onnxq.ops import INTEGER_OPERATORS
from onnxq.passes import (
    DequantizeWeights,
    RemoveQuantizeDequantize,
    RemoveUnused,
    ReplaceIntegerOperators,
    ReplaceIntegerProducts,
)

NOISE = 0.03
"""Quantized values of 8 bits on inputs of about three times their standard deviation, and results on 8 bits again."""
PRODUCT_NOISE = 0.02
"""Data on 8 bits and nothing else."""


def encoded(weight: Array, scale: Array | float, zero_point: Array | int = 0) -> Array:
    return np.clip(np.rint(weight / scale) + zero_point, -128, 127).astype(np.int8)


def removed(graph: Graph) -> Graph:
    """The graph after the other passes that dequantize."""
    DequantizeWeights().apply(graph)
    RemoveQuantizeDequantize().apply(graph)
    RemoveUnused().apply(graph)
    return graph


def small(made: ModelProto, seed: int = 0) -> dict[str, Array]:
    return {name: array.clip(-3, 3) if array.dtype != bool else array for name, array in sample(made, seed).items()}


def check_removed(case: Case, error: float, seeds: tuple[int, ...] = (0,), runs: bool = True) -> Graph:
    """The pass changes the node [op], and without quantized values the model computes the same but for rounding."""
    graph = named_graph(case.made)
    assert apply_once(case.step, graph).changed == ("op",)
    before = to_model(graph)
    removed(graph)
    assert case.expected is None or tuple(ops(graph)) == case.expected
    assert not {"MatMulInteger", "QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    check_valid(to_model(graph))
    for seed in seeds if runs else ():
        feed = dict(case.feed) or small(case.made, seed)
        for form in (before, graph):
            assert difference(outputs(form, feed), outputs(case.made, feed)) <= error
    return graph


# ReplaceIntegerOperators ----------------------------------------------------------------------------------------------

FILTERS = np.linspace(0.01, 0.02, 4, dtype=np.float32)
PER_COLUMN = np.linspace(0.01, 0.02, 5, dtype=np.float32)
STEP, POINT = np.array(0.03, np.float32), np.array(120, np.uint8)
CONV = {
    "w": encoded(values(4, 8, 3, 3), FILTERS.reshape(-1, 1, 1, 1)), "ws": FILTERS, "wz": np.zeros(4, np.int8),
    "b": np.rint(np.linspace(-1, 1, 4, dtype=np.float32) / (np.float32(0.03) * FILTERS)).astype(np.int32),
}  # fmt: skip
DOT = {"w": encoded(values(6, 5), PER_COLUMN), "ws": PER_COLUMN, "wz": np.zeros(5, np.int8)}
GEMM = {
    "w": encoded(values(6, 5).T, 0.015, 3), "ws": np.array(0.015, np.float32), "wz": np.array(3, np.int8),
    "b": np.rint(np.linspace(-1, 1, 5) / (0.03 * 0.015)).astype(np.int32),
}  # fmt: skip
operator = Rule(ReplaceIntegerOperators())
CONTRIB = {op for op in INTEGER_OPERATORS if not onnx.defs.has(op)}


def example(
    body: str, expected: str, *, inputs: str = "x", shape: str = "2, 8, 6, 6", step: float = 0.05, **options: Any
) -> Case:
    """Inputs become quantized values ``qx``, the body makes quantized values ``qy``, and these become the output."""
    fed = ", ".join(f"float[{shape}] {name}" for name in inputs)
    encode = " ".join(f"q{name} = QuantizeLinear({name}, s, z)" for name in inputs)
    op = body.split()[2].partition("(")[0]
    body = body.replace(f"= {op}", f"= com.microsoft.{op}") if op in CONTRIB else body
    return operator(
        f"{encode} [op] {body} y = DequantizeLinear(qy, t, v)", expected, inputs=fed,
        domains='"com.microsoft" : 1', s=STEP, z=POINT, t=step, v=np.array(100, np.uint8), **options,
    )  # fmt: skip


PADS, REDUCED = "<pads = [1, 1, 1, 1]>", "QLinearReduceMean <axes = [1, 3], keepdims = 0> (qx, s, z, t, v)"
EXAMPLES = [
    example(f"qy = QLinearConv {PADS} (qx, s, z, w, ws, wz, t, v, b)", "Conv", step=0.15, **CONV),
    example("qy = QLinearConv(qx, s, z, w, ws, wz, t, v)", "Conv", step=0.15, **CONV),
    example("qy = QLinearMatMul(qx, s, z, w, ws, wz, t, v)", "MatMul", **DOT),
    example("qy = QLinearMatMul(qx, s, z, qw, s, z, t, v)", "MatMul", inputs="xw", step=0.15),
    example("qy = QGemm <transB = 1> (qx, s, z, w, ws, wz, b, t, v)", "Gemm", shape="7, 6", **GEMM),
    example("qy = QLinearAdd(qx, s, z, qw, s, z, t, v)", "Add", inputs="xw"),
    example("qy = QLinearAdd(qx, s, z, c, s, z, t, v)", "Add", c=np.arange(90, 126, dtype=np.uint8).reshape(6, 6)),
    example("qy = QLinearMul(qx, s, z, qw, s, z, t, v)", "Mul", inputs="xw", step=0.1),
    example("qy = QLinearAveragePool <kernel_shape = [2, 2], strides = [2, 2]> (qx, s, z, t, v)", "AveragePool",
            step=0.02),
    example("qy = QLinearGlobalAveragePool <channels_last = 0> (qx, s, z, t, v)", "GlobalAveragePool", step=0.005),
    example("qy = QLinearLeakyRelu <alpha = 0.25> (qx, s, z, t, v)", "LeakyRelu", step=0.03),
    example(f"qy = {REDUCED}", "ReduceMean"),
    example(f"qy = {REDUCED}", "ReduceMean", opset=18),
    example("qy = QLinearSigmoid(qx, s, z, t, v)", "Sigmoid", step=0.008),
    example("qy = QLinearSoftmax <axis = -1, opset = 17> (qx, s, z, t, v)", "Softmax", step=0.008),
    example("qy = QLinearConcat <axis = 1> (t, v, qx, s, z, qw, s, z, qx, s, z)", "Concat", inputs="xw"),
    example("qy = QLinearWhere(c, qx, s, z, qw, s, z, t, v)", "Where", inputs="xw", c=np.array([True, False] * 3)),
]  # fmt: skip


@table(EXAMPLES)
def test_the_float_operator_computes_the_same_but_for_rounding(case: Case) -> None:
    # No kernel on a CPU runs the mean of quantized values.
    check_removed(case, NOISE, runs="ReduceMean" not in case.text)


def test_every_row_of_the_table_has_an_example() -> None:
    of_its_own = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QLinearConvTranspose"}
    written = {node.op_type for case in EXAMPLES for node in case.made.graph.node}
    assert written & set(INTEGER_OPERATORS) | of_its_own == set(INTEGER_OPERATORS)


MS = '"com.microsoft" : 1'


def test_a_float_result_of_gemm_is_scaled_by_alpha() -> None:
    body = """qx = QuantizeLinear(x, s, z)
        [op] y = com.microsoft.QGemm <transB = 1, alpha = 0.5> (qx, s, z, w, ws, wz, b)"""
    check_removed(operator(body, "Gemm", inputs="float[7, 6] x", domains=MS, s=STEP, z=POINT, **GEMM), NOISE)


@pytest.mark.parametrize("bias", ["", ", b"])
def test_what_the_runtime_fuses_dynamic_products_to_is_undone(bias: str) -> None:
    made = model(
        f"""(float[7, 6] x) => (float[7, 5] y, float[7, 5] u) {{
            [op] y = com.microsoft.DynamicQuantizeMatMul(x, w, ws, wz{bias})
            q, s, z = DynamicQuantizeLinear(x)
            [second] u = com.microsoft.MatMulIntegerToFloat(q, w, s, ws, z, wz{bias}) }}""",
        domains=MS, **DOT, b=np.linspace(-1, 1, 5, dtype=np.float32),
    )  # fmt: skip
    graph = named_graph(made)
    assert ReplaceIntegerOperators().apply(graph).changed == ("op", "second")
    removed(graph)
    assert ops(graph) == (["MatMul", "Add"] if bias else ["MatMul"]) * 2
    assert len([tensor for tensor in constants(graph) if tensor.shape == (6, 5) and tensor.outputs]) == 1
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= NOISE


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
    case = operator(
        f"""(float[3, 2, {size}] x) => (y, h) {{
            [op] y, h = com.microsoft.DynamicQuantizeLSTM <hidden_size = {hidden}, direction = "{direction}">
                (x, w, r, b, , , , , ws, wz, rs, rz) }}""",
        "LSTM", domains=MS, b=values(directions, 8 * hidden), **stored,
    )  # fmt: skip
    graph = check_removed(case, NOISE)
    expected = (stored["w"].astype(np.float32) * stored["ws"].reshape(directions, 1, -1)).transpose(0, 2, 1)
    np.testing.assert_array_equal(node_named(graph, "op.float").inputs[1].values, expected, strict=True)


def test_attention_becomes_the_float_operator() -> None:
    case = operator(
        """q, s, z = DynamicQuantizeLinear(x)
        [op] y = com.microsoft.QAttention <num_heads = 2> (q, w, b, s, ws, , z, wz)""",
        "Attention", inputs="float[2, 3, 8] x", domains=MS, w=encoded(values(8, 24), 0.02),
        ws=np.array(0.02, np.float32), wz=np.array(0, np.int8), b=values(24),
    )  # fmt: skip
    assert check_removed(case, 2 * NOISE).nodes[0].domain == "com.microsoft"


def test_weights_around_a_body_are_decoded_for_the_body() -> None:
    case = operator(
        """(float[2, 3, 6, 6] x, bool c) => (y) { q = QuantizeLinear(x, s, z) y = If (c) <
        then_branch = yes () => (t) { [op] a = QLinearMatMul(q, s, z, w, ws, wz, s, z)  t = DequantizeLinear(a, s, z) },
        else_branch = no () => (e) { e = DequantizeLinear(q, s, z) }> }""",
        "If MatMul Identity", s=STEP, z=POINT, **DOT,
    )  # fmt: skip
    check_removed(case, 2 * NOISE)


def test_a_weight_that_is_read_along_either_axis_has_floats_for_each() -> None:
    quantized = np.random.default_rng(0).integers(-127, 127, (4, 4)).astype(np.int8)
    scales = np.array([0.001, 0.01, 0.1, 1], np.float32)
    made = model(
        """(float[7, 4] x) => (float[7, 4] a, float[7, 4] b) { qx = QuantizeLinear(x, s, z)
            [one] a = com.microsoft.QGemm (qx, s, z, w, ws, wz)
            [second] b = com.microsoft.QGemm <transB = 1> (qx, s, z, w, ws, wz) }""",
        domains=MS, s=STEP, z=POINT, w=quantized, ws=scales, wz=np.zeros(4, np.int8),
    )  # fmt: skip
    graph = named_graph(made)
    ReplaceIntegerOperators().apply(graph)
    for name, scale in (("one", scales), ("second", scales[:, None])):
        weight = node_named(graph, f"{name}.float").inputs[1].values
        np.testing.assert_array_equal(weight, quantized * scale, strict=True)


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
    made = example(body, "", **DOT).made
    made.graph.node.insert(0, onnx.helper.make_node("Identity", ["ws"], ["ds"]))
    with pytest.raises(ModelError, match=message):
        ReplaceIntegerOperators().apply(as_graph(made))


# ReplaceIntegerProducts -----------------------------------------------------------------------------------------------

# Two products with 8 bits fit 16, as processors without VNNI add them.
PRODUCT = {
    "w": np.random.default_rng(0).integers(-64, 65, (6, 5)).astype(np.int8), "ws": PER_COLUMN,
    "wz": np.arange(5, dtype=np.int8),
}  # fmt: skip
KERNEL = {
    "w": np.random.default_rng(1).integers(0, 256, (4, 6, 3, 3)).astype(np.uint8), "ws": FILTERS.reshape(4, 1, 1),
    "wz": np.array(131, np.uint8), "b": values(4), "shape": [1, 4, 1, 1], "scale": 0.015,
}  # fmt: skip
MEASURE = "q, s, z = DynamicQuantizeLinear(x)"
INTEGER, FLOATS = "[op] a = MatMulInteger(q, w, z, wz)", "b = Cast <to = 1> (a)"
CHANNELS = "f = Div(b, t)  g = Floor(f)  h = Cast <to = 6> (g)"
matmul = Rule(ReplaceIntegerProducts(), "float[7, 6] x", **PRODUCT, e=values(5), factor=2.5)
conv = Rule(ReplaceIntegerProducts(), "float[2, 6, 8, 8] x", **KERNEL)
PRODUCTS = [
    *(matmul(f"{MEASURE} {body}", expected) for body, expected in [
        (f"{INTEGER}  {FLOATS}  c = Mul(s, ws)  y = Mul(b, c)", "MatMul"),
        (f"{INTEGER}  {FLOATS}  c = Mul(ws, s)  y = Mul(c, b)", "MatMul"),
        (f"{INTEGER}  {FLOATS}  c = Mul(b, s)  y = Mul(c, ws)", "MatMul"),
        (f"{INTEGER}  {FLOATS}  c = Mul(s, ws)  d = Mul(b, c)  y = Mul(d, factor)", "MatMul Mul"),
        (f"t = Transpose(q)  u = Transpose(t)  {INTEGER.replace('(q', '(u')}  {FLOATS}  c = Mul(s, ws)  y = Mul(b, c)",
         "Transpose Transpose MatMul"),
        (f"r = Transpose(x)  p, t, v = DynamicQuantizeLinear(r)  [op] a = MatMulInteger(q, p, z, v)  {FLOATS}"
         "  c = Mul(s, t)  y = Mul(b, c)", "Transpose MatMul"),
        (f"{INTEGER}  {FLOATS}  c = Mul(s, ws)  d = Mul(b, c)  y = Add(d, e)", "MatMul Add"),
        # With a bias in integers.
        (f"""c = Mul(s, ws)  f = Div(e, c)  g = Floor(f)  h = Cast <to = 6> (g)
             {INTEGER}  i = Add(a, h)  b = Cast <to = 1> (i)  y = Mul(b, c)""", "MatMul Add")]),
    matmul(f"q = QuantizeLinear(x, s, z) {INTEGER}  {FLOATS}  c = Mul(s, ws)  y = Mul(b, c)", "MatMul", s=STEP,
           z=POINT),
    conv(f"""{MEASURE} [op] a = ConvInteger <pads = [1, 1, 1, 1], strides = [2, 2]> (q, w, z, wz)
         k = Cast <to = 1> (a)  c = Mul(s, ws)  y = Mul(k, c)""", "Conv"),
    conv(f"""{MEASURE} r = Reshape(ws, shape)  t = Mul(s, r)  one = Reshape(b, shape)
         {CHANNELS.replace('(b', '(one')}  [op] a = ConvInteger(q, w, z, wz)  i = Add(a, h)
         j = Cast <to = 1> (i)  c = Mul(s, ws)  y = Mul(j, c)""", "Reshape Conv Add"),
    # A bias along the channels becomes that of the convolution.
    conv(f"""{MEASURE} t = Mul(s, scale)  {CHANNELS}  i = Reshape(h, shape)
         [op] a = ConvInteger(q, w, z, wz)  j = Add(a, i)  k = Cast <to = 1> (j)  y = Mul(k, t)""", "Conv"),
    matmul(f"""(float[7, 6] x, bool c) => (y) {{ {MEASURE} y = If (c) <
           then_branch = yes () => (t) {{ {INTEGER}  {FLOATS}  d = Mul(s, ws)  t = Mul(b, d) }},
           else_branch = no () => (k) {{ k = DequantizeLinear(q, s, z) }}> }}""", "If MatMul Identity"),
]  # fmt: skip

# Products that are scaled otherwise compute the same as well, on the grid of the quantized values to the last digit.
CODED = {
    "za": POINT, "t": np.array(0.5, np.float32), "odd": np.arange(1, 8, dtype=np.float32).reshape(7, 1),
    "k": np.arange(5, dtype=np.int32), "rows": np.random.default_rng(2).integers(0, 256, (9, 6)).astype(np.uint8),
    "zeros": np.full(1, 120, np.uint8), "d2": values(6, 5),
    "v": np.random.default_rng(2).integers(-64, 65, (6, 7)).astype(np.int8),
}  # fmt: skip
static = Rule(ReplaceIntegerProducts(), "float[7, 6] x", **PRODUCT, **CODED, sa=STEP)
STATIC, CAST = "[op] p = MatMulInteger(q, w, za, wz)", "b = Cast <to = 1> (p)"
GRID = {"x": np.float32(0.03 * np.random.default_rng(3).integers(-100, 100, (7, 6)))}
OTHERWISE = [
    static(f"q = QuantizeLinear(x, sa, za)  {body}", expected, feed=GRID) for body, expected in [
        (f"{STATIC}  {CAST}  c = Mul(sa, odd)  y = Mul(b, c)", "MatMul Mul"),
        (f"{STATIC}  {CAST}  m = ReduceMax <axes = [1]> (x)  c = Mul(sa, m)  y = Mul(b, c)", None),
        (f"{STATIC}  {CAST}  y = Mul(b, ws)", "MatMul"),
        (f"{STATIC}  {CAST}  y = Neg(b)", "MatMul Round Cast Cast Neg"),
        (f"{STATIC}  b = Add(p, k)  y = Cast <to = 1> (b)", None),
        (f"{STATIC}  i = Add(p, k)  b = Cast <to = 1> (i)  c = Mul(sa, ws)  y = Mul(b, c)", None),
        # A bias divided by another scale.
        (f"""c = Mul(sa, ws)  d = Mul(c, t)  f = Div(t, d)  g = Round(f)  h = Cast <to = 6> (g)
             {STATIC}  i = Add(p, h)  b = Cast <to = 1> (i)  y = Mul(b, c)""", None),
        (f"{STATIC}  {CAST}  y = Mul(b, b)", None),
        # Rows of quantized values, which may be decoded elsewhere.
        (f"""n = ArgMax <axis = 1, keepdims = 0> (x)  g = Gather(rows, n)  [op] p = MatMulInteger(g, w, za, wz)
             {CAST}  c = Mul(t, ws)  y = Mul(b, c)""", "ArgMax MatMul Gather"),
        (f"""n = ArgMax <axis = 1, keepdims = 0> (x)  g = Gather(rows, n)  d = DequantizeLinear(g, t, za)
             [op] p = MatMulInteger(g, w, za, wz)  {CAST}  c = Mul(sa, t)  f = Mul(b, c)  e = MatMul(d, d2)
             y = Add(e, f)""", None),
        (f"[op] p = MatMulInteger(q, w, zeros, wz)  {CAST}  c = Mul(sa, ws)  y = Mul(b, c)", "MatMul"),
        (f"""r = QuantizeLinear(x, t, za)  u = Concat <axis = 0> (q, r)  [op] p = MatMulInteger(u, w, za, wz)
             {CAST}  c = Mul(sa, ws)  y = Mul(b, c)""", None),
        # A scale along the rows is not taken for one of the columns.
        (f"[op] p = MatMulInteger(q, v, za)  {CAST}  c = Mul(sa, odd)  y = Mul(b, c)", None),
    ]
]  # fmt: skip


@table(PRODUCTS)
def test_the_float_product_computes_the_same_but_for_rounding(case: Case) -> None:
    check_removed(case, PRODUCT_NOISE, seeds=(0, 1))


@table(OTHERWISE)
def test_products_that_are_scaled_otherwise_compute_the_same(case: Case) -> None:
    check_removed(case, 2e-6)


@pytest.mark.parametrize(
    ("case", "place", "quantized", "scale", "zero_point", "axis"),
    [
        (EXAMPLES[0], 1, CONV["w"], CONV["ws"], CONV["wz"], 0),
        (EXAMPLES[0], 2, CONV["b"], np.float32(0.03) * FILTERS, 0, 0),
        (EXAMPLES[2], 1, DOT["w"], DOT["ws"], DOT["wz"], 1),
        (EXAMPLES[4], 1, GEMM["w"], GEMM["ws"], GEMM["wz"], 0),
        (PRODUCTS[0], 1, PRODUCT["w"], PRODUCT["ws"], PRODUCT["wz"], 1),
        (PRODUCTS[9], 1, KERNEL["w"], KERNEL["ws"], KERNEL["wz"], 0),
    ],
)
def test_weights_and_biases_are_what_dequantize_linear_gives_bit_for_bit(
    case: Case, place: int, quantized: Array, scale: Array, zero_point: Array | int, axis: int
) -> None:
    graph = named_graph(case.made)
    case.step.apply(graph)
    # One number for all channels has no axis.
    shape = scale.shape if scale.size == 1 else scale.size
    zeros = np.broadcast_to(np.asarray(zero_point, quantized.dtype), shape).copy()
    text = f"() => (y) {{ y = DequantizeLinear <axis = {axis}> (c, s, z) }}"
    expected = outputs(model(text, c=quantized, s=scale.reshape(shape), z=zeros), {})["y"]
    np.testing.assert_array_equal(node_named(graph, "op.float").inputs[place].values, expected, strict=True)


@pytest.mark.parametrize(
    "case",
    [
        *(matmul(f"{MEASURE} {body}", k=np.ones(5, np.int32)) for body in [
            "[op] y = MatMulInteger(q, w, z, wz)",
            f"{INTEGER}  {FLOATS}  y = Neg(b)",
            f"{INTEGER}  {FLOATS}  y = Mul(b, ws)",
            f"{INTEGER}  i = Add(a, k)  b = Cast <to = 1> (i)  c = Mul(s, ws)  y = Mul(b, c)"]),
        # A bias along the columns of an image is not that of the channels.
        conv(f"""{MEASURE} t = Mul(s, scale)  {CHANNELS}  i = Reshape(h, shape)
             [op] a = ConvInteger(q, w, z, wz)  j = Add(a, i)  k = Cast <to = 1> (j)  y = Mul(k, t)""",
             inputs="float[2, 6, 8, 6] x", shape=[1, 1, 1, 4]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_scaled_by_the_measured_scale_is_refused_by_name(case: Case) -> None:
    reason = "the measured scale of q is not among its factors"
    with pytest.raises(ModelError, match=rf"node op \(\w+Integer\) gives integers .*{reason}"):
        ReplaceIntegerProducts().apply(named_graph(case.made))
