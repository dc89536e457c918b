"""Which activations are quantized, which clamps vanish, and which tensors share a scale."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from convolutions import KERNEL, PADS, between_convolutions, groups, modes
from counted_kernels import count_kernels
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, QuantSpec, Rule, Scheme
from onnxq.errors import SchemeError
from onnxq.ir import read_model
from onnxq.numerics.affine import params_from_range
from onnxq.numerics.formats import format_named
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning import activations as islands
from onnxq.planning.activations import NO_KERNEL_IN_FRONT, NOT_QUANTIZED_BEHIND, Groups, check_activation_spec
from onnxq.planning.plan import Demotion
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT


def test_activations_have_ranges_and_no_encoder() -> None:
    target = target_named("onnxruntime-cpu")
    check_activation_spec(QuantSpec("uint8", symmetric=False, method="torch"), target)
    with pytest.raises(SchemeError, match="method 'mine' quantizes weights only"):
        check_activation_spec(QuantSpec("uint8", symmetric=False, method="mine"), target)


def test_only_some_targets_read_activations_of_16_bits() -> None:
    spec = QuantSpec("uint16", symmetric=False)
    check_activation_spec(spec, target_named("qnn"))
    with pytest.raises(SchemeError, match=r"uint16 per tensor have no integer kernel on .*; use int8, uint8 per"):
        check_activation_spec(spec, target_named("tensorrt"))


@pytest.mark.parametrize(
    ("op", "spec", "step", "zero_point"),
    [
        ("Sigmoid", QuantSpec("uint16", symmetric=False), 2**-16, 0),
        ("Sigmoid", QuantSpec("int16", symmetric=False), 2**-15, 0),
        ("Sigmoid", QuantSpec("int16"), 2**-15, 0),
        ("Tanh", QuantSpec("uint16", symmetric=False), 2**-15, 32768),
        ("Tanh", QuantSpec("int16-narrow"), 2**-15, 0),
        ("Tanh", QuantSpec("uint8", symmetric=False), 2 / 255, 127),
    ],
)
def test_qnn_has_binary_scales_behind_sigmoid_and_tanh(
    op: str, spec: QuantSpec, step: float, zero_point: int, build
) -> None:
    text = f"(float[1,3,8,8] x) => (float[1,4,8,8] y) {{ [a] a = Conv(x, w) [b] b = {op}(a) [c] y = Conv(b, v) }}"
    graph = prepare(read_model(build(text, w=(4, 3, 1, 1), v=(4, 4, 1, 1))))
    one = make_plan(graph, Scheme((Rule(STATIC, activation=spec),)), target_named("qnn")).by_tensor["b"]
    assert one.fixed_range is not None
    made = params_from_range(*one.fixed_range, format_named(spec.format), symmetric=spec.symmetric)
    assert float(made.scale) == np.float32(step)
    assert int(made.zero_point if made.zero_point is not None else 0) == zero_point


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
    assert ("b" in plan.observed_tensors) is (expected is None)


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
    assert "k" not in plan.observed_tensors


def test_what_ends_at_one_shares_no_scale_with_what_goes_on(build, plan_of) -> None:
    middle = "[g] p = HardSigmoid(a) [cat] b = Concat <axis = 2> (a, p)"
    plan = plan_of(between_convolutions(build, middle))
    assert groups(plan)["p"] == "p"
    assert groups(plan)["a"] == groups(plan)["b"]


@pytest.mark.parametrize(
    ("target", "middle", "quantized"),
    [
        ("openvino", "[n] b = Tanh(a)", {"x": False, "b": False}),
        ("openvino", "[n] b = Add(a, a)", {"x": False, "a": True, "b": True}),
        ("openvino", f"[n] n = Tanh(a) [m] m = Conv {PADS} (a, w0) [o] b = Sub(m, n)", dict.fromkeys("xab", False)),
        ("onnxruntime-cpu", "[n] b = Tanh(a)", {"x": False, "a": True, "b": False, "y": True}),
    ],
)
def test_a_convolution_gives_floats_to_what_computes_with_them_where_that_costs_nothing(
    target: str, middle: str, quantized: dict[str, bool], build
) -> None:
    graph = prepare(read_model(between_convolutions(build, middle)))
    plan = make_plan(graph, PRESETS["int8"], target_named(target))
    assert {one.tensor: one.every_consumer for one in plan.activations} == quantized
    assert modes(plan)["first"] is modes(plan)["last"] is STATIC


# Which nodes stay integer together, and which clamps vanish.

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
    kept = "onnxruntime-cpu has no integer kernel for Clip, and only clamps that start at 0 can be fused"
    assert plan.by_node["clamp"].reason == ("fused into the QuantizeLinear after first" if vanishes else kept)
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
    assert plan.by_node["clamp"].reason == NOT_QUANTIZED_BEHIND


def test_a_clamp_with_limits_computed_at_run_time_stays(build, plan_of) -> None:
    text = f"""(float[1,8,8,8] x, float hi) => (float[1,8,8,8] y) {{
        [first] a = Conv {PADS} (x, w0) [clamp] b = Clip(a, lo, hi) [last] y = Conv {PADS} (b, w1)
    }}"""
    plan = plan_of(build(text, w0=KERNEL, w1=KERNEL, lo=np.array(0, np.float32)))
    assert plan.by_node["clamp"].mode is FLOAT
    assert plan.by_node["clamp"].reason.startswith("the limits of Clip are computed at run time")


def test_a_clamp_stays_when_others_read_what_is_in_front_of_it(build, plan_of) -> None:
    plan = plan_of(between_convolutions(build, "[clamp] c = Relu(a) [sum] b = Add(a, c)"))
    assert plan.by_node["clamp"].reason == "other nodes also read its input"
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
    assert (clamp.mode, clamp.reason) == (FLOAT, "a symmetric range does not start at 0, where it clamps")


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
    assert plan.by_node["t"].reason == "some of its inputs or all of its consumers are float"


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


PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30)


@given(PAIRS)
def test_groups_are_the_connected_components(pairs: list[tuple[int, int]]) -> None:
    groups = Groups[int]()
    component = {item: {item} for item in range(13)}
    for first, second in pairs:
        groups.join(first, second)
        merged = component[first] | component[second]
        component.update(dict.fromkeys(merged, merged))
    for one in range(13):
        assert groups.find(one) in component[one]
        for other in range(13):
            assert (groups.find(one) == groups.find(other)) == (other in component[one])


@given(PAIRS, st.integers(0, 12), st.integers(0, 12))
def test_the_first_group_keeps_its_representative(pairs: list[tuple[int, int]], first: int, second: int) -> None:
    groups = Groups[int]()
    for pair in pairs:
        groups.join(*pair)
    before = groups.find(first)
    groups.join(first, second)
    assert groups.find(second) == groups.find(first) == before
