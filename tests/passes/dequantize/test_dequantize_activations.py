"""Activations back to floats, with the clamps that quantizers took over."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from model_texts import Array, difference, model, named_graph, nodes, ops, outputs, values
from onnx import TensorProto
from rule_cases import Case, Rule, table

from onnxq.errors import ModelError
from onnxq.ir import Graph, Names, Node, Tensor, Variable, constant, constants
from onnxq.passes import RemoveQuantizeDequantize, RemoveUnused, ReplaceIntegerOperators, RestoreOperators
from onnxq.passes.dequantize.activations import clamp

SCALE = np.array(0.05, np.float32)
MIDDLE = np.array(120, np.uint8)
"""Quantized values reach from -6 to 6.75."""
# On the grid of quantized values there is nothing to round, so that both models compute the same.
ROW = {"x": np.float32(SCALE * np.arange(-3, 3).reshape(2, 3))}
CHOICES = [ROW | {"c": np.array(chosen)} for chosen in (True, False)]


def made_by(op: str, *inputs: Tensor, **attributes: Any) -> tuple[Node, Variable]:
    output = Variable("y", np.dtype(np.float32), [2])
    return Node(op, op, attributes, list(inputs), [output]), output


def clamped(high: float, low: float = 0.0, maker: Node | None = None, opset: int = 17) -> Node | None:
    """Return the clamp of a quantized range behind an operator; by default one of any values."""
    value = (maker or made_by("Conv", Variable("x"))[0]).outputs[0]
    return clamp(value, low, high, (high - low) / 255, opset, Names(Graph()))


def test_a_range_from_zero_was_a_relu_and_one_to_a_short_number_a_clip() -> None:
    relu, clip, old = clamped(4.31), clamped(6.0), clamped(6.0, opset=10)
    assert relu is not None
    assert clip is not None
    assert old is not None
    assert (relu.op, [tensor.name for tensor in relu.inputs]) == ("Relu", ["y"])
    assert (clip.op, [float(tensor.values) for tensor in clip.inputs[1:]]) == ("Clip", [0.0, 6.0])
    assert [clip.inputs[1].name, clip.outputs[0].name] == ["y.minimum", "y.clamped"]
    assert (old.attrs, len(old.inputs)) == ({"min": 0.0, "max": 6.0}, 1)


@pytest.mark.parametrize("stored", [(0, 255), (-128, 127), (0, 65535)])
@pytest.mark.parametrize(
    "ends", [(0, 1), (0, 6), (0, 0.5), (0, 20), (0, 2.5), (0, 0.03), (-1, 1), (-0.5, 3), (-2, 0), (-0.03, 0.2)]
)
def test_a_clip_comes_back_between_the_ends_that_it_had(ends: tuple[float, float], stored: tuple[int, int]) -> None:
    scale = float(np.float32((ends[1] - ends[0]) / (stored[1] - stored[0])))
    zero_point = round(stored[0] - ends[0] / scale)
    low, high = ((code - zero_point) * scale for code in stored)
    _, value = made_by("Conv", Variable("x"))
    node = clamp(value, low, high, scale, 17, Names(Graph()))
    assert node is not None
    assert [float(tensor.values) for tensor in node.inputs[1:]] == pytest.approx(ends)
    # Values that lie between these ends anyway are not clamped.
    assert clamp(node.outputs[0], low, high, scale, 17, Names(Graph())) is None


def behind(*ops: str, domain: str = "", **attributes: Any) -> Node:
    """Return the last of a chain of operators, of which the first has the attributes."""
    node, tensor = made_by(ops[0], Variable("x"), **attributes)
    node.domain = domain
    for op in ops[1:]:
        node, tensor = made_by(op, tensor)
    return node


@pytest.mark.parametrize(
    ("high", "low", "maker", "op"),
    [
        (4.31, -1.0, behind("Conv"), None),
        (127 / 50, -128 / 50, behind("Conv"), None),
        (3.1, -2.0, behind("Conv"), None),
        # A whole step away from -1 and 1: rounding the zero point moves ends by half a step at most.
        (1 + 2 / 255, -1 + 2 / 255, behind("Conv"), None),
        (25.4, -25.6, behind("Conv"), None),
        (15.5, -10.0, behind("Conv"), None),
        (3.0001, 0.0, behind("Relu"), None),
        (3.0001, 0.0, behind("Relu", "MaxPool", "GlobalAveragePool", "Reshape"), None),
        (6.0, 0.0, behind("Clip", "Transpose", min=0.0, max=6.0), None),
        (1.0, 0.0, behind("Sigmoid"), None),
        (1.0, -1.0, behind("Tanh", "Slice"), None),
        (2.71, 0.0, behind("HardSigmoid"), None),
        (4.0, 0.0, behind("Cast"), None),
        *((6.0, 0.0, behind(*ops), "Clip") for ops in [("Relu",), ("Relu", "Pad"), ("Relu", "Neg"), ("Clip",)]),
        (4.31, 0.0, behind("Relu", domain="my.own"), "Relu"),
    ],
)
def test_what_may_leave_a_range_that_is_not_ordinary_is_clamped(
    high: float, low: float, maker: Node, op: str | None
) -> None:
    node = clamped(high, low, maker)
    assert (node and node.op) == op


def test_inputs_and_constants_are_not_clamped() -> None:
    for value in (Variable("x"), constant("c", np.float32([-1]))):
        assert clamp(value, 0.0, 4.0, 4 / 255, 17, Names(Graph())) is None


# RemoveQuantizeDequantize ---------------------------------------------------------------------------------------------


def unquantized(graph: Graph) -> bool:
    return not {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"} & set(ops(graph))


remove = Rule(
    RemoveQuantizeDequantize(), "float[2, 3] x", then=RemoveUnused(), s=SCALE, z=MIDDLE, nil=np.array(0, np.uint8),
    margins=[0, 1, 1, 0], fine=np.array([0.1, 0.3], np.float32), other=np.array([7, 9], np.uint8),
    columns=np.array([0.1, 0.3, 0.02], np.float32), points=np.array([100, 110, 119], np.uint8), t=np.float32(1),
)  # fmt: skip
PAIR = "q = QuantizeLinear(a, s, z)  b = DequantizeLinear(q, s, z)"
REMOVED = [
    remove("a = Neg(x) q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, s, z)", "Neg", feed=ROW,
           changed="QuantizeLinear_q DequantizeLinear_y"),
    # What is returned keeps its name, if by an Identity.
    remove("""(float[2, 3] x) => (y, again) { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)
           again = DequantizeLinear(q, s, z) }""", "Identity Identity", feed=ROW,
           holds=lambda graph: [tensor.name for tensor in graph.outputs] == ["y", "again"]),
    remove("""(float[2, 3] x) => (y, again) { a = Neg(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, s, z)
           again = DequantizeLinear(q, s, z) }""", "Neg Identity", feed=ROW),
    # Nodes share the clamp of a tensor.
    remove("""(float[2, 3] x) => (y, w) { a = Neg(x)
           q = QuantizeLinear(a, s, nil)  b = DequantizeLinear(q, s, nil)  y = Tanh(b)
           r = QuantizeLinear(a, s, nil)  c = DequantizeLinear(r, s, nil)  w = Sin(c) }""", "Neg Relu Tanh Sin",
           feed=ROW),
    # Scales along an axis belong together too.
    remove("""a = Neg(x)  q = QuantizeLinear <axis = 1> (a, s, z)  b = DequantizeLinear <axis = 1> (q, s, z)
           y = Neg(b)""", "Neg Neg", s=np.array([1, 2, 3], np.float32), z=np.array([120, 121, 122], np.uint8),
           feed={"x": np.float32([[1, 2, 3], [-2, 4, -6]])}),
    # What a run measures vanishes with the quantized values.
    remove("""q, scale, point = DynamicQuantizeLinear(x)  t0 = Transpose(q)  u = Transpose(t0)
           a = DequantizeLinear(u, scale, point)  y = Tanh(a)""", "Transpose Transpose Tanh", error=0.01),
    # Signed quantized values whose zero point is left out are no rectifier.
    remove("a = Neg(x)  q = QuantizeLinear <output_dtype = 3> (a, s)  d = DequantizeLinear(q, s)  y = Tanh(d)",
           "Neg Tanh", opset=21, feed=ROW),
    # A factor in the scale is a multiplication, another float type a cast.
    remove("a = Neg(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, t, z)", "Neg Mul", t=3 * SCALE, feed=ROW),
    remove("a = Neg(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, t, z)", "Neg Cast", opset=21,
           s=np.array(0.0625, np.float32), t=np.array(0.0625, np.float16), error=1e-3,
           feed={"x": np.float32([[0.0625, 0.125, -1], [1, 2, 3]])},
           holds=lambda graph: nodes(graph, "Cast")[0].attrs["to"] == TensorProto.FLOAT16),
    # Largest and shape are asked of the floats.
    remove("""(float[2, 5] x) => (y, size) { q = QuantizeLinear(x, s, z)  y = ArgMax <axis = 1, keepdims = 0> (q)
           size = Shape(q) }""", "ArgMax Shape"),
    # Rows of a quantized table are looked up as floats.
    remove("rows = Gather(codes, i)  turned = Transpose <perm = [1, 0, 2]> (rows)  y = DequantizeLinear(turned, s, z)",
           "Gather Transpose", inputs="int64[N, 2] i", codes=np.arange(80, dtype=np.uint8).reshape(10, 8), error=0.0,
           feed={"i": np.array([[3, 1], [0, 9], [2, 2]])}),
    # Bodies read the floats of quantized values around them, and may return quantized values.
    *(remove("""(float[2, 3] x, bool c) => (y) { a = Neg(x)  q = QuantizeLinear(a, s, z)
             y = If (c) <then_branch = yes () => (t0) { b = DequantizeLinear(q, s, z)  t0 = Tanh(b) },
                         else_branch = no () => (e) { e = DequantizeLinear(q, s, z) }> }""",
             "Neg If Tanh Identity", feed=feed) for feed in CHOICES),
    *(remove("""(float[2, 3] x, bool c) => (y) { q = If (c) <
             then_branch = yes () => (t0) { a = Neg(x)  t0 = QuantizeLinear(a, s, z) },
             else_branch = no () => (e) { e = QuantizeLinear(x, s, z) }>
             y = DequantizeLinear(q, s, z) }""", feed=feed, holds=unquantized) for feed in CHOICES),
    remove("w = DequantizeLinear(codes, s, z)  y = Add(x, w)", codes=np.ones((2, 3), np.uint8),
           stays="it decodes a weight"),
]  # fmt: skip

# Operators that move quantized values move floats.
carry = Rule(
    RemoveQuantizeDequantize(), "float[1, 4, 4, 4] x, float[1, 4, 4, 4] w", then=RemoveUnused(), s=SCALE, z=MIDDLE,
    codes=np.arange(64, dtype=np.uint8).reshape(1, 4, 4, 4), filling=np.array(140, np.uint8),
    factors=np.array([1, 1, 2, 2], np.float32), to=[2, 4, 4, 4], places=[2, 0], margins=[0, 0, 1, 0, 0, 0, 0, 1],
    shape=[4, -1], one=[1], two=[3], halves=[1, 3], zero=[0], times=[1, 2, 1, 1],
)  # fmt: skip
IMAGES = {
    name: (np.rint(values(1, 4, 4, 4, seed=seed, scale=1) / SCALE).clip(-100, 100) * SCALE).astype(np.float32)
    for seed, name in enumerate("xw")
}
CARRIED = [
    carry(f"q = QuantizeLinear(x, s, z)  r = QuantizeLinear(w, s, z) {body} y = DequantizeLinear(c, s, z)", feed=IMAGES,
          holds=lambda graph: unquantized(graph)
          and not any(tensor.dtype == np.uint8 for tensor in constants(graph) if tensor.outputs))
    for body in [
        "c = Concat <axis = 1> (q, r, q)",
        "c = Concat <axis = 1> (q, codes)",
        "c = DepthToSpace <blocksize = 2> (q)",
        "c = Expand(q, to)",
        "c = Flatten(q)",
        "c = Gather <axis = 1> (q, places)",
        "c = Identity(q)",
        "c = MaxPool <kernel_shape = [2, 2], pads = [1, 1, 0, 0]> (q)",
        "c = Pad(q, margins, filling)",
        "c = Pad(q, margins)",
        "c = Pad(q, margins, )",
        'c = Pad <mode = "reflect"> (q, margins)',
        "c = Reshape(q, shape)",
        'c = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (q, , factors)',
        "c = Slice(q, one, two, one)",
        "c, d = Split <axis = 1> (q, halves)",
        "c = Squeeze(q, zero)",
        "c = Tile(q, times)",
        "c = Transpose <perm = [0, 2, 3, 1]> (q)",
        "b = Transpose <perm = [0, 2, 3, 1]> (q)  c = Flatten(b)",
        "c = Unsqueeze(q, zero)",
    ]
]  # fmt: skip
# Sizes and indices of what moves quantized values are none.
sized = Rule(RemoveQuantizeDequantize(), "float[1, 3] x", then=RemoveUnused(), s=SCALE, z=MIDDLE, minus=[-1], two=[2],
             one=[1], three=[3], zero=[0], number=np.array(0), ends=[2, 1])  # fmt: skip
SIZED = [
    sized(f"q = QuantizeLinear(x, s, z)  size = Shape(x)  {body}  y = DequantizeLinear(c, s, z)",
          feed={"x": ROW["x"][:1]}, holds=lambda graph: unquantized(graph) and "Sub" not in ops(graph))
    for body in [
        "m = Identity(minus)  n = Gather(size, one)  t = Concat <axis = 0> (m, n)  c = Reshape(q, t)",
        "t = Concat <axis = 0> (minus, three)  c = Reshape(q, t)",
        "t = Unsqueeze(number, zero)  c = Gather <axis = 0> (q, t)",
        "t = Gather(ends, one)  c = Slice(q, zero, t)",
        "t = Identity(two)  n = Concat <axis = 0> (t, three)  c = Expand(q, n)",
        "t = Concat <axis = 0> (one, three)  c = Tile(q, t)",
    ]
]  # fmt: skip
# Quantized values that a node computes with are made and decoded by float operators.
COMPUTED = [
    remove(f"q = QuantizeLinear(x, s, z)  {body}", feed=ROW, holds=unquantized,
           # The largest is three steps away from the next quantized value of a measured scale.
           error=3 / 255 if "Dynamic" in body else 1e-6)
    for body in [
        "c = Mod(q, q)  d = Max(c, q)  y = DequantizeLinear(d, s, z)",
        "y = DequantizeLinear(q, s)",
        "y = DequantizeLinear <axis = 0> (q, fine, other)",
        "r = QuantizeLinear(x, t, z)  c = Concat <axis = 0> (q, r)  y = DequantizeLinear(c, s, z)",
        "m, n, o = DynamicQuantizeLinear(x)  d = DequantizeLinear(m, n, o)  e = QuantizeLinear(d, s, z)"
        "  c = Max(e, z)  y = DequantizeLinear(c, s, z)",
        "r = Transpose(q)  c = Mod(r, r)  d = Max(c, r)  e = DequantizeLinear(d, s, z)  y = Transpose(e)",
        "f = Max(z, z)  c = Pad(q, margins, f)  y = DequantizeLinear(c, s, z)",
        "r = QuantizeLinear <axis = 1> (x, columns, points)  c = Max(r, z)"
        "  y = DequantizeLinear <axis = 1> (c, columns, points)",
    ]
]  # fmt: skip
# A clamp that the range of quantized values took over comes back; values that cannot be negative get none.
WAVE = {"x": np.linspace(-8, 8, 600, dtype=np.float32).reshape(2, 300)}
bounded = Rule(RemoveQuantizeDequantize(), "float[4, 4] x", nil=np.array(0, np.uint8), low=0, high=6)
BOUNDED = [
    *(bounded("a = Add(x, x)  q = QuantizeLinear(a, s, z)  b = DequantizeLinear(q, s, z)  y = Mul(b, b)",
              f"Add {op} Mul", inputs="float[2, 300] x", opset=opset, s=np.array(highest / 255, np.float32),
              z=np.array(lowest, code), runs=False,
              holds=lambda graph, op=op, highest=highest: np.allclose(
                  outputs(graph, WAVE)["y"], np.square(np.clip(2 * WAVE["x"], 0, highest if op == "Clip" else None)),
                  rtol=1e-6))
      for (code, lowest), (highest, op), opset in product(
          [(np.uint8, 0), (np.int8, -128)], [(4.31, "Relu"), (4.0, "Clip"), (6.0, "Clip")], [10, 13])),
    *(bounded(f"{body} q = QuantizeLinear(a, s, nil)  y = DequantizeLinear(q, s, nil)", expected, error=0.02,
              s=np.array((6 if "Clip" in body else 4.31) / 255, np.float32))
      for body, expected in [
          ("a = Relu(x)", "Relu"), ("a = Sigmoid(x)", "Sigmoid"), ("a = Softmax(x)", "Softmax"),
          ("b = Relu(x)  a = Transpose(b)", "Relu Transpose"), ("a = Clip(x, low, high)", "Clip"),
          ("b = Clip(x, low, high)  a = Flatten(b)", "Clip Flatten")]),
]  # fmt: skip

restore = Rule(RestoreOperators(), "float[3, 4] x", zero=0, one=1, six=6, v=values(3, 4), n=np.array(2))
WIDE = {"x": values(3, 4, scale=8)}
RESTORED = [
    *(restore(body, expected, error=0.0, feed=WIDE) for body, expected in [
        ("y = Max(x, zero)", "Relu"),
        ("y = Max(zero, x)", "Relu"),
        ("y = Max(x, one)", "Clip"),
        ("y = Min(x, six)", "Clip"),
        ("a = Max(x, zero)  y = Min(a, six)", "Clip"),
        ("a = Max(x, zero)  b = Neg(a)  y = Min(b, six)", "Relu Neg Clip"),
        ("a = Max(x, zero)  b = Min(a, six)  y = Add(a, b)", "Relu Clip Add"),
        ("a = Sum(x)  b = Neg(a)  y = Mul(a, b)", "Neg Mul"),
        ("y = Sum(x)", "Identity"),
        ("y = Sum(x, v)", "Add")]),
    *(restore(body, stays="") for body in [
        "y = Sum(x, v, x)", "y = Max(x, v)", "y = Max(x, one, zero)",
        "a = Cast <to = 7> (x)  b = Max(a, n)  y = Cast <to = 1> (b)"]),
    restore("y = Max(x, zero)", opset=10, stays=""),
]  # fmt: skip


@table(REMOVED, CARRIED, SIZED, COMPUTED, BOUNDED, RESTORED)
def test_rules(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("code", [np.uint8, np.int8, np.int16, np.uint16])
def test_quantized_values_that_are_fed_and_returned_stay_bit_for_bit(code: Any) -> None:
    limits = np.iinfo(code)
    name = np.dtype(code).name
    made = remove(
        f"""({name}[2, 300] x) => (y, turned) {{
            a = DequantizeLinear(x, s, z)  b = Tanh(a)  c = Mul(b, gain)
            y = QuantizeLinear(c, t, z)  turned = Transpose(y) }}""",
        opset=21, t=np.array(0.0371, np.float32), gain=9, z=np.array(limits.min + 100, code),
    ).made  # fmt: skip
    graph = named_graph(made)
    RemoveQuantizeDequantize().apply(graph)
    assert unquantized(graph)
    feed = {"x": np.random.default_rng(0).integers(limits.min, limits.max + 1, (2, 300)).astype(code)}
    for output, expected in outputs(made, feed).items():
        np.testing.assert_array_equal(outputs(graph, feed)[output], expected, strict=True)


@pytest.mark.parametrize("factor", [np.array(2, np.float32), np.array([2, 0.5, 1], np.float32)])
def test_a_factor_in_the_scale_behind_an_integer_operator_is_multiplied(factor: Array) -> None:
    made = model(
        """(float[2, 3] x) => (float[2, 3] y) {
            q = QuantizeLinear(x, s, z)  p = QLinearMatMul(q, s, z, w, s, z, s, z)  y = DequantizeLinear(p, t, zs) }""",
        w=np.array([[120, 140, 130], [110, 120, 125], [140, 125, 120]], np.uint8), t=SCALE * factor, s=SCALE, z=MIDDLE,
        zs=np.full(factor.shape, 120, np.uint8),
    )  # fmt: skip
    graph = named_graph(made)
    ReplaceIntegerOperators().apply(graph)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["MatMul", "Mul"]
    # Half a step of the quantized values behind the product, with the factor.
    np.testing.assert_allclose(outputs(graph, ROW)["y"], outputs(made, ROW)["y"], atol=float(SCALE))


REFUSED = {
    "m, n, o = DynamicQuantizeLinear(x)  p = DequantizeLinear(m, n, o)  y = Mul(p, n)": (
        r"node Mul_y \(Mul\) reads n of node DynamicQuantizeLinear_m"
    ),
    "m, n, o = DynamicQuantizeLinear(x)  p = Mod(m, m)  y = DequantizeLinear(p, s, z)": (
        r"node Mod_p \(Mod\) reads the integers m, whose scale is computed"
    ),
}


@pytest.mark.parametrize(("body", "message"), REFUSED.items())
def test_what_has_no_float_meaning_is_refused_by_name(body: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RemoveQuantizeDequantize().apply(named_graph(remove(body).made))


def test_a_thousand_nodes_that_move_quantized_values_take_no_recursion() -> None:
    steps = "".join(f"q{i + 1} = Identity(q{i}) " for i in range(1500))
    made = remove(f"a = Neg(x)  q0 = QuantizeLinear(a, s, z)  {steps}  y = DequantizeLinear(q1500, s, z)").made
    graph = named_graph(made)
    RemoveQuantizeDequantize().apply(graph)
    assert unquantized(graph)
    assert difference(outputs(graph, ROW), outputs(made, ROW)) <= 1e-6
