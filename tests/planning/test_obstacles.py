"""Why a node cannot run as an integer kernel: one model for each reason."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.planning.obstacles import data_inputs, volume

HALF = np.ones((32, 32), np.float16)


@pytest.mark.parametrize(
    ("text", "weights", "node", "mode", "reason"),
    [
        (
            "(float[4,32] x) => (float[4,32] y) { [n] y = Tanh(x) }",
            {},
            "n",
            Mode.FLOAT,
            "Tanh has no integer kernel on onnxruntime-cpu",
        ),
        (
            "(float[4,32] x, float[32,8] r) => (float[4,8] y) { [n] y = MatMul(x, r) }",
            {},
            "n",
            Mode.FLOAT,
            "its weight is computed at run time",
        ),
        (
            "(float[4,4,32] x) => (float[4,4,32] y) { [n] y = MatMul(x, w) }",
            {"w": (4, 32, 32)},
            "n",
            Mode.STORAGE,
            "a MatMul weight of rank 3 has no integer kernel",
        ),
        (
            "(float[32,4] x) => (float[32,4] y) { [n] y = MatMul(w, x) }",
            {"w": (32, 32)},
            "n",
            Mode.STORAGE,
            "the first input of MatMul is constant",
        ),
        (
            "(float16[4,32] x) => (float16[4,32] y) { [n] y = MatMul(x, w) }",
            {"w": HALF},
            "n",
            Mode.STORAGE,
            "its data is float16, not float32",
        ),
        (
            "(float[4,32] x, float[32] b) => (float[4,32] y) { [n] y = Gemm <beta = 0.5> (x, w, b) }",
            {"w": (32, 32)},
            "n",
            Mode.STORAGE,
            "Gemm with alpha, beta or transA has no integer kernel",
        ),
        (
            "(float[4,32] x, float[32] b) => (float[4,32] y) { [n] y = Gemm(x, w, b) }",
            {"w": (32, 32)},
            "n",
            Mode.STORAGE,
            "its bias is computed at run time",
        ),
        (
            "(float[4,32] x) => (float[4,32] y) { [n] y = Gemm(x, w, b) }",
            {"w": (32, 32), "b": (1,)},
            "n",
            Mode.STORAGE,
            "its bias of shape [1] is not one value for each of 32 channels",
        ),
        (
            "(float[4,32] x) => (float[4,32] y) { [n] y = Gemm(x, w, b) }",
            {"w": (32, 32), "b": (4, 32)},
            "n",
            Mode.STORAGE,
            "its bias of shape [4, 32] is not one value for each of 32 channels",
        ),
        (
            "(float[32,32] x) => (float[32,32] y) { [n] y = Gemm(x, w, b) }",
            {"w": (32, 32), "b": (32, 1)},
            "n",
            Mode.STORAGE,
            "its bias of shape [32, 1] is not one value for each of 32 channels",
        ),
        (
            "(float[1,33001] x) => (float[1,2] y) { [n] y = MatMul(x, w) }",
            {"w": (33001, 2)},
            "n",
            Mode.STORAGE,
            "sums of 33001 products can overflow an int32 accumulator",
        ),
        (
            "(float[4,0] x) => (float[4,32] y) { [n] y = MatMul(x, w) }",
            {"w": np.zeros((0, 32), np.float32)},
            "n",
            Mode.FLOAT,
            "its weight is empty",
        ),
        (
            "(float[1,8,4,4] x) => (float[1,8,6,6] y) { [n] y = ConvTranspose(x, w) }",
            {"w": (8, 8, 3, 3)},
            "n",
            Mode.STORAGE,
            "ConvTranspose has no integer kernel on onnxruntime-cpu",
        ),
        (
            "(int64[4] i) => (float[4,64] y) { [n] y = Gather(w, i) }",
            {"w": (64, 64)},
            "n",
            Mode.STORAGE,
            "Gather takes a constant as data",
        ),
        (
            "(float[1,8,4,4] x) => (float[1,8,4,4] y) { [c] a = Conv(x, w) [n] b = Add(a, k) [d] y = Conv(b, w) }",
            {"w": (8, 8, 1, 1), "k": np.full((4, 4), np.inf, np.float32)},
            "n",
            Mode.FLOAT,
            "Add takes a constant as data",
        ),
        (
            """(float[1,8,4,4] x) => (float[1,8,8,8] y) {
            [c] a = Conv(x, w) [n] b = Resize <mode = "linear"> (a, , s) [d] y = Conv(b, w)
            }""",
            {"w": (8, 8, 1, 1), "s": np.array([1, 1, 2, 2], np.float32)},
            "n",
            Mode.FLOAT,
            "Resize that interpolates changes its results on quantized values",
        ),
        (
            """(float[1,8,4,4] x) => (float[1,8,2,2] y, int64[1,8,2,2] i) {
            [c] a = Conv(x, w) [n] b, i = MaxPool <kernel_shape = [3,3]> (a) [d] y = Conv(b, w)
            }""",
            {"w": (8, 8, 1, 1)},
            "n",
            Mode.FLOAT,
            "MaxPool that returns indices has no integer kernel",
        ),
        (
            "(int64[2,4] x) => (int64[8] y) { [n] y = Reshape(x, s) }",
            {"s": np.array([8])},
            "n",
            Mode.FLOAT,
            "its data is int64, not float32",
        ),
        (
            "(float[2,4,8] x, float[1,1,16] h) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }",
            {"w": (1, 64, 8), "r": (1, 64, 16)},
            "n",
            Mode.STORAGE,
            "standard ONNX has no LSTM of integers; with --emit ort it has an integer kernel on onnxruntime-cpu",
        ),
        (
            "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = GRU <hidden_size = 16> (x, w, r) }",
            {"w": (1, 48, 8), "r": (1, 48, 16)},
            "n",
            Mode.STORAGE,
            "GRU has no integer kernel on onnxruntime-cpu",
        ),
        (
            "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = RNN <hidden_size = 16> (x, w, r) }",
            {"w": (1, 16, 8), "r": (1, 16, 16)},
            "n",
            Mode.STORAGE,
            "RNN has no integer kernel on onnxruntime-cpu",
        ),
    ],
)
def test_what_stays_out_of_integer_arithmetic_says_why(
    text: str, weights, node: str, mode: Mode, reason: str, build, plan_of
) -> None:
    decision = plan_of(build(text, **weights)).by_node[node]
    assert decision.mode is mode
    assert decision.reason.endswith(reason)


@pytest.mark.parametrize("op", ["Conv", "Gemm", "MatMul"])
@pytest.mark.parametrize("shape", [(), (32,)])
def test_a_damaged_weight_without_rows_and_columns_says_why(op: str, shape: tuple[int, ...], build, plan_of) -> None:
    decision = plan_of(build(f"(float[4,32] x) => (float y) {{ [n] y = {op}(x, w) }}", w=shape)).by_node["n"]
    assert (decision.mode, decision.reason) == (Mode.FLOAT, f"a weight of rank {len(shape)} has no integer kernel")


def test_a_type_that_nothing_tells_is_an_obstacle(build, plan_of) -> None:
    model = build("(float[4,32] x) => (float[4,8] y) { [c] a = Celu(x) [n] y = MatMul(a, w) }", w=(32, 8))
    model.graph.node[0].domain = "mine"
    model.opset_import.add(domain="mine", version=1)
    decision = plan_of(model).by_node["n"]
    assert decision.mode is Mode.STORAGE
    assert decision.reason.endswith("the type of its data is unknown")


def test_an_operator_of_another_domain_is_another_operator(build, plan_of) -> None:
    model = build("(float[1,8,4,4] x) => (float[1,8,4,4] y) { [n] y = Conv(x, w) }", w=(8, 8, 3, 3))
    model.graph.node[0].domain = "mine"
    model.opset_import.add(domain="mine", version=1)
    decision = plan_of(model).by_node["n"]
    assert (decision.mode, decision.reason) == (Mode.FLOAT, "Conv has no integer kernel on onnxruntime-cpu")


def test_the_longest_sum_that_is_allowed_fits_an_accumulator() -> None:
    assert 255 * 127 * 33_000 < 2**30


def test_data_inputs_leave_out_what_is_omitted(build) -> None:

    text = '(float[1,8,4,4] x) => (float[1,8,8,8] y) { y = Resize <mode = "nearest"> (x, , s) }'
    graph = read_model(build(text, s=np.array([1, 1, 2, 2], np.float32)))
    node = graph.nodes[0]
    for op, expected in (("Resize", ["x"]), ("Add", ["x", "s"]), ("MatMul", ["x"]), ("Nobody", [])):
        node.op = op
        assert [tensor.name for tensor in data_inputs(node)] == expected


def test_a_scalar_has_one_element() -> None:
    assert (volume(()), volume((3, 4)), volume((3, 0))) == (1, 12, 0)


# --- constants that data is added to or multiplied with --------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "constant", "mode"),
    [
        ("Add(a, k)", np.float32(-0.25), Mode.STATIC),
        ("Mul(k, a)", np.full((1, 8, 1, 1), 3, np.float32), Mode.STATIC),
        ("Add(a, k)", np.ones((1, 8, 4, 4), np.float32), Mode.STATIC),
        ("Add(a, k)", np.full((1, 8, 4, 4), np.nan, np.float32), Mode.FLOAT),
        ("Concat <axis = 0> (a, k)", np.ones((1, 8, 4, 4), np.float32), Mode.FLOAT),
    ],
)
def test_a_finite_operand_can_be_codes(call: str, constant: np.ndarray, mode: Mode, build, plan_of) -> None:
    around = f"c = Conv(x, w) a = Sigmoid(c) [n] m = {call} b = Sigmoid(m) y = Conv(b, w)"
    plan = plan_of(build(f"(float[1,8,4,4] x) => (float[N,8,4,4] y) {{ {around} }}", w=(8, 8, 1, 1), k=constant))
    assert plan.by_node["n"].mode is mode


def test_an_operand_that_a_caller_may_feed_is_no_code(build, plan_of) -> None:
    text = """(float[1,8,4,4] x, float k) => (float[1,8,4,4] y) {
        a = Conv(x, w) s = Sigmoid(a) [n] b = Add(s, k) y = Conv(b, w)
    }"""
    decision = plan_of(build(text, w=(8, 8, 1, 1), k=np.float32(2))).by_node["n"]
    assert (decision.mode, decision.reason) == (Mode.FLOAT, "Add takes a constant as data")


@pytest.mark.parametrize(("slope", "mode"), [(0.2, Mode.STATIC), (0.0, Mode.FLOAT), (-0.2, Mode.FLOAT)])
def test_a_hard_sigmoid_that_falls_stays_float(slope: float, mode: Mode, build, plan_of) -> None:
    gate = f"HardSigmoid <alpha = {slope}> (a)"
    text = f"(float[1,8,4,4] x) => (float[1,8,4,4] y) {{ a = Conv(x, w) [n] b = {gate} y = Conv(b, w) }}"
    assert plan_of(build(text, w=(8, 8, 1, 1))).by_node["n"].mode is mode


@pytest.mark.parametrize("preset", ["torch-fbgemm"])
def test_a_hard_sigmoid_wants_codes_that_end_where_it_does(preset: str, build, plan_of) -> None:
    text = "(float[1,8,4,4] x) => (float[1,8,4,4] y) { a = Conv(x, w) [n] b = HardSigmoid(a) y = Conv(b, w) }"
    decision = plan_of(build(text, w=(8, 8, 1, 1)), scheme=preset).by_node["n"]
    assert decision.reason == "affine uint8-7bit values do not end where HardSigmoid does"
