"""Why nodes cannot be integer, cells and bodies included."""

from __future__ import annotations

import numpy as np
import pytest
from observations import statistics
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.obstacles import data_inputs, leave_idle_nodes, volume
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS, Target

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT
MATRIX, KERNEL = {"w": (32, 32)}, {"w": (8, 8, 1, 1)}
ROWS, IMAGE = "(float[4,32] x) => (float[4,32] y)", "(float[1,8,4,4] x) => (float[1,8,H,W] y)"
CELLS = "(float[2,4,8] x) => (float[2,1,4,16] y)"


@pytest.mark.parametrize(
    ("text", "weights", "mode", "reason"),
    [
        (f"{ROWS} {{ [n] y = Tanh(x) }}", {}, FLOAT, "onnxruntime-cpu has no integer kernel for Tanh"),
        ("(float[4,32] x, float[32,8] r) => (float[4,8] y) { [n] y = MatMul(x, r) }", {}, FLOAT,
         "both operands are activations"),
        ("(float[4,4,32] x) => (float[4,4,32] y) { [n] y = MatMul(x, w) }", {"w": (4, 32, 32)}, STORAGE,
         "no integer MatMul kernel takes a weight of rank 3"),
        ("(float[32,4] x) => (float[32,4] y) { [n] y = MatMul(w, x) }", MATRIX, STORAGE,
         "the first input of MatMul is constant"),
        ("(float16[4,32] x) => (float16[4,32] y) { [n] y = MatMul(x, w) }", {"w": np.ones((32, 32), np.float16)},
         STORAGE, "its input is float16, not float32"),
        (ROWS.replace("x)", "x, float[32] b)") + "{ [n] y = Gemm <beta = 0.5> (x, w, b) }", MATRIX, STORAGE,
         "no integer kernel for a Gemm with alpha, beta or transA"),
        (ROWS.replace("x)", "x, float[32] b)") + "{ [n] y = Gemm(x, w, b) }", MATRIX, STORAGE,
         "its bias is computed at run time"),
        *((f"(float[{rows},32] x) => (float[{rows},32] y) {{ [n] y = Gemm(x, w, b) }}", MATRIX | {"b": shape}, STORAGE,
           f"its bias has shape {list(shape)}, not one value for each of 32 channels")
          for rows, shape in ((4, (1,)), (4, (4, 32)), (32, (32, 1)))),
        ("(float[1,33001] x) => (float[1,2] y) { [n] y = MatMul(x, w) }", {"w": (33001, 2)}, STORAGE,
         "sums of 33001 products can overflow an int32 accumulator"),
        ("(float[4,0] x) => (float[4,32] y) { [n] y = MatMul(x, w) }", {"w": np.zeros((0, 32), np.float32)}, FLOAT,
         "its weight is empty"),
        (f"{IMAGE} {{ [n] y = ConvTranspose(x, w) }}", {"w": (8, 8, 3, 3)}, STORAGE,
         "onnxruntime-cpu has no integer kernel for ConvTranspose"),
        ("(int64[4] i) => (float[4,64] y) { [n] y = Gather(w, i) }", {"w": (64, 64)}, STORAGE,
         "the data of Gather is constant"),
        (f"{IMAGE} {{ [c] a = Conv(x, w) [n] b = Add(a, k) [d] y = Conv(b, w) }}",
         KERNEL | {"k": np.full((4, 4), np.inf, np.float32)}, FLOAT, "the data of Add is constant"),
        (f'{IMAGE} {{ [c] a = Conv(x, w) [n] b = Resize <mode = "linear"> (a, , s) [d] y = Conv(b, w) }}',
         KERNEL | {"s": np.array([1, 1, 2, 2], np.float32)}, FLOAT,
         "Resize would interpolate differently on quantized values"),
        (IMAGE.replace("y)", "y, int64[1,8,2,2] i)")
         + "{ [c] a = Conv(x, w) [n] b, i = MaxPool <kernel_shape = [3,3]> (a) [d] y = Conv(b, w) }", KERNEL, FLOAT,
         "no integer kernel for a MaxPool that returns indices"),
        ("(int64[2,4] x) => (int64[8] y) { [n] y = Reshape(x, s) }", {"s": np.array([8])}, FLOAT,
         "its input is int64, not float32"),
        (f"{CELLS} {{ [n] y = LSTM <hidden_size = 16> (x, w, r) }}", {"w": (1, 64, 8), "r": (1, 64, 16)}, STORAGE,
         "standard ONNX has no integer LSTM; with --emit ort, onnxruntime-cpu has a kernel for it"),
        *((f"{CELLS} {{ [n] y = {op} <hidden_size = 16> (x, w, r) }}", {"w": (1, rows, 8), "r": (1, rows, 16)}, STORAGE,
           f"onnxruntime-cpu has no integer kernel for {op}") for op, rows in (("GRU", 48), ("RNN", 16))),
        *((f"(float[4,32] x) => (float y) {{ [n] y = {op}(x, w) }}", {"w": shape}, FLOAT,
           f"no integer kernel takes a weight of rank {len(shape)}")
          for op in ("Conv", "Gemm", "MatMul") for shape in ((), (32,))),
        (f"{ROWS} {{ [c] a = mine.Celu(x) [n] y = MatMul(a, w) }}", MATRIX, STORAGE,
         "the type of its input is unknown"),
        (f"{IMAGE} {{ [n] y = mine.Conv(x, w) }}", {"w": (8, 8, 3, 3)}, FLOAT,
         "onnxruntime-cpu has no integer kernel for Conv"),
        ("(float[1,8,4,4] x, float k) => (float[1,8,4,4] y) "
         "{ a = Conv(x, w) s = Sigmoid(a) [n] b = Add(s, k) y = Conv(b, w) }", KERNEL | {"k": np.float32(2)}, FLOAT,
         "the data of Add is constant"),
    ],
)  # fmt: skip
def test_what_stays_out_of_integer_arithmetic_says_why(
    text: str, weights, mode: Mode, reason: str, build, plan_of
) -> None:
    decision = plan_of(build(text, domains='"mine" : 1', **weights)).by_node["n"]
    assert decision.mode is mode
    assert decision.reason.endswith(reason)


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
        # A gate that does not rise.
        ("HardSigmoid <alpha = 0.2> (a)", np.float32(0), Mode.STATIC),
        ("HardSigmoid <alpha = 0.0> (a)", np.float32(0), Mode.FLOAT),
        ("HardSigmoid <alpha = -0.2> (a)", np.float32(0), Mode.FLOAT),
    ],
)
def test_a_finite_operand_and_a_gate_that_rises_can_be_codes(
    call: str, constant: np.ndarray, mode: Mode, build, plan_of
) -> None:
    around = f"c = Conv(x, w) a = Sigmoid(c) [n] m = {call} b = Sigmoid(m) y = Conv(b, w)"
    plan = plan_of(build(f"(float[1,8,4,4] x) => (float[N,8,4,4] y) {{ {around} }}", w=(8, 8, 1, 1), k=constant))
    assert plan.by_node["n"].mode is mode


def test_a_hard_sigmoid_wants_codes_that_end_where_it_does(build, plan_of) -> None:
    text = "(float[1,8,4,4] x) => (float[1,8,4,4] y) { a = Conv(x, w) [n] b = HardSigmoid(a) y = Conv(b, w) }"
    decision = plan_of(build(text, w=(8, 8, 1, 1)), scheme="torch-fbgemm").by_node["n"]
    assert decision.reason == "affine uint8-7bit values do not end at the limits of HardSigmoid"


# Why a recurrent cell, or a clamp with a slope, cannot run on integers.

# --- cells that only an operator of the runtime's own computes with integers ----------------------------------------

CELL = "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }"
SIXTEEN_BITS = {name: np.ones((1, 64, size), np.float16) for name, size in (("w", 8), ("r", 16))}


def cell_decision(model: ModelProto, target: str = "onnxruntime-cpu") -> Decision:
    graph = prepare(read_model(model))
    return make_plan(graph, PRESETS["int8"], TARGETS[target], emit=AllowedOps.ORT).by_node["n"]


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_an_lstm_is_stored_for_a_target_without_such_an_operator(build, target: str) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), target)
    assert decision.mode is Mode.STORAGE
    assert decision.reason.endswith(f"{target} has no integer kernel for LSTM")


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        (CELL.replace("x)", "x, float[1,64,16] r)", 1), {"w": (1, 64, 8)}, "its weight is computed at run time"),
        (CELL.replace("float", "float16"), SIXTEEN_BITS, "its weight is float16, not float32"),
        (CELL.replace("= 16", "= 16, layout = 1"), {"w": (1, 64, 8), "r": (1, 64, 16)},
         "onnxruntime-cpu has no dynamic integer kernel for LSTM with the batch first"),
        (CELL.replace("2,4,8", "1,1,66001").replace("2,1,4,16", "1,1,1,1").replace("= 16", "= 1"),
         {"w": (1, 4, 66001), "r": (1, 4, 1)}, "sums of 66001 products can overflow an int32 accumulator"),
        (CELL.replace("x, w", "x, e").replace("2,4,8", "2,4,0"),
         {"e": np.ones((1, 64, 0), np.float32), "r": (1, 64, 16)},
         "no dynamic integer kernel takes a weight of shape [1, 64, 0]"),
    ],
)  # fmt: skip
def test_an_lstm_that_the_kernel_does_not_know_says_why(build, text: str, weights, reason: str) -> None:
    decision = cell_decision(build(text, **weights))
    assert decision.mode is Mode.STORAGE
    assert decision.reason.endswith(reason)


# Which nodes of bodies can be integer, and which are left because calibration has seen nothing of them.

W = (32, 32)


def reasons(plan: Plan) -> dict[str, str]:
    """Return the reasons of the nodes that have weights, without what happens to these."""
    return {one.node: one.reason.split(": ", 1)[-1] for one in plan.decisions if one.weights}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[n] u = MatMul(s, w)", "has an integer kernel"),
        (
            """t = If (c) < then_branch = p () => (float[4,32] q) { [n] q = MatMul(s, w) },
                else_branch = r () => (float[4,32] v) { v = Neg(s) }> u = Neg(t)""",
            "in a subgraph of If inside a Scan, where activations are not calibrated",
        ),
        (
            """t = Loop (m, , s) <body = p (int64 i, bool g, float[4,32] q) => (bool h, float[4,32] r) {
                h = Identity(g) [n] r = MatMul(q, w) }> u = Neg(t)""",
            "in a subgraph of Loop inside a Scan, where activations are not calibrated",
        ),
        (
            """t = Scan (s, x) <num_scan_inputs = 1, body = p (float[4,32] q, float[4,32] f) => (float[4,32] r) {
                [n] k = MatMul(q, w) r = Add(k, f) }> u = Neg(t)""",
            "has an integer kernel",
        ),
    ],
)
def test_what_steps_of_a_scan_may_leave_out_is_not_integer(text: str, reason: str, build, plan_of) -> None:
    model = build(
        f"""(float[4,32] a, float[5,4,32] x, bool c, int64 m) => (float[4,32] y) {{
            y = Scan (a, x) <num_scan_inputs = 1, body = b (float[4,32] s, float[4,32] e) => (float[4,32] u) {{
                {text}
            }}>
        }}""",
        w=W,
    )
    assert reasons(plan_of(model))["n"] == reason


TWO_BRANCHES = """(float[4,32] x, bool c, bool d) => (float[4,32] y) {
    [outer] a = MatMul(x, w)
    y = If (c) <
        then_branch = t () => (float[4,32] u) {
            [one] b = MatMul(a, w) [relu] e = Relu(b) [two] f = Gemm(e, w)
            u = If (d) <
                then_branch = p () => (float[4,32] q) { [deep] q = MatMul(a, w) },
                else_branch = r () => (float[4,32] s) { s = Neg(f) }>
        },
        else_branch = v () => (float[4,32] z) { [three] g = MatMul(a, w) h = Neg(g) [four] z = MatMul(h, w) }>
}"""


@pytest.fixture
def model(build) -> ModelProto:
    return build(TWO_BRANCHES, w=W)


def planned(model: ModelProto, seen: set[str]) -> tuple[Plan, dict[str, Mode]]:
    """Return the plan, and the modes that idle nodes get when calibration saw these tensors."""
    graph = prepare(read_model(model))
    plan = make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    found = statistics({name: np.float32([1, 2] if name in seen else []) for name in plan.observed_tensors}, "range")
    idle = leave_idle_nodes(graph, plan, found)
    reasons = {"its subgraph ran on no sample", "no sample reached it"}
    assert {demotion.reason for demotion in idle.values()} <= reasons
    again = make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"], idle)
    assert set(again.observed_tensors) <= set(plan.observed_tensors)
    assert all(name in seen for name in again.observed_tensors) or not idle
    return plan, {name: again.by_node[name].mode for name in idle}


def test_bodies_are_planned_like_the_main_graph(model: ModelProto) -> None:
    plan, idle = planned(model, {"x", "a", "e", "h"})
    assert set(plan.observed_tensors) == {"x", "a", "e", "h"}
    assert {one.node: one.mode for one in plan.decisions if one.mode is STATIC}.keys() == {
        "outer", "one", "relu", "two", "deep", "three", "four"
    }  # fmt: skip
    assert idle == {}


def test_all_static_nodes_of_a_body_that_never_ran_are_left(model: ModelProto) -> None:
    assert planned(model, {"x", "a", "e"})[1] == {"three": STORAGE, "four": STORAGE}


def test_what_stands_inside_a_body_that_never_ran_never_ran(model: ModelProto) -> None:
    found = planned(model, {"x", "a", "h"})[1]
    assert found == {"one": STORAGE, "relu": FLOAT, "two": STORAGE, "deep": STORAGE}


def test_a_body_in_which_nothing_is_calibrated_is_not_asked(build) -> None:
    text = TWO_BRANCHES.replace("h = Neg(g)", "h = Tanh(g)")
    plan, idle = planned(build(text, w=W), {"x", "a", "e"})
    assert (plan.by_node["four"].mode, idle) == (STATIC, {})


def test_nodes_that_no_element_reached_are_left(model: ModelProto) -> None:
    assert planned(model, {"a", "e", "h"})[1] == {"outer": STORAGE}
    assert planned(model, {"x", "e", "h"})[1].keys() == {"outer", "one", "three", "deep"}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_bodies_are_integer_on_onnxruntime_only(model: ModelProto, target: Target) -> None:
    plan = make_plan(prepare(read_model(model)), PRESETS["int8"], target)
    runtime = target.name.startswith("onnxruntime")
    expected = f"in a subgraph of If, where {target.name} is not known to have integer kernels"
    assert plan.by_node["two"].mode is (STATIC if runtime else STORAGE)
    assert (expected in plan.by_node["two"].reason) is not runtime
