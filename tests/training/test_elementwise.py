"""Every elementwise operator gives in torch what it gives in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.training.operators import ELEMENTWISE, torch_dtype
from training.modules import difference

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
