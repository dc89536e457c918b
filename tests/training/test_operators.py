"""Operators compute in torch what they compute in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.ir import Node, constant
from onnxq.ops import OPERATORS
from onnxq.training.operators import (
    ELEMENTWISE,
    MOVING,
    PLAIN,
    PRODUCTS,
    RECURRENT,
    TORCH,
    Call,
    function_of,
    is_plain,
    torch_dtype,
)
from training.modules import difference


def test_every_operator_whose_weights_become_codes_can_be_trained() -> None:
    weighted = {op for (domain, op), row in OPERATORS.items() if row.weights and not domain}
    assert weighted - set(TORCH) <= {"QLinearConv", "ScatterND"}


@pytest.mark.parametrize(
    ("node", "known"),
    [
        (Node("Relu"), True),
        (Node("Relu", domain="com.example"), False),
        (Node("NonMaxSuppression"), False),
        (Node("Resize", attrs={"antialias": 1}), False),
        (Node("LSTM", attrs={"clip": 1.0}), False),
    ],
)
def test_what_torch_does_not_compute_is_told(node: Node, known: bool) -> None:
    assert (function_of(Call(node, (), 17)) is not None) == known


CALL = Call(
    Node("Pad", attrs={"pads": [1, 2], "value": constant("v", 3.0)}), (torch.zeros(2), None, torch.tensor([4])), 17
)


def test_inputs_are_there_or_left_out() -> None:
    assert CALL[0].tolist() == [0, 0]
    assert (CALL.optional(1), CALL.optional(7)) == (None, None)
    assert [one.numel() for one in CALL.given] == [2, 1]


def test_numbers_come_from_an_input_or_an_attribute() -> None:
    assert (CALL.numbers(2, "pads"), CALL.numbers(1, "pads"), CALL.numbers(1)) == ([4], [1, 2], None)
    assert (CALL.number(2, "value", 0), CALL.number(5, "other", 7)) == (4, 7)


def test_tensors_among_attributes_are_arrays() -> None:
    assert CALL.attribute("value").item() == 3.0


ONE = [
    "Abs",
    "Asinh",
    "Atan",
    "Ceil",
    "Cos",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "LogSoftmax",
    "Mish",
    "Neg",
    "Reciprocal",
    "Relu",
    "Round",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softmax",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Sinh",
    "Cosh",
    "Celu",
    "Dropout",
    "Asin",
    "Acos",
    "Atanh",
    "Log",
]


TWO = ["Add", "Div", "Max", "Min", "Mul", "Pow", "Sub", "Mean", "Sum", "PRelu"]


REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
]


# How a node is written that is not plain, and whether it makes whole numbers or truth values.
OTHERS = {
    "Acosh": "t = Add(x, x)  o = Constant<value = float {1.0}>()  u = Add(t, o)  y = Acosh(u)",
    "ArgMax": "a = ArgMax<axis = 1, select_last_index = 1>(x)  y = Cast<to = 1>(a)",
    "ArgMin": "a = ArgMin<axis = 0, keepdims = 0>(x)  y = Cast<to = 1>(a)",
    "And": "a = Less(x, z)  b = GreaterOrEqual(x, z)  c = And(a, b)  y = Cast<to = 1>(c)",
    "CastLike": "a = Floor(x)  y = CastLike(a, z)",
    "Clip": "l = Constant<value = float {0.2}>()  y = Clip(x, l)",
    "CumSum": "a = Constant<value = int64 {1}>()  y = CumSum<exclusive = 1, reverse = 1>(x, a)",
    "Div": "a = Constant<value = int64[2] {-7, 7}>()  b = Constant<value = int64 {2}>()  c = Div(a, b)  "
    "y = Cast<to = 1>(c)",
    "Equal": "a = Equal(x, x)  y = Cast<to = 1>(a)",
    "Gelu": 'y = Gelu<approximate = "tanh">(x)',
    "Greater": "a = Greater(x, z)  y = Cast<to = 1>(a)",
    "LessOrEqual": "a = LessOrEqual(x, z)  y = Cast<to = 1>(a)",
    "IsInf": "o = Sub(x, x)  i = Div(x, o)  a = IsInf(i)  y = Cast<to = 1>(a)",
    "IsInf above": "o = Sub(x, x)  n = Neg(x)  i = Div(n, o)  a = IsInf<detect_negative = 0>(i)  y = Cast<to = 1>(a)",
    "Selu of its own": "m = Neg(x)  y = Selu<alpha = 1.5, gamma = 2.0>(m)",
    "IsNaN": "a = IsNaN(x)  y = Cast<to = 1>(a)",
    "Mod": "y = Mod<fmod = 1>(x, z)",
    "Or": "a = Less(x, z)  b = Not(a)  c = Or(a, b)  y = Cast<to = 1>(c)",
    "Pow": "two = Constant<value = float {2.0}>()  y = Pow(x, two)",
    "ReduceSum": "a = Constant<value = int64[1] {-1}>()  y = ReduceSum<keepdims = 0>(x, a)",
    "Where": "a = Less(x, z)  y = Where(a, x, z)",
    "Xor": "a = Less(x, z)  b = Xor(a, a)  y = Cast<to = 1>(b)",
}


CASES = {
    **{op: f"y = {op}(x)" for op in ONE},
    **{f"{op} of two": f"y = {op}(x, z)" for op in TWO},
    **{op: f"y = {op}<axes = [1]>(x)" for op in REDUCTIONS},
    **OTHERS,
}


@pytest.mark.parametrize("case", CASES)
def test_torch_gives_what_onnxruntime_gives(case: str, build: Build) -> None:
    opset = 20 if case == "Gelu" else 22 if case == "Mish" else 17
    model = build(f"(float[2,3] x, float[3] z) => (float[?,?] y) {{ {CASES[case]} }}", opset=opset)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    generator = np.random.default_rng(0)
    sample = {name: generator.uniform(0.1, 0.9, shape).astype(np.float32) for name, shape in (("x", (2, 3)), ("z", 3))}
    assert difference(model, sample) < 1e-5


def test_the_table_is_tested_as_a_whole() -> None:
    tested = " ".join(CASES.values())
    assert [op for op in ELEMENTWISE if f" {op}(" not in tested and f" {op}<" not in tested] == []


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_before_opset_13_softmax_took_all_axes_from_one_on_as_one(axis: int, build: Build) -> None:
    model = build(f"(float[2,3,4] x) => (float[2,3,4] y) {{ y = Softmax<axis = {axis}>(x) }}", opset=11)
    assert difference(model, {"x": np.random.default_rng(0).random((2, 3, 4), np.float32)}) < 1e-6


def test_the_gradient_of_a_square_is_finite_at_zero() -> None:
    from onnxq.ir import Node
    from onnxq.training.operators import Call

    x = torch.zeros(2, requires_grad=True)
    ELEMENTWISE["Pow"](Call(Node("Pow"), (x, torch.tensor(2.0)), 17)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0]


@pytest.mark.parametrize("op", ["Sqrt", "Pow", "ReduceL2"])
def test_the_gradient_of_a_root_is_finite_at_zero(op: str) -> None:
    from onnxq.ir import Node
    from onnxq.training.operators import Call

    x = torch.tensor([[0.0, 0.0], [0.0, 4.0]], requires_grad=True)
    more = {"Sqrt": (), "Pow": (torch.tensor(0.5),), "ReduceL2": (torch.tensor([1]),)}[op]
    ELEMENTWISE[op](Call(Node(op), (x, *more), 18)).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert float(x.grad[1, 1]) > 0


@pytest.mark.parametrize(
    ("onnx_type", "expected"), [(1, torch.float32), (7, torch.int64), (9, torch.bool), (16, torch.bfloat16)]
)
def test_types_have_their_counterparts(onnx_type: int, expected: torch.dtype) -> None:
    assert onnx.TensorProto.DataType.Name(onnx_type)
    assert torch_dtype(onnx_type) == expected


def ints(name: str, *numbers: int) -> str:
    return f"{name} = Constant<value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}>()  "


MOVING_CASES = {
    "Concat": "y = Concat<axis = -1>(x, x)",
    "Constant": "c = Constant<value = float[4] {1, 2, 3, 4}>()  y = Add(x, c)",
    "Constant of numbers": "c = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>()  y = Add(x, c)",
    "ConstantOfShape": ints("s", 3, 4) + "c = ConstantOfShape<value = float[1] {2}>(s)  y = Add(x, c)",
    "DepthToSpace": "y = DepthToSpace<blocksize = 2>(z)",
    "DepthToSpace by columns": 'y = DepthToSpace<blocksize = 2, mode = "CRD">(z)',
    "Expand": ints("s", 2, 1, 1, 1) + "y = Expand(x, s)",
    "Flatten": "y = Flatten<axis = -1>(x)",
    "Gather": ints("i", -1, 0) + "y = Gather<axis = 1>(x, i)",
    "GatherElements": "i = Constant<value = int64[1,2] {-1, 0}>()  y = GatherElements<axis = 0>(x, i)",
    "GatherND": "i = Constant<value = int64[2,1] {1, 0}>()  y = GatherND(x, i)",
    "NonZero": "n = NonZero(x)  y = Cast<to = 1>(n)",
    "OneHot": ints("i", 1, -1) + "d = Constant<value = int64 {3}>()  "
    "v = Constant<value = float[2] {0, 5}>()  y = OneHot(i, d, v)",
    "OneHot beyond its depth": ints("i", 5, 1, -4) + "d = Constant<value = int64 {3}>()  "
    "v = Constant<value = float[2] {0, 5}>()  y = OneHot(i, d, v)",
    "Pad": ints("p", 0, 1, 2, 3) + "c = Constant<value = float {1.5}>()  y = Pad(x, p, c)",
    "Pad by the edge": ints("p", 0, 1, 2, 3) + 'y = Pad<mode = "edge">(x, p)',
    "Pad by reflection": ints("p", 0, 1, 2, 3) + 'y = Pad<mode = "reflect">(x, p)',
    "Range": "a = Constant<value = float {1.0}>()  b = Constant<value = float {4.0}>()  y = Range(a, b, a)",
    "Reshape": ints("s", 0, 2, -1) + "y = Reshape(x, s)",
    "ScatterElements": "i = Constant<value = int64[1,2] {-1, 0}>()  u = Constant<value = float[1,2] {7, 8}>()  "
    "y = ScatterElements<axis = 1>(x, i, u)",
    "Shape": "s = Shape<start = 1>(x)  y = Cast<to = 1>(s)",
    "Size": "s = Size(x)  y = Cast<to = 1>(s)",
    "Slice": ints("b", 1) + ints("e", 9223372036854775807) + ints("a", -1) + "y = Slice(x, b, e, a)",
    "Slice backwards": ints("b", -1) + ints("e", -100) + ints("a", 1) + ints("t", -2) + "y = Slice(x, b, e, a, t)",
    "SpaceToDepth": "y = SpaceToDepth<blocksize = 2>(z)",
    "Split": ints("p", 1, 3) + "y, rest = Split<axis = 1>(x, p)",
    "Split evenly": "y, rest = Split<axis = 1>(x)",
    "Squeeze": "u = Unsqueeze(x, o)  y = Squeeze(u)",
    "Tile": ints("r", 2, 3) + "y = Tile(x, r)",
    "TopK": ints("k", 2) + "y, places = TopK(x, k)",
    "TopK of equal values": ints("k", 3) + "r = Round(x)  v, places = TopK(r, k)  y = Cast<to = 1>(places)",
    "Transpose": "y = Transpose(x)",
    "Trilu": "y = Trilu<upper = 0>(x)",
    "Unsqueeze": ints("a", -1, 0) + "y = Unsqueeze(x, a)",
}  # fmt: skip


@pytest.mark.parametrize("case", MOVING_CASES)
def test_torch_moves_elements_as_onnxruntime(case: str, build: Build) -> None:
    text = f"(float[3,4] x, float[1,4,4,6] z) => (float[?] y) {{ {ints('o', 0)} {MOVING_CASES[case]} }}"
    model = build(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    generator = np.random.default_rng(0)
    sample = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in (("x", (3, 4)), ("z", (1, 4, 4, 6)))
    }
    assert difference(model, sample) < 1e-6


def test_the_table_of_moving_is_tested_as_a_whole() -> None:
    assert set(MOVING) <= set(MOVING_CASES)


WEIGHTS = {"w": (4, 2, 3, 3), "t": (4, 3, 3, 3), "b": (4,), "s": (4,), "g": (9, 5), "h": (7, 9), "c": (5,), "n": (9,)}


SIZES = "z = Constant<value = int64[4] {1, 4, 5, 13}>()  "


SCALES = "z = Constant<value = float[4] {1, 1, 2, 1.5}>()  "


PRODUCT_CASES = {
    "AveragePool": "y = AveragePool<kernel_shape = [3,2], pads = [1,0,1,1], strides = [2,2]>(x)",
    "AveragePool with its padding": "y = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>(x)",
    "AveragePool of what is left": "y = AveragePool<kernel_shape = [2,2], strides = [2,2], ceil_mode = 1>(x)",
    "AveragePool to its end": "y = AveragePool<kernel_shape=[2,2], pads=[1,1,1,1], strides=[2,2], ceil_mode=1>(x)",
    "BatchNormalization": "v = Abs(b)  y = BatchNormalization(x, s, b, b, v)",
    "Conv": "y = Conv<group = 2, pads = [1,1,1,1], strides = [2,1], dilations = [1,2]>(x, w, b)",
    "Conv padded as tensorflow does": 'y = Conv<group = 2, auto_pad = "SAME_UPPER", strides = [2,2]>(x, w, b)',
    "Conv with more on one side": "y = Conv<group = 2, pads = [0,1,2,3]>(x, w)",
    "ConvTranspose": "y = ConvTranspose<strides = [2,2], pads = [1,0,0,1], output_padding = [1,0]>(x, t)",
    "Einsum": 'y = Einsum<equation = "bchw,cd->bdhw">(x, e)',
    "Gemm": "f = Reshape(x, q)  y = Gemm<alpha = 0.5, beta = 2.0>(f, g, c)",
    "Gemm transposed": "f = Reshape(x, q)  y = Gemm<transB = 1>(f, h)",
    "GlobalAveragePool": "y = GlobalAveragePool(x)",
    "GlobalMaxPool": "y = GlobalMaxPool(x)",
    "InstanceNormalization": "y = InstanceNormalization(x, s, b)",
    "InstanceNormalization of one place": "o = GlobalAveragePool(x)  y = InstanceNormalization(o, s, b)",
    "LRN": "y = LRN<size = 3, alpha = 0.1>(x)",
    "LayerNormalization": "y = LayerNormalization(x, n, n)",
    "MatMul": "y = MatMul(x, g)",
    "MaxPool": "y = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2], ceil_mode = 1>(x)",
    "MaxPool to its end": "y = MaxPool<kernel_shape = [2,2], pads = [1,1,1,1], strides = [2,2], ceil_mode = 1>(x)",
    "Resize": SIZES + 'y = Resize<mode = "linear">(x, , , z)',
    "Resize by scales": SCALES + 'y = Resize<mode = "nearest", HOW = "asymmetric", nearest_mode = "floor">(x, , z)',
    "Resize to corners": SIZES + 'y = Resize<mode = "linear", HOW = "align_corners">(x, , , z)',
    "Resize by cubes": SIZES + 'y = Resize<mode = "cubic", HOW = "pytorch_half_pixel">(x, , , z)',
    "Resize to the nearest": SIZES + 'y = Resize<nearest_mode = "round_prefer_ceil">(x, , , z)',
}  # fmt: skip


@pytest.mark.parametrize("case", PRODUCT_CASES)
def test_torch_computes_products_as_onnxruntime(case: str, build: Build) -> None:
    text = f"(float[1,4,7,9] x) => (float[?] y) {{ q = Constant<value = int64[2] {{-1, 9}}>()  {PRODUCT_CASES[case]} }}"
    model = build(text.replace("HOW", "coordinate_transformation_mode"), e=(4, 3), **WEIGHTS)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    sample = {"x": np.random.default_rng(0).standard_normal((1, 4, 7, 9)).astype(np.float32)}
    assert difference(model, sample) < 1e-5


@pytest.mark.parametrize(("opset", "each"), [(18, 2), (21, 4)])
def test_groups_have_numbers_of_their_own_or_each_channel(opset: int, each: int, build: Build) -> None:
    text = "(float[1,4,3,3] x) => (float[1,4,3,3] y) { y = GroupNormalization<num_groups = 2>(x, s, b) }"
    sample = {"x": np.random.default_rng(0).standard_normal((1, 4, 3, 3)).astype(np.float32)}
    assert difference(build(text, opset=opset, s=(each,), b=(each,)), sample) < 1e-5


def test_root_mean_squares(build: Build) -> None:
    text = "(float[2,5] x) => (float[2,5] y) { y = RMSNormalization(x, s) }"
    sample = {"x": np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)}
    assert difference(build(text, opset=23, s=(5,)), sample) < 1e-5


@pytest.mark.parametrize(
    ("op", "attributes"),
    [("ConvTranspose", {"output_shape": [3, 3]}), ("Resize", {"antialias": 1}), ("AveragePool", {"dilations": [2, 2]})],
)
def test_what_the_table_does_otherwise_is_left_to_onnxruntime(op: str, attributes: dict[str, object]) -> None:
    assert op in PRODUCTS
    assert PLAIN[op](Call(Node(op), (), 19))
    assert not PLAIN[op](Call(Node(op, attrs=attributes), (), 19))


GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("more", ["", "lengths", "starts"])
def test_torch_runs_recurrent_cells_as_onnxruntime(op: str, direction: str, more: str, build: Build) -> None:
    count, rows = 2 if direction == "bidirectional" else 1, GATES[op] * 4
    lengths = "l" if more == "lengths" else ""
    starts = ", s, s" if more == "starts" and op == "LSTM" else ", s" if more == "starts" else ""
    text = f"""(float[5,2,3] x) => (float[?] y, float[?] h) {{
        l = Constant<value = int32[2] {{5, 3}}>()
        y, h = {op}<hidden_size = 4, direction = "{direction}">(x, w, r, b, {lengths}{starts}) }}"""
    model = build(text, w=(count, rows, 3), r=(count, rows, 4), b=(count, 2 * rows), s=(count, 2, 4))
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    sample = {"x": np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)}
    assert difference(model, sample) < 1e-5


def test_the_reset_gate_may_come_behind_the_product(build: Build) -> None:
    text = "(float[5,2,3] x) => (float[5,1,2,4] y) { y = GRU<hidden_size = 4, linear_before_reset = 1>(x, w, r, b) }"
    sample = {"x": np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)}
    assert difference(build(text, w=(1, 12, 3), r=(1, 12, 4), b=(1, 24)), sample) < 1e-5


def test_gradients_reach_the_first_step() -> None:
    x = torch.randn(6, 1, 3, requires_grad=True)
    call = Call(Node("GRU", attrs={"hidden_size": 2}), (x, torch.randn(1, 6, 3), torch.randn(1, 6, 2)), 17)
    RECURRENT["GRU"](call)[1].sum().backward()
    assert x.grad is not None
    assert float(x.grad[0].abs().sum()) > 0


@pytest.mark.parametrize(
    "attributes", [{"clip": 1.0}, {"activations": ["Affine", "Tanh"]}, {"activation_alpha": [0.1]}]
)
def test_cells_that_are_not_written_here_are_left_to_onnxruntime(attributes: dict[str, object]) -> None:
    assert not is_plain(Call(Node("GRU", attrs=attributes), (), 17))
