"""Which tensors get a scale, and which of them share one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from convolutions import KERNEL, PADS, between_convolutions, groups, modes

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import SchemeError
from onnxq.ir import read_model
from onnxq.planning.activations import check_activation_spec
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import target_named

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT


def test_activations_have_ranges_and_no_encoder() -> None:
    target = target_named("onnxruntime-cpu")
    check_activation_spec(QuantSpec("uint8", symmetric=False, method="torch"), target)
    with pytest.raises(SchemeError, match="method 'mine' is an encoder of weights, and the scales of activations are"):
        check_activation_spec(QuantSpec("uint8", symmetric=False, method="mine"), target)


@pytest.mark.parametrize(
    "middle",
    [
        "[n] b = MaxPool <kernel_shape = [2,2]> (a)",
        "[n] b = Transpose <perm = [0,1,3,2]> (a)",
        "[n] b = Slice(a, k, l, l)",
        '[n] b = Resize <mode = "nearest"> (a, , s)',
    ],
)
def test_what_moves_values_shares_its_scale(middle: str, build, plan_of) -> None:
    constants = {"k": np.array([0]), "l": np.array([2]), "s": np.array([1, 1, 2, 2], np.float32)}
    plan = plan_of(between_convolutions(build, middle, **constants))
    assert groups(plan) == {"x": "x", "a": "a", "b": "a", "y": "y"}


def test_a_chain_of_movers_shares_one_scale(build, plan_of) -> None:
    middle = "[r] r = Reshape(a, k) [t] t = Transpose <perm = [1,0,2]> (r) [s] b = Reshape(t, l)"
    plan = plan_of(between_convolutions(build, middle, k=np.array([2, 4, 64]), l=np.array([1, 8, 8, 8])))
    assert [groups(plan)[name] for name in "artb"] == ["a"] * 4


def test_the_parts_of_a_split_share_one_scale(build, plan_of) -> None:
    middle = "[s] p, q = Split <axis = 1> (a, k) [c] b = Concat <axis = 1> (q, p)"
    plan = plan_of(between_convolutions(build, middle, k=np.array([4, 4])))
    assert {groups(plan)[name] for name in "apqb"} == {"a"}


def test_all_that_is_concatenated_shares_one_scale(build, plan_of) -> None:
    middle = f"[other] c = Conv {PADS} (x, w2) [cat] b = Concat <axis = 2> (a, c)"
    plan = plan_of(between_convolutions(build, middle, w2=KERNEL))
    assert groups(plan) == {"x": "x", "a": "a", "c": "a", "b": "a", "y": "y"}


def test_arithmetic_gives_its_output_a_scale_of_its_own(build, plan_of) -> None:
    plan = plan_of(between_convolutions(build, "[n] b = Add(a, a)"))
    assert groups(plan)["b"] == "b"


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("Relu(a)", "Relu(c)", ["p", "q", "b"]),
        ("Clip(a, lo, hi)", "Clip(c, lo, hi)", ["p", "q", "b"]),
        ("Relu(a)", "LeakyRelu(c)", ["q", "b"]),
        ("Relu(a)", "Clip(c, lo, hi)", ["p", "b"]),
        ("Clip(a, lo, hi)", "LeakyRelu(c)", ["q", "b"]),
    ],
)
def test_what_is_clamped_shares_no_scale_with_what_is_not(
    one: str, other: str, shared: list[str], build, plan_of, quantize_to, running_graph, tmp_path: Path
) -> None:
    middle = f"[c] c = Conv {PADS} (x, w2) [one] p = {one} [two] q = {other} [cat] b = Concat <axis = 2> (p, q)"
    limits = {"lo": np.array(0, np.float32), "hi": np.array(6, np.float32)}
    model = between_convolutions(build, middle, w0=np.full(KERNEL, 3, np.float32), w2=KERNEL, **limits)
    found = groups(plan_of(model))
    assert [name for name in "pqb" if found[name] == found["b"]] == shared
    quantize_to(model, tmp_path / "q.onnx")
    running = Counter(node.op_type for node in running_graph(tmp_path / "q.onnx").node)
    assert (running["QLinearConv"], running["QLinearConcat"]) == (3, 1)


@pytest.mark.parametrize(("op", "expected"), [("Sigmoid", (0.0, 1.0)), ("Softmax", (0.0, 1.0)), ("LeakyRelu", None)])
def test_a_range_that_the_operator_fixes_is_not_calibrated(op: str, expected: object, build, plan_of) -> None:
    plan = plan_of(between_convolutions(build, f"[n] b = {op}(a)"))
    found = {activation.tensor: activation.fixed_range for activation in plan.activations}
    assert found == {"x": None, "a": None, "b": expected, "y": None}
    assert ("b" in plan.taps) is (expected is None)


@pytest.mark.parametrize(
    ("middle", "opset"), [("[gate] s = Sigmoid(a) [silu] b = Mul(a, s)", 17), ("[silu] b = Swish(a)", 24)]
)
def test_silu_between_convolutions_is_integer(
    middle: str, opset: int, build, plan_of, quantize_to, running_graph, tmp_path: Path
) -> None:
    text = f"(float[1,8,8,8] x) => (float[N,C,H,W] y) {{ a = Conv(x, w0) {middle} y = Conv(b, w1) }}"
    model = build(text, opset=opset, w0=KERNEL, w1=KERNEL)
    plan = plan_of(model)
    assert set(modes(plan).values()) == {STATIC}
    assert len(set(groups(plan).values())) == 5
    quantize_to(model, tmp_path / "q.onnx")
    running = Counter(node.op_type for node in running_graph(tmp_path / "q.onnx").node)
    assert (running["QLinearConv"], running["QLinearSigmoid"], running["QLinearMul"]) == (2, 1, 1)
    assert (running["QuantizeLinear"], running["DequantizeLinear"]) == (1, 1)


def test_silu_that_is_left_in_float_between_convolutions_is_one_kernel(
    build, quantize_to, running_graph, tmp_path: Path
) -> None:
    model = between_convolutions(build, "[gate] s = Sigmoid(a) [silu] b = Mul(a, s)")
    quantize_to(model, tmp_path / "q.onnx", scheme=PRESETS["int8"].excluding("gate", "silu"))
    running = Counter(node.op_type for node in running_graph(tmp_path / "q.onnx").node)
    assert (running["QLinearConv"], running["QuickGelu"], running["Sigmoid"], running["Mul"]) == (2, 1, 0, 0)


def test_a_rectifier_with_slopes_is_computed_in_float_without_its_slow_kernel(
    build, quantize_to, running_graph, tmp_path: Path
) -> None:
    slope = np.linspace(-0.1, 0.3, 8, dtype=np.float32).reshape(8, 1, 1)
    quantize_to(between_convolutions(build, "[n] b = PRelu(a, k)", k=slope), tmp_path / "q.onnx")
    running = Counter(node.op_type for node in running_graph(tmp_path / "q.onnx").node)
    assert (running["QLinearConv"], running["Mul"], running["Max"], running["PRelu"]) == (2, 1, 1, 0)


def test_a_constant_operand_has_the_range_of_its_values(build, plan_of) -> None:
    values = np.linspace(-1, 3, 8, dtype=np.float32).reshape(8, 1, 1)
    plan = plan_of(between_convolutions(build, "s = Sigmoid(a) [n] m = Mul(s, k) b = Sigmoid(m)", k=values))
    (operand,) = (activation for activation in plan.activations if activation.tensor == "k")
    assert (operand.fixed_range, operand.group, operand.every_consumer) == ((-1.0, 3.0), "k", False)
    assert "k" not in plan.taps


def test_what_ends_at_one_shares_no_scale_with_what_goes_on(build, plan_of) -> None:
    middle = "[g] p = HardSigmoid(a) [cat] b = Concat <axis = 2> (a, p)"
    plan = plan_of(between_convolutions(build, middle))
    assert groups(plan)["p"] == "p"
    assert groups(plan)["a"] == groups(plan)["b"]


@pytest.mark.parametrize(
    ("target", "middle", "coded"),
    [
        ("openvino", "[n] b = Tanh(a)", {"x": False, "b": False}),
        ("openvino", "[n] b = Add(a, a)", {"x": False, "a": True, "b": True}),
        ("openvino", f"[n] n = Tanh(a) [m] m = Conv {PADS} (a, w0) [o] b = Sub(m, n)", dict.fromkeys("xab", False)),
        ("onnxruntime-cpu", "[n] b = Tanh(a)", {"x": False, "a": True, "b": False, "y": True}),
    ],
)
def test_a_convolution_gives_floats_to_what_computes_with_them_where_that_costs_nothing(
    target: str, middle: str, coded: dict[str, bool], build
) -> None:
    graph = prepare(read_model(between_convolutions(build, middle)))
    plan = make_plan(graph, PRESETS["int8"], target_named(target))
    assert {one.tensor: one.every_consumer for one in plan.activations} == coded
    assert modes(plan)["first"] is modes(plan)["last"] is STATIC
