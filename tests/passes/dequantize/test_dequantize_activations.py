"""Activations back to floats, with the clamps that quantizers took over."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import Array, difference, model, named_graph, node_named, nodes, ops, outputs, sample, values
from onnx import TensorProto
from quantized_pairs import MIDDLE, SCALE, quantized, remove

from onnxq.errors import ModelError
from onnxq.ir import Graph, Node, Tensor, Variable, as_graph, constant, constants, to_model
from onnxq.passes import NameNodes, RemoveQuantizeDequantize, ReplaceIntegerOperators, RestoreOperators
from onnxq.passes.dequantize.activations import clamp
from onnxq.rewrite import Changes


def made_by(op: str, *inputs: Tensor, **attributes: Any) -> tuple[Node, Variable]:
    output = Variable("y", np.dtype(np.float32), [2])
    return Node(op, op, attributes, list(inputs), [output]), output


def clamped(high: float, low: float = 0.0, maker: Node | None = None, opset: int = 17) -> Node | None:
    """Return the clamp of a quantized range behind an operator; by default one of any values."""
    value = (maker or made_by("Conv", Variable("x"))[0]).outputs[0]
    return clamp(value, low, high, (high - low) / 255, opset, lambda name: name)


def test_a_range_from_zero_was_a_relu_and_one_to_a_short_number_a_clip() -> None:
    relu, clip = clamped(4.31), clamped(6.0)
    assert relu is not None
    assert clip is not None
    assert (relu.op, [tensor.name for tensor in relu.inputs]) == ("Relu", ["y"])
    assert (clip.op, [float(tensor.values) for tensor in clip.inputs[1:]]) == ("Clip", [0.0, 6.0])
    assert [clip.inputs[1].name, clip.outputs[0].name] == ["y.minimum", "y.clamped"]
    old = clamped(6.0, opset=10)
    assert old is not None
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
    node = clamp(value, low, high, scale, 17, lambda name: name)
    assert node is not None
    assert [float(tensor.values) for tensor in node.inputs[1:]] == pytest.approx(ends)
    # Values that lie between these ends anyway are not clamped.
    assert clamp(node.outputs[0], low, high, scale, 17, lambda name: name) is None


def behind(*ops: str, **attributes: Any) -> Node:
    """Return the last of a chain of operators, of which the first has the attributes."""
    node, tensor = made_by(ops[0], Variable("x"), **attributes)
    for op in ops[1:]:
        node, tensor = made_by(op, tensor)
    return node


@pytest.mark.parametrize(
    ("high", "low", "maker"),
    [
        (4.31, -1.0, behind("Conv")),
        (127 / 50, -128 / 50, behind("Conv")),
        (3.1, -2.0, behind("Conv")),
        # A whole step away from -1 and 1: rounding the zero point moves ends by half a step at most.
        (1 + 2 / 255, -1 + 2 / 255, behind("Conv")),
        (25.4, -25.6, behind("Conv")),
        (15.5, -10.0, behind("Conv")),
        (3.0001, 0.0, behind("Relu")),
        (3.0001, 0.0, behind("Relu", "MaxPool", "GlobalAveragePool", "Reshape")),
        (6.0, 0.0, behind("Clip", "Transpose", min=0.0, max=6.0)),
        (1.0, 0.0, behind("Sigmoid")),
        (1.0, -1.0, behind("Tanh", "Slice")),
        (2.71, 0.0, behind("HardSigmoid")),
    ],
)
def test_what_cannot_leave_the_range_or_has_an_ordinary_one_is_not_clamped(
    high: float, low: float, maker: Node
) -> None:
    assert clamped(high, low, maker) is None


@pytest.mark.parametrize("ops", [("Relu",), ("Relu", "Pad"), ("Relu", "Neg"), ("Clip",)])
def test_values_that_may_leave_the_range_are_cut_at_six(ops: tuple[str, ...]) -> None:
    node = clamped(6.0, maker=behind(*ops))
    assert node is not None
    assert node.op == "Clip"


def test_a_custom_operator_of_a_known_name_says_nothing() -> None:
    maker = behind("Relu")
    maker.domain = "my.own"
    node = clamped(4.31, maker=maker)
    assert node is not None
    assert node.op == "Relu"


def test_inputs_constants_and_what_was_cast_are_not_clamped() -> None:
    for value in (Variable("x"), constant("c", np.float32([-1])), made_by("Cast", Variable("i"))[1]):
        assert clamp(value, 0.0, 4.0, 4 / 255, 17, str) is None


# RemoveQuantizeDequantize lets floats flow where quantized values did.


def test_a_pair_vanishes_and_the_output_keeps_its_name() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Tanh(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, s, z)
        }"""
    )
    graph, changes = remove(made)
    assert ops(graph) == ["Tanh"]
    assert changes.changed == ("QuantizeLinear_q", "DequantizeLinear_y")
    np.testing.assert_allclose(outputs(graph, sample(made))["y"], np.tanh(sample(made)["x"]), rtol=1e-6)


def test_an_input_that_is_returned_passes_through_identity() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y, float[2, 3] again) {
            q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)  again = DequantizeLinear(q, s, z)
        }"""
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Identity", "Identity"]
    assert [tensor.name for tensor in graph.outputs] == ["y", "again"]


def test_one_tensor_behind_two_outputs_keeps_both_names() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y, float[2, 3] again) {
            a = Tanh(x)  q = QuantizeLinear(a, s, z)
            y = DequantizeLinear(q, s, z)  again = DequantizeLinear(q, s, z)
        }"""
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Tanh", "Identity"]
    found = outputs(graph, sample(made))
    assert sorted(found) == ["again", "y"]
    np.testing.assert_array_equal(found["y"], found["again"])


CARRIERS = {
    "concat": "c = Concat <axis = 1> (q, r, q)",
    "concat with constant codes": "c = Concat <axis = 1> (q, codes)",
    "depth to space": "c = DepthToSpace <blocksize = 2> (q)",
    "expand": "c = Expand(q, to)",
    "flatten": "c = Flatten(q)",
    "gather": "c = Gather <axis = 1> (q, places)",
    "identity": "c = Identity(q)",
    "max pool": "c = MaxPool <kernel_shape = [2, 2], pads = [1, 1, 0, 0]> (q)",
    "pad": "c = Pad(q, margins, filling)",
    "pad with code zero": "c = Pad(q, margins)",
    "pad with code zero that is left out": "c = Pad(q, margins, )",
    "pad by reflection": 'c = Pad <mode = "reflect"> (q, margins)',
    "reshape": "c = Reshape(q, shape)",
    "resize": 'c = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (q, , factors)',
    "slice": "c = Slice(q, one, two, one)",
    "split": "c, d = Split <axis = 1> (q, halves)",
    "squeeze": "c = Squeeze(q, zero)",
    "tile": "c = Tile(q, times)",
    "transpose": "c = Transpose <perm = [0, 2, 3, 1]> (q)",
    "two in a row": "b = Transpose <perm = [0, 2, 3, 1]> (q)  c = Flatten(b)",
    "unsqueeze": "c = Unsqueeze(q, zero)",
}
INDICES = {
    "to": [2, 4, 4, 4], "places": [2, 0], "margins": [0, 0, 1, 0, 0, 0, 0, 1], "shape": [4, -1], "one": [1],
    "two": [3], "halves": [1, 3], "zero": [0], "times": [1, 2, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize("body", CARRIERS.values(), ids=CARRIERS)
def test_nodes_that_move_codes_move_floats(body: str) -> None:
    made = quantized(
        f"""g (float[1, 4, 4, 4] x, float[1, 4, 4, 4] w) => (float y) {{
            q = QuantizeLinear(x, s, z)  r = QuantizeLinear(w, s, z)
            {body}
            y = DequantizeLinear(c, s, z)
        }}""",
        codes=np.arange(64, dtype=np.uint8).reshape(1, 4, 4, 4),
        filling=np.array(140, np.uint8),
        factors=np.array([1, 1, 2, 2], np.float32),
        **{name: np.array(numbers) for name, numbers in INDICES.items()},
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    assert not any(tensor.dtype == np.uint8 for tensor in constants(graph) if tensor.outputs)
    # On the grid of quantized values there is nothing to round, so that both models compute the same.
    inputs = {
        name: (np.rint(array / SCALE).clip(-100, 100) * SCALE).astype(np.float32)
        for name, array in sample(made).items()
    }
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 1e-6


def test_rows_of_constant_codes_are_looked_up_as_floats() -> None:
    made = quantized(
        """g (int64[N, 2] i) => (float[2, N, 8] y) {
            rows = Gather(table, i)  turned = Transpose <perm = [1, 0, 2]> (rows)  y = DequantizeLinear(turned, s, z)
        }""",
        table=np.arange(80, dtype=np.uint8).reshape(10, 8),
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Gather", "Transpose"]
    inputs = {"i": np.array([[3, 1], [0, 9], [2, 2]])}
    np.testing.assert_array_equal(outputs(graph, inputs)["y"], outputs(made, inputs)["y"])


def test_largest_and_shape_are_asked_of_the_floats() -> None:
    made = quantized(
        """g (float[2, 5] x) => (int64[2] y, int64[2] size) {
            q = QuantizeLinear(x, s, z)  y = ArgMax <axis = 1, keepdims = 0> (q)  size = Shape(q)
        }"""
    )
    graph, _ = remove(made)
    inputs = sample(made)
    np.testing.assert_array_equal(outputs(graph, inputs)["y"], inputs["x"].argmax(1))
    np.testing.assert_array_equal(outputs(graph, inputs)["size"], [2, 5])


@pytest.mark.parametrize("code", [np.uint8, np.int8, np.int16, np.uint16])
def test_codes_that_are_fed_and_returned_stay_bit_for_bit(code: Any) -> None:
    limits = np.iinfo(code)
    name = np.dtype(code).name
    made = model(
        f"""g ({name}[2, 300] x) => ({name}[2, 300] y, {name}[300, 2] turned) {{
            a = DequantizeLinear(x, s, z)  b = Tanh(a)  c = Mul(b, gain)
            y = QuantizeLinear(c, t, z)  turned = Transpose(y)
        }}""",
        opset=21, ir_version=10, s=SCALE, t=np.array(0.0371, np.float32), gain=np.array(9, np.float32),
        z=np.array(limits.min + 100, code),
    )  # fmt: skip
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    inputs = {"x": np.random.default_rng(0).integers(limits.min, limits.max + 1, (2, 300)).astype(code)}
    for output, expected in outputs(made, inputs).items():
        np.testing.assert_array_equal(outputs(graph, inputs)[output], expected, strict=True)


@pytest.mark.parametrize(("code", "lowest"), [(np.uint8, 0), (np.int8, -128)])
@pytest.mark.parametrize(("highest", "op"), [(4.31, "Relu"), (4.0, "Clip"), (6.0, "Clip")])
@pytest.mark.parametrize("opset", [10, 13])
def test_a_clamp_that_the_range_of_codes_took_over_comes_back(
    code: Any, lowest: int, highest: float, op: str, opset: int
) -> None:
    made = model(
        """g (float[2, 300] x) => (float[2, 300] y) {
            a = Add(x, x)  q = QuantizeLinear(a, s, z)  b = DequantizeLinear(q, s, z)  y = Mul(b, b)
        }""",
        opset=opset, s=np.array(highest / 255, np.float32), z=np.array(lowest, code),
    )  # fmt: skip
    graph, _ = remove(made)
    assert ops(graph) == ["Add", op, "Mul"]
    inputs = {"x": np.linspace(-8, 8, 600, dtype=np.float32).reshape(2, 300)}
    expected = np.square(np.clip(2 * inputs["x"], 0, highest if op == "Clip" else None))
    np.testing.assert_allclose(outputs(graph, inputs)["y"], expected, rtol=1e-6)


NOT_NEGATIVE = (
    "a = Relu(x)",
    "a = Sigmoid(x)",
    "a = Softmax(x)",
    "b = Relu(x)  a = Transpose(b)",
    "a = Clip(x, low, high)",
    "b = Clip(x, low, high)  a = Flatten(b)",
)


@pytest.mark.parametrize("body", NOT_NEGATIVE)
def test_values_that_cannot_be_negative_get_no_clamp(body: str) -> None:
    made = model(
        f"g (float[4, 4] x) => (float y) {{ {body} q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, s, z) }}",
        s=np.array((6 if "Clip" in body else 4.31) / 255, np.float32), z=np.array(0, np.uint8),
        low=np.array(0, np.float32), high=np.array(6, np.float32),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    before = [node.op_type for node in made.graph.node]
    assert ops(remove(made)[0]) == before[:-2]


def test_nodes_share_the_clamp_of_a_tensor() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y, float[2, 3] w) {
            a = Neg(x)
            q = QuantizeLinear(a, s, zero)  b = DequantizeLinear(q, s, zero)  y = Tanh(b)
            r = QuantizeLinear(a, s, zero)  c = DequantizeLinear(r, s, zero)  w = Sin(c)
        }""",
        zero=np.array(0, np.uint8),
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Neg", "Relu", "Tanh", "Sin"]


COMPUTED = {
    "an operator on codes": "c = Mod(q, q)  d = Max(c, q)  y = DequantizeLinear(d, s, z)",
    "another zero point": "y = DequantizeLinear(q, s)",
    "a scale for each row": "y = DequantizeLinear <axis = 0> (q, rows, other)",
    "codes of two scales": "r = QuantizeLinear(x, t, z)  c = Concat <axis = 0> (q, r)  y = DequantizeLinear(c, s, z)",
    "constant quantized values as well": (
        "m, n, o = DynamicQuantizeLinear(x)  d = DequantizeLinear(m, n, o)  e = QuantizeLinear(d, s, z)"
        "  c = Max(e, z)  y = DequantizeLinear(c, s, z)"
    ),
    "codes that are moved, then computed with": (
        "r = Transpose(q)  c = Mod(r, r)  d = Max(c, r)  e = DequantizeLinear(d, s, z)  y = Transpose(e)"
    ),
    "a filling that is computed": "f = Max(z, z)  c = Pad(q, margins, f)  y = DequantizeLinear(c, s, z)",
}


@pytest.mark.parametrize("body", COMPUTED.values(), ids=COMPUTED)
def test_codes_that_a_node_computes_with_are_made_and_decoded_by_float_operators(body: str) -> None:
    made = quantized(
        f"g (float[2, 3] x) => (float[a, b] y) {{ q = QuantizeLinear(x, s, z)  {body} }}",
        t=np.array(1, np.float32),
        rows=np.array([0.1, 0.3], np.float32),
        other=np.array([7, 9], np.uint8),
        margins=np.array([0, 1, 1, 0]),
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"} & set(ops(graph))
    inputs = {"x": np.float32(SCALE * np.arange(-3, 3).reshape(2, 3))}
    # The largest is three steps away from the next code of a measured scale.
    tolerance = 3 / 255 if "Dynamic" in body else 1e-6
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= tolerance


@pytest.mark.parametrize("factor", [np.array(2, np.float32), np.array([2, 0.5, 1], np.float32)])
def test_a_factor_in_the_scale_behind_an_integer_operator_is_multiplied(factor: Array) -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y) {
            q = QuantizeLinear(x, s, z)  p = QLinearMatMul(q, s, z, w, s, z, s, z)  y = DequantizeLinear(p, t, zs)
        }""",
        w=np.array([[120, 140, 130], [110, 120, 125], [140, 125, 120]], np.uint8), t=SCALE * factor,
        zs=np.full(factor.shape, 120, np.uint8),
    )  # fmt: skip
    graph = named_graph(made)
    ReplaceIntegerOperators().apply(graph)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["MatMul", "Mul"]
    inputs = {"x": np.float32(SCALE * np.arange(-3, 3).reshape(2, 3))}
    # Half a step of the quantized values behind the product, with the factor.
    np.testing.assert_allclose(outputs(graph, inputs)["y"], outputs(made, inputs)["y"], atol=float(SCALE))


def test_codes_of_a_scale_for_each_channel_are_computed_with_as_well() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y) {
            q = QuantizeLinear <axis = 1> (x, columns, other)  c = Max(q, z)
            y = DequantizeLinear <axis = 1> (c, columns, other)
        }""",
        columns=np.array([0.1, 0.3, 0.02], np.float32), other=np.array([100, 110, 119], np.uint8),
    )  # fmt: skip
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 1e-6


@pytest.mark.parametrize(
    "body",
    [
        "m = Identity(minus)  n = Gather(size, one)  t = Concat <axis = 0> (m, n)  c = Reshape(q, t)",
        "t = Concat <axis = 0> (minus, three)  c = Reshape(q, t)",
        "t = Unsqueeze(number, zero)  c = Gather <axis = 0> (q, t)",
        "t = Gather(ends, one)  c = Slice(q, zero, t)",
        "t = Identity(minus)  n = Concat <axis = 0> (t, three)  c = Expand(q, n)",
        "t = Concat <axis = 0> (one, three)  c = Tile(q, t)",
    ],
)
def test_sizes_and_indices_of_what_moves_codes_are_no_codes(body: str) -> None:
    made = quantized(
        f"""g (float[1, 3] x) => (float y) {{
            q = QuantizeLinear(x, s, z)  size = Shape(x)  {body}  y = DequantizeLinear(c, s, z)
        }}""",
        minus=np.array([-1 if "Reshape" in body else 2]), one=np.array([1]), three=np.array([3]), zero=np.array([0]),
        number=np.array(0), ends=np.array([2, 1]),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear", "Sub"} & set(ops(graph))
    inputs = {"x": np.float32(SCALE * np.arange(3).reshape(1, 3))}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 1e-6


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
    made = quantized(f"g (float[2, 3] x) => (float[2, 3] y) {{ {body} }}")
    graph = as_graph(made)
    NameNodes().apply(graph)
    with pytest.raises(ModelError, match=message):
        RemoveQuantizeDequantize().apply(graph)


def test_a_thousand_nodes_that_move_codes_take_no_recursion() -> None:
    steps = "".join(f"q{i + 1} = Identity(q{i}) " for i in range(1500))
    made = quantized(
        f"""g (float[2, 3] x) => (float[2, 3] y) {{
            a = Neg(x)  q0 = QuantizeLinear(a, s, z)  {steps}  y = DequantizeLinear(q1500, s, z)
        }}"""
    )
    graph, _ = remove(made)
    assert node_named(graph, "Neg_a").outputs[0].outputs[0].op == "Identity"


def test_signed_codes_whose_zero_point_is_left_out_are_no_rectifier() -> None:
    made = model(
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Tanh(x)  q = QuantizeLinear <output_dtype = 3> (a, s)  d = DequantizeLinear(q, s)  y = Tanh(d)
        }""",
        opset=21,
        s=np.array(0.02, np.float32),
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Tanh", "Tanh"]


# RemoveQuantizeDequantize around and inside bodies, and where types and factors differ.


def test_scales_along_an_axis_belong_together_too() -> None:
    made = model(
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Neg(x)  q = QuantizeLinear <axis = 1> (a, s, z)  b = DequantizeLinear <axis = 1> (q, s, z)  y = Neg(b)
        }""",
        s=np.array([1, 2, 3], np.float32), z=np.array([1, 2, 3], np.uint8),
    )  # fmt: skip
    assert ops(remove(made)[0]) == ["Neg", "Neg"]


def test_what_a_run_measures_vanishes_with_the_codes() -> None:
    made = model(
        """g (float[2, 3] x) => (float[2, 3] y) {
            q, s, z = DynamicQuantizeLinear(x)  t = Transpose(q)  u = Transpose(t)
            a = DequantizeLinear(u, s, z)  y = Tanh(a)
        }"""
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Transpose", "Transpose", "Tanh"]


def test_bodies_read_the_floats_of_codes_around_them() -> None:
    made = quantized(
        """g (float[2, 3] x, bool c) => (float[2, 3] y) {
            a = Neg(x)
            q = QuantizeLinear(a, s, z)
            y = If (c) <
                then_branch = yes () => (float[2, 3] t) { b = DequantizeLinear(q, s, z)  t = Tanh(b) },
                else_branch = no () => (float[2, 3] e) { e = DequantizeLinear(q, s, z) }>
        }"""
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Neg", "If", "Tanh", "Identity"]
    for seed, function in ((0, np.tanh), (1, np.array)):
        inputs = sample(made, seed)
        np.testing.assert_allclose(outputs(graph, inputs)["y"], function(-inputs["x"]), rtol=1e-6)


def test_codes_that_a_body_returns_stay_codes() -> None:
    made = quantized(
        """g (float[2, 3] x, bool c) => (float[2, 3] y) {
            q = If (c) <
                then_branch = yes () => (uint8[2, 3] t) { a = Tanh(x)  t = QuantizeLinear(a, s, z) },
                else_branch = no () => (uint8[2, 3] e) { e = QuantizeLinear(x, s, z) }>
            y = DequantizeLinear(q, s, z)
        }"""
    )
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    for seed in (0, 1):
        inputs = sample(made, seed)
        np.testing.assert_array_equal(outputs(graph, inputs)["y"], outputs(made, inputs)["y"])


def test_another_float_type_behind_the_pair_is_a_cast() -> None:
    made = model(
        """g (float[2, 3] x) => (float16[2, 3] y) {
            a = Tanh(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, t, z)
        }""",
        opset=21, ir_version=10, s=SCALE, t=np.array(0.0625, np.float16), z=MIDDLE,
    )  # fmt: skip
    made.graph.initializer[0].float_data[:] = []
    made.graph.initializer[0].raw_data = np.array(0.0625, np.float32).tobytes()
    graph, _ = remove(made)
    assert ops(graph) == ["Tanh", "Cast"]
    assert nodes(graph, "Cast")[0].attrs["to"] == TensorProto.FLOAT16


def test_a_factor_in_the_scale_of_codes_is_a_multiplication() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Tanh(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, t, z)
        }""",
        t=3 * SCALE,
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Tanh", "Mul"]
    inputs = sample(made)
    np.testing.assert_allclose(outputs(graph, inputs)["y"], outputs(made, inputs)["y"], atol=3 * float(SCALE))


def test_weights_are_left() -> None:
    made = quantized("g (float[2, 3] x) => (float[2, 3] y) { w = DequantizeLinear(codes, s, z)  y = Add(x, w) }",
                     codes=np.ones((2, 3), np.uint8))  # fmt: skip
    graph = as_graph(made)
    changes = RemoveQuantizeDequantize().apply(graph)
    assert changes == Changes((), (("", "it decodes a weight"),))


# RestoreOperators writes Relu, Clip and Add where their likes stand.

EXAMPLES = {
    "y = Max(x, zero)": ["Relu"],
    "y = Max(zero, x)": ["Relu"],
    "y = Max(x, one)": ["Clip"],
    "y = Min(x, six)": ["Clip"],
    "a = Max(x, zero)  y = Min(a, six)": ["Clip"],
    "a = Max(x, zero)  b = Neg(a)  y = Min(b, six)": ["Relu", "Neg", "Clip"],
    "a = Max(x, zero)  b = Min(a, six)  y = Add(a, b)": ["Relu", "Clip", "Add"],
    "a = Sum(x)  b = Neg(a)  y = Mul(a, b)": ["Neg", "Mul"],
    "y = Sum(x)": ["Identity"],
    "y = Sum(x, v)": ["Add"],
    "y = Sum(x, v, x)": ["Sum"],
    "y = Max(x, v)": ["Max"],
    "y = Max(x, one, zero)": ["Max"],
    "a = Cast <to = 7> (x)  b = Max(a, n)  y = Cast <to = 1> (b)": ["Cast", "Max", "Cast"],
}


def restored(body: str, opset: int = 17) -> tuple[onnx.ModelProto, Graph]:
    made = model(
        f"g (float[3, 4] x) => (float[3, 4] y) {{ {body} }}", opset=opset,
        zero=np.array(0, np.float32), one=np.array(1, np.float32), six=np.array(6, np.float32),
        v=values(3, 4), n=np.array(2),
    )  # fmt: skip
    graph = as_graph(made)
    NameNodes().apply(graph)
    RestoreOperators().apply(graph)
    assert not RestoreOperators().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return made, graph


@pytest.mark.parametrize(("body", "expected"), EXAMPLES.items())
def test_the_known_operator_computes_the_same(body: str, expected: list[str]) -> None:
    made, graph = restored(body)
    assert ops(graph) == expected
    inputs = {name: 8 * array for name, array in sample(made).items()}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0


def test_clamps_of_old_models_are_left() -> None:
    assert ops(restored("y = Max(x, zero)", opset=10)[1]) == ["Max"]
