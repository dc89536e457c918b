"""Which nodes stay integer together, and which clamps vanish."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from convolutions import KERNEL, PADS, between_convolutions, groups, modes
from onnx import ModelProto, TensorProto, helper

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, QuantSpec, Rule, Scheme
from onnxq.evaluation.verification import count_kernels
from onnxq.planning import activations as islands
from onnxq.planning.activations import NO_CODES_BEHIND, NO_KERNEL_IN_FRONT
from onnxq.planning.plan import Demotion

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT


@pytest.mark.parametrize(
    ("clamp", "limits", "vanishes"),
    [
        ("Relu(a)", {}, True),
        ("Clip(a, lo, hi)", {"lo": 0, "hi": 6}, True),
        ("Clip(a, lo)", {"lo": 0}, True),
        ("Clip(a, lo, hi)", {"lo": -1, "hi": 1}, False),
        ("Clip(a, lo, hi)", {"lo": 1, "hi": 6}, False),
        ("Clip(a, , hi)", {"hi": 6}, False),
    ],
)
def test_only_a_clamp_that_starts_at_zero_vanishes(
    clamp: str, limits: dict[str, float], vanishes: bool, build, plan_of
) -> None:
    constants = {name: np.array(value, np.float32) for name, value in limits.items()}
    plan = plan_of(between_convolutions(build, f"[clamp] b = {clamp}", **constants))
    kept = "Clip has no integer kernel on onnxruntime-cpu, and no quantized range stands for its limits"
    assert plan.by_node["clamp"].reason == ("vanishes into the quantizer behind first" if vanishes else kept)
    assert ("a" in groups(plan)) is not vanishes


@pytest.mark.parametrize("clamp", ["Relu(a)", "Clip(a, lo, hi)"])
def test_a_clamp_stays_because_the_node_in_front_of_it_does(clamp: str, build, plan_of) -> None:
    limits = {"lo": np.float32(0), "hi": np.float32(6)} if "lo" in clamp else {}
    model = between_convolutions(build, f"[clamp] b = {clamp}", **limits)
    scheme = PRESETS["int8"].excluding("first")
    reasons = {name: one.reason for name, one in plan_of(model, scheme=scheme).by_node.items()}
    assert reasons["first"] == "it is excluded"
    assert reasons["clamp"] == NO_KERNEL_IN_FRONT
    behind = {"first": Demotion(FLOAT, "it hurts")}
    assert plan_of(model, demotions=behind).by_node["clamp"].reason == NO_KERNEL_IN_FRONT


def test_a_clamp_stays_because_nothing_behind_it_reads_codes(build, plan_of) -> None:
    text = "(float[4,64] x) => (float[4,64] y) { [product] a = MatMul(x, w) [clamp] b = Relu(a) [last] y = Tanh(b) }"
    plan = plan_of(build(text, w=(64, 64)))
    assert modes(plan) == {"product": STATIC, "clamp": FLOAT, "last": FLOAT}
    assert plan.by_node["clamp"].reason == NO_CODES_BEHIND


def test_a_clamp_with_limits_computed_at_run_time_stays(build, plan_of) -> None:
    text = f"""(float[1,8,8,8] x, float hi) => (float[1,8,8,8] y) {{
        [first] a = Conv {PADS} (x, w0) [clamp] b = Clip(a, lo, hi) [last] y = Conv {PADS} (b, w1)
    }}"""
    plan = plan_of(build(text, w0=KERNEL, w1=KERNEL, lo=np.array(0, np.float32)))
    assert plan.by_node["clamp"].mode is FLOAT
    assert plan.by_node["clamp"].reason.startswith("the limits of Clip are computed at run time")


def test_a_clamp_stays_when_others_read_what_is_in_front_of_it(build, plan_of) -> None:
    plan = plan_of(between_convolutions(build, "[clamp] c = Relu(a) [sum] b = Add(a, c)"))
    assert plan.by_node["clamp"].reason == "others read what it clamps"
    assert modes(plan)["sum"] is FLOAT
    assert "a" in groups(plan)


def test_a_clamp_stays_when_the_graph_returns_what_is_in_front_of_it(build, plan_of) -> None:
    text = (
        f"(float[1,8,8,8] x) => (float[1,8,8,8] a, float[1,8,8,8] b) {{ [c] a = Conv {PADS} (x, w) [r] b = Relu(a) }}"
    )
    assert modes(plan_of(build(text, w=KERNEL))) == {"c": STATIC, "r": FLOAT}


def test_symmetric_activations_keep_their_clamps(build, plan_of) -> None:
    scheme = Scheme((Rule(STATIC, activation=QuantSpec("int8", symmetric=True)),))
    clamp = plan_of(between_convolutions(build, "[clamp] b = Relu(a)"), scheme=scheme).by_node["clamp"]
    assert (clamp.mode, clamp.reason) == (FLOAT, "a symmetric range does not begin where it clamps")


@pytest.mark.parametrize(
    ("text", "floats"),
    [
        ("[c] a = Conv(x, w) [add] y = Add(a, a)", {"add"}),
        ("[pool] a = MaxPool <kernel_shape = [1,1]> (x) [c] y = Conv(a, w)", {"pool"}),
        ("[c] a = Conv(x, w) [t] b = Tanh(a) [add] d = Add(a, b) [e] y = Conv(d, w)", {"t", "add"}),
        (
            "[c] a = Conv(x, w) [p] b = MaxPool <kernel_shape = [1,1]> (a) [s] d = Sigmoid(b) [t] y = Tanh(d)",
            {"p", "s", "t"},
        ),
        ("[c] a = Conv(x, w) [k] b = Tanh(a) [m] m = Mul(b, a) [e] y = Conv(m, w)", {"k", "m"}),
    ],
)
def test_companions_of_float_nodes_stay_in_float(
    text: str, floats: set[str], build, plan_of, quantize_to, lonely_pairs, tmp_path: Path
) -> None:
    model = build(f"(float[1,8,8,8] x) => (float[1,8,8,8] y) {{ {text} }}", w=(8, 8, 1, 1))
    plan = plan_of(model)
    assert {name for name, mode in modes(plan).items() if mode is FLOAT} == floats
    assert all(decision.reason for decision in plan.decisions)
    quantize_to(model, tmp_path / "q.onnx")
    assert lonely_pairs(tmp_path / "q.onnx") == []
    assert count_kernels(tmp_path / "q.onnx").heavy_float == 0


def test_a_carrier_behind_a_matrix_product_stays_in_float(build, plan_of) -> None:
    text = "(float[4,32] x) => (float[32,16] y) { [m] a = MatMul(x, w0) [t] b = Reshape(a, s) [n] y = MatMul(b, w1) }"
    plan = plan_of(build(text, w0=(32, 32), w1=(4, 16), s=np.array([32, 4])))
    assert modes(plan) == {"m": STATIC, "t": FLOAT, "n": STATIC}
    assert plan.by_node["t"].reason == "integer nodes do not stand both before and behind it"


def chain(count: int) -> ModelProto:
    """Return ``count`` pooling nodes behind a convolution, which nothing integer follows."""
    names = ["c", *(f"t{index}" for index in range(count))]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv")]
    nodes += [helper.make_node("MaxPool", [one], [other], other, kernel_shape=[1, 1]) for one, other in pairwise(names)]
    value = helper.make_tensor_value_info
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1, 1, 1, 1], [1.0])
    graph = helper.make_graph(
        nodes,
        "chain",
        [value("x", TensorProto.FLOAT, [1, 1, 2, 2])],
        [value(names[-1], TensorProto.FLOAT, None)],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_chain_that_falls_like_dominoes_takes_a_linear_number_of_steps(plan_of, monkeypatch) -> None:
    steps = Counter()
    original = islands._before

    def counted(node, absorbed):
        steps["before"] += 1
        return original(node, absorbed)

    monkeypatch.setattr(islands, "_before", counted)
    found = []
    for count in (500, 2_000):
        steps.clear()
        plan = plan_of(chain(count))
        assert plan.count(FLOAT) == count
        found.append(steps["before"])
    assert found[0] >= 500
    assert found[1] <= 4 * found[0] + 8


# --- bodies ---------------------------------------------------------------------------------------------------------


def test_codes_pass_into_bodies_and_a_clamp_there_does_not_vanish_into_what_stands_outside(build, plan_of) -> None:
    text = f"""(float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {{
        [first] a = Conv {PADS} (x, w0) [flip] b = Transpose <perm = [0,1,3,2]> (a) [second] d = Conv {PADS} (x, w2)
        [choice] y = If (c) <
            then_branch = t () => (float[1,8,8,8] u) {{
                [pool] e = MaxPool <kernel_shape = [1,1]> (b) [inner] u = Conv {PADS} (e, w1)
            }},
            else_branch = e () => (float[1,8,8,8] v) {{ [relu] f = Relu(d) [other] v = Conv {PADS} (f, w1) }}>
    }}"""
    plan = plan_of(build(text, w0=KERNEL, w1=KERNEL, w2=(8, 8, 3, 3)))
    assert modes(plan) == {
        "first": STATIC, "flip": STATIC, "second": STATIC, "choice": FLOAT,
        "pool": STATIC, "inner": STATIC, "relu": FLOAT, "other": STATIC,
    }  # fmt: skip
    assert groups(plan) == {"x": "x", "a": "a", "b": "a", "e": "a", "d": "d", "u": "u", "f": "f", "v": "v"}


def test_codes_do_not_pass_through_what_a_loop_carries(build, plan_of) -> None:
    text = f"""(float[1,8,8,8] x, int64 n) => (float[1,8,8,8] y) {{
        [first] a = Conv {PADS} (x, w0)
        y = Loop (n, , a) <body = b (int64 i, bool g, float[1,8,8,8] s) => (bool h, float[1,8,8,8] t) {{
            h = Identity(g) [flip] b = Transpose <perm = [0,1,3,2]> (s) [inner] t = Conv {PADS} (b, w1)
        }}>
    }}"""
    plan = plan_of(build(text, w0=KERNEL, w1=KERNEL))
    assert (modes(plan)["flip"], modes(plan)["inner"]) == (FLOAT, STATIC)
