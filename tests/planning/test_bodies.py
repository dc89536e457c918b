"""Which nodes of bodies can be integer, and which are left because calibration has seen nothing of them."""

from __future__ import annotations

import numpy as np
import pytest
from observations import evidence
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.planning.obstacles import leave_idle_bodies
from onnxq.planning.plan import Plan
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import TARGETS, Target

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT
W = (32, 32)


def reasons(plan: Plan) -> dict[str, str]:
    """Return the reasons of the nodes that have weights, without what happens to these."""
    return {one.node: one.reason.split(": ", 1)[-1] for one in plan.decisions if one.weights}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[n] u = MatMul(s, w)", "integer kernel"),
        (
            """t = If (c) < then_branch = p () => (float[4,32] q) { [n] q = MatMul(s, w) },
                else_branch = r () => (float[4,32] v) { v = Neg(s) }> u = Neg(t)""",
            "stands in a body of If inside a Scan, where activations are not calibrated",
        ),
        (
            """t = Loop (m, , s) <body = p (int64 i, bool g, float[4,32] q) => (bool h, float[4,32] r) {
                h = Identity(g) [n] r = MatMul(q, w) }> u = Neg(t)""",
            "stands in a body of Loop inside a Scan, where activations are not calibrated",
        ),
        (
            """t = Scan (s, x) <num_scan_inputs = 1, body = p (float[4,32] q, float[4,32] f) => (float[4,32] r) {
                [n] k = MatMul(q, w) r = Add(k, f) }> u = Neg(t)""",
            "integer kernel",
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
    found = evidence({name: np.float32([1, 2] if name in seen else []) for name in plan.taps}, "range")
    idle = leave_idle_bodies(graph, plan, found)
    assert {demotion.reason for demotion in idle.values()} <= {"its body did not run on any sample"}
    again = make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"], idle)
    assert set(again.taps) <= set(plan.taps)
    assert all(name in seen for name in again.taps) or not idle
    return plan, {name: again.by_node[name].mode for name in idle}


def test_bodies_are_planned_like_the_main_graph(model: ModelProto) -> None:
    plan, idle = planned(model, {"x", "a", "e", "h"})
    assert set(plan.taps) == {"x", "a", "e", "h"}
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


def test_empty_tensors_of_the_main_graph_are_no_sign(model: ModelProto) -> None:
    assert planned(model, {"e", "h"})[1] == {}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_bodies_are_integer_on_onnxruntime_only(model: ModelProto, target: Target) -> None:
    plan = make_plan(prepare(read_model(model)), PRESETS["int8"], target)
    runtime = target.name.startswith("onnxruntime")
    expected = f"stands in a body of If, where {target.name} is not known to have integer kernels"
    assert plan.by_node["two"].mode is (STATIC if runtime else STORAGE)
    assert (expected in plan.by_node["two"].reason) is not runtime
