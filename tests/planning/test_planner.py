"""Decisions and their reasons on small models, and that onnxruntime runs what the plan promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convolutions import between_convolutions, groups, modes
from counted_kernels import count_kernels
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.errors import SchemeError
from onnxq.ir import read_model, to_model
from onnxq.lowering import AllowedOps
from onnxq.numerics.pairs import Pairs
from onnxq.ops import OPERATORS, Role
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning import planner
from onnxq.planning.plan import EXCLUDED, Decision, Demotion, Mean, Plan, Weight
from onnxq.planning.weights import needed_opset
from onnxq.runtime.targets import TARGETS

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT
BETWEEN = "computes in float between quantized activations"


# --- whole networks -------------------------------------------------------------------------------------------------


def test_a_residual_block_is_integer_throughout(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual)
    assert set(modes(plan).values()) == {STATIC}
    assert [activation.tensor for activation in plan.activations] == ["x", "b", "d", "e", "g", "y"]
    assert plan.observed_tensors == ("x", "b", "d", "e", "g", "y")
    assert plan.left_in_float() == ()


def test_a_decision_names_what_becomes_codes(residual: ModelProto, plan_of) -> None:
    decision = plan_of(residual).by_node["stem"]
    assert (decision.op_type, decision.reason, decision.bias, decision.data) == (
        "Conv",
        "has an integer kernel",
        2,
        "x",
    )
    (weight,) = decision.weights
    assert (weight.index, weight.tensor, weight.axis) == (1, "w0", 0)
    assert weight.spec == QuantSpec("int8-narrow", Granularity.CHANNEL)
    assert plan_of(residual).by_node["right"].bias is None


@pytest.mark.parametrize(
    ("preset", "target", "reason"),
    [
        ("int4-int8-data", "onnxruntime-cpu", f"{BETWEEN}: onnxruntime-cpu dequantizes int4-narrow weights "),
        ("int4-int8-data", "qnn", "has an integer kernel"),
        (
            "int8-int16-data",
            "onnxruntime-cpu",
            f"{BETWEEN}: onnxruntime-cpu dequantizes uint16 activations in each run",
        ),
        ("int8-int16-data", "qnn", "has an integer kernel"),
    ],
)
def test_a_decision_says_what_computes_with_other_formats_than_int8(
    preset: str, target: str, reason: str, residual: ModelProto
) -> None:
    plan = planner.make_plan(prepare(read_model(residual)), PRESETS[preset], TARGETS[target])
    for name in ("stem", "sum") if "16" in preset else ("stem",):
        assert plan.by_node[name].mode is STATIC
        assert plan.by_node[name].reason.startswith(reason)


def test_wide_activations_stand_where_bytes_do_and_their_products_are_not_added_in_pairs(residual: ModelProto) -> None:
    graph = prepare(read_model(residual))
    wide, plain = (planner.make_plan(graph, PRESETS[one], TARGETS["qnn"]) for one in ("int8-int16-data", "int8"))
    assert [one.tensor for one in wide.activations] == [one.tensor for one in plain.activations]
    assert {one.spec.format for one in wide.activations} == {"uint16"}
    assert {one.pairs for decision in wide.decisions for one in decision.weights} == {Pairs.NONE}
    assert {one.pairs for decision in plain.decisions for one in decision.weights} != {Pairs.NONE}
    assert (needed_opset(wide, AllowedOps.QDQ), needed_opset(plain, AllowedOps.QDQ)) == (21, 13)


TABLE = "(int64[3] x) => (float[3,8] y) { [rows] h = Gather(table, x) n = Tanh(h) y = MatMul(n, w) }"
LARGE, SMALL = ({"table": (rows, 256), "w": (256, 8)} for rows in (4096, 64))
UP = """(float[1,8,8,8] x) => (float[1,4,16,16] y) {
    [first] a = Conv(x, w0) [up] b = ConvTranspose <strides = [2,2]> (a, w1) y = Sigmoid(b) }"""
UP_WEIGHTS = {"w0": (8, 8, 1, 1), "w1": (8, 4, 2, 2)}
CELLS = """(int64[5,2] i) => (float[5,1,2,16] y, float[1,2,16] h) {
    [embed] e = Gather(table, i) [gru] y, h = GRU <hidden_size = 16> (e, w, r) }"""
SIXTEEN_BITS = "(float16[4,32] x) => (float16[4,32] y) { [n] y = MatMul(x, w) }"


@pytest.mark.parametrize(
    ("text", "weights", "target", "scheme", "expected", "scaled"),
    [
        # Rows of a large table are looked up as they are stored.
        (TABLE, LARGE, "onnxruntime-cpu", "int8", {"rows": Mode.WEIGHT_ONLY}, None),
        (TABLE, LARGE, "onnxruntime-web", "int8-dynamic", {"rows": Mode.WEIGHT_ONLY}, None),
        (TABLE, SMALL, "onnxruntime-cpu", "int8", {"rows": STORAGE}, None),
        (TABLE, LARGE, "onnxruntime-cpu", "int8-storage", {"rows": STORAGE}, None),
        (TABLE, LARGE, "openvino", "int8", {"rows": Mode.WEIGHT_ONLY}, None),
        (TABLE, LARGE, "tensorrt", "int8", {"rows": STORAGE}, None),
        # A transposed convolution is integers where the runtime has a kernel.
        (UP, UP_WEIGHTS, "onnxruntime-cpu", "int8", {"up": FLOAT}, None),
        (UP, UP_WEIGHTS, "openvino", "int8", {"up": STATIC}, None),
        # Recurrent and embedding weights are stored, and so are those of float16.
        (CELLS, {"table": (40, 8), "w": (1, 48, 8), "r": (1, 48, 16)}, "onnxruntime-cpu", "int8",
         {"embed": STORAGE, "gru": STORAGE}, ()),
        (SIXTEEN_BITS, {"w": np.ones((32, 32), np.float16)}, "onnxruntime-cpu", "int8", {"n": STORAGE}, None),
        # Small weights do not pay.
        *((f"(float[2,4,8] x) => (float[2,4,{columns}] y) {{ [n] y = MatMul(x, w) }}", {"w": (2, 8, columns)},
           "onnxruntime-cpu", "int8", {"n": mode}, None) for columns, mode in ((15, FLOAT), (16, STORAGE))),
        # A matrix product gives floats to float nodes.
        ("(float[4,32] x) => (float[4,16] y) { [g] a = MatMul(x, w0) [t] b = Tanh(a) [h] y = Gemm(b, w1) }",
         {"w0": (32, 32), "w1": (32, 16)}, "onnxruntime-cpu", "int8", {"g": STATIC, "t": FLOAT, "h": STATIC},
         ("x", "b")),
    ],
)  # fmt: skip
def test_nodes_become_what_a_target_has_kernels_for(
    text: str, weights, target: str, scheme: str, expected: dict[str, Mode], scaled: tuple[str, ...] | None, build
) -> None:
    plan = planner.make_plan(prepare(read_model(build(text, **weights))), PRESETS[scheme], TARGETS[target])
    assert {name: plan.by_node[name].mode for name in expected} == expected
    assert scaled is None or tuple(activation.tensor for activation in plan.activations) == scaled


def test_the_stem_reads_a_quantized_graph_input(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual)
    first = plan.activations[0]
    assert (first.tensor, first.group, first.every_consumer) == ("x", "x", False)
    assert first.spec == QuantSpec("uint8", symmetric=False)


def test_a_bias_behind_a_product_is_said_to_be_one(build, plan_of) -> None:
    text = "(float[2,4,32] x) => (float[2,4,8] y) { [p] a = MatMul(x, w) [bias] b = Add(a, k) y = Neg(b) }"
    decision = plan_of(build(text, w=(32, 8), k=(8,))).by_node["bias"]
    assert (decision.mode, decision.reason) == (
        FLOAT,
        "adds a bias, fused into the integer kernel before it where possible",
    )


# --- kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual", "perceptron"])
def test_static_nodes_run_as_integer_kernels_without_lonely_pairs(
    name: str, request, plan_of, quantize_to, lonely_pairs, tmp_path: Path
) -> None:
    model = request.getfixturevalue(name)
    heavy = [one for one in plan_of(model).decisions if one.op_type in ("Conv", "MatMul", "Gemm")]
    assert all(one.mode is STATIC for one in heavy)
    quantize_to(model, tmp_path / "q.onnx")
    kernels = count_kernels(tmp_path / "q.onnx")
    assert kernels.heavy_float == 0
    assert kernels.integer >= len(heavy)
    assert lonely_pairs(tmp_path / "q.onnx") == []


# --- wishes ---------------------------------------------------------------------------------------------------------


def test_demoted_nodes_store_their_weights_and_say_why(build, plan_of) -> None:
    model = between_convolutions(build, "[n] b = Relu(a)")
    plan = plan_of(model, demotions={"first": Demotion(STORAGE, "alone it leaves 3.0 dB")})
    assert modes(plan) == {"first": STORAGE, "n": FLOAT, "last": STATIC}
    assert (
        plan.by_node["first"].reason
        == "computes in float, int8-narrow weights dequantized at load: alone it leaves 3.0 dB"
    )
    assert groups(plan) == {"b": "b", "y": "y"}


@pytest.mark.parametrize("scheme", ["int8", "int8-storage"])
def test_nodes_demoted_to_float_keep_their_weights(scheme: str, residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme=scheme, demotions={"left": Demotion(FLOAT, "it hurts")})
    assert plan.by_node["left"] == Decision("left", "Conv", FLOAT, "it hurts")
    assert plan.by_node["right"].mode is (STATIC if scheme == "int8" else STORAGE)


def test_demoting_what_the_scheme_leaves_in_float_changes_nothing(residual: ModelProto, plan_of) -> None:
    scheme = Scheme((Rule(FLOAT, nodes=("left",)), Rule(STATIC)), name="mine")
    plan = plan_of(residual, scheme=scheme)
    assert plan == plan_of(residual, scheme=scheme, demotions={"left": Demotion(STORAGE, "measured")})
    assert plan.by_node["left"].reason == "scheme mine requests float"
    assert plan.scheme == "mine"


@pytest.mark.parametrize("preset", ["int8", "int8-storage"])
def test_excluded_nodes_say_so(preset: str, residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme=PRESETS[preset].excluding("left").excluding("ri*"))
    assert [plan.by_node[node].reason == EXCLUDED for node in ("left", "right", "stem")] == [True, True, False]


def test_a_storage_scheme_plans_no_activations(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme="int8-storage")
    assert plan.activations == plan.observed_tensors == ()
    assert {mode for name, mode in modes(plan).items() if plan.by_node[name].op_type == "Conv"} == {STORAGE}
    assert plan.by_node["stem"].reason.endswith("scheme int8-storage requests storage")


def test_rules_choose_specs_by_node(residual: ModelProto, plan_of) -> None:
    per_tensor = Rule(STATIC, nodes=("l*",), weight=QuantSpec("int8-7bit"))
    plan = plan_of(residual, scheme=Scheme((per_tensor, Rule(STATIC))))
    formats = {one.node: one.weights[0].spec.format for one in plan.decisions if one.weights}
    assert formats == {"stem": "int8-narrow", "left": "int8-7bit", "right": "int8-narrow", "last": "int8-7bit"}


def test_rules_may_select_by_tensor(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme=Scheme((Rule(FLOAT, tensors=("w2",)), Rule(STATIC))))
    assert modes(plan)["right"] is FLOAT
    assert modes(plan)["sum"] is FLOAT


ACTIVATIONS = "have no integer kernel on onnxruntime-cpu; use int8, uint8, int16, uint16 per tensor"
WEIGHTS = (
    "have no fast integer kernel on onnxruntime-cpu; use symmetric int8 per tensor or channel, or mode weight-only"
)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(STATIC, activation=QuantSpec("int4")), f"activations as int4 per tensor {ACTIVATIONS}"),
        (Rule(STATIC, activation=QuantSpec("uint8", Granularity.CHANNEL, symmetric=False)),
         f"activations as uint8 per channel {ACTIVATIONS}"),
        (Rule(STATIC, weight=QuantSpec("uint8", symmetric=False)), f"weights as affine uint8 per tensor {WEIGHTS}"),
        (Rule(STATIC, weight=QuantSpec("int16")), f"weights as symmetric int16 per tensor {WEIGHTS}"),
        (Rule(STATIC, nodes=("stemm",)), "node pattern 'stemm' matches nothing in the model; did you mean 'stem'?"),
    ],
)  # fmt: skip
def test_wishes_that_no_kernel_fulfils_are_errors(rule: Rule, message: str, residual: ModelProto, plan_of) -> None:
    with pytest.raises(SchemeError) as caught:
        plan_of(residual, scheme=Scheme((rule,)))
    assert str(caught.value) == message


FUSED = "(float[4,32] x) => (float[4,16] y) { [m] a = MatMul(x, w) [n] b = Add(a, c) [t] y = Tanh(b) }"


@pytest.mark.parametrize("named", [{"nodes": ("m",)}, {"nodes": ("n",)}, {"op_types": ("MatMul",)}])
def test_a_rule_selects_what_became_of_the_nodes_that_it_names(named: dict, build, plan_of) -> None:
    model = build(FUSED, w=(32, 16), c=(16,))
    plan = plan_of(model, scheme=Scheme((Rule(STATIC, **named),)))
    assert modes(plan) == {"m": STATIC, "t": FLOAT}
    assert plan.by_node["m"].op_type == "Gemm"
    plan = plan_of(model, scheme=Scheme((Rule(FLOAT, **named), Rule(STATIC))))
    assert modes(plan) == {"m": FLOAT, "t": FLOAT}


def test_a_product_that_adds_its_bias_is_no_sum(build, plan_of) -> None:
    plan = plan_of(build(FUSED, w=(32, 16), c=(16,)), scheme=Scheme((Rule(FLOAT, op_types=("Add",)), Rule(STATIC))))
    assert modes(plan)["m"] is STATIC


# --- bodies, and size -----------------------------------------------------------------------------------------------


def test_nodes_of_bodies_are_planned_like_any_other(build, plan_of) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
        [first] a = MatMul(x, w)
        [branch] y = If (c) <
            then_branch = t () => (float[4,32] u) { [inner] u = MatMul(a, w) },
            else_branch = e () => (float[4,32] v) { [idle] v = Tanh(a) }>
        }""",
        w=(32, 32),
    )
    plan = plan_of(model)
    assert modes(plan) == {"first": STATIC, "branch": FLOAT, "inner": STATIC, "idle": FLOAT}
    assert (plan.by_node["inner"].data, plan.observed_tensors) == ("a", ("x", "a"))
    assert [one.node for one in plan.decisions] == ["first", "branch", "inner", "idle"]


def test_planning_edits_nothing(residual: ModelProto) -> None:
    graph = prepare(read_model(residual))
    before = to_model(graph).SerializeToString(deterministic=True)
    planner.make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    assert to_model(graph).SerializeToString(deterministic=True) == before


# --- cells that only an operator of the runtime's own computes with integers ----------------------------------------

CELL = "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }"


def cell_decision(
    model: ModelProto,
    mode: Mode = STATIC,
    *,
    emit: AllowedOps = AllowedOps.ORT,
    demotion: Demotion | None = None,
) -> Decision:
    graph = prepare(read_model(model))
    demotions = {"n": demotion} if demotion is not None else {}
    target = TARGETS["onnxruntime-cpu"]
    return planner.make_plan(graph, Scheme((Rule(mode),)), target, demotions, emit).by_node["n"]


@pytest.mark.parametrize(
    ("mode", "why"),
    [(STATIC, "LSTM has no kernel with static scales"), (Mode.DYNAMIC, "scheme custom requests dynamic")],
)
def test_an_lstm_becomes_dynamic_where_an_operator_of_the_runtimes_own_may_be_written(
    build, mode: Mode, why: str
) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), mode)
    assert (decision.mode, decision.data) == (Mode.DYNAMIC, "x")
    assert decision.reason == f"multiplies integers with dynamic scales: {why}"
    spec = QuantSpec("int8-narrow", Granularity.CHANNEL)
    assert decision.weights == (Weight(1, "w", spec, 1, 512, 2, Pairs.TAP), Weight(2, "r", spec, 1, 1024, 2, Pairs.TAP))


@pytest.mark.parametrize(
    ("mode", "emit", "found", "reason"),
    [
        (STORAGE, AllowedOps.ORT, STORAGE, "scheme custom requests storage"),
        (Mode.WEIGHT_ONLY, AllowedOps.ORT, STORAGE, "no kernel of LSTM takes quantized weights"),
        (FLOAT, AllowedOps.ORT, FLOAT, "scheme custom requests float"),
        (STATIC, AllowedOps.QDQ, STORAGE, "with --emit ort, onnxruntime-cpu has a kernel for it"),
        (Mode.DYNAMIC, AllowedOps.QDQ, STORAGE, "with --emit ort, onnxruntime-cpu has a kernel for it"),
    ],
)
def test_an_lstm_that_is_wanted_otherwise_or_may_not_be_written_is_not_dynamic(
    mode: Mode, emit: AllowedOps, found: Mode, reason: str, build
) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), mode, emit=emit)
    assert decision.mode is found
    assert decision.reason.endswith(reason)


def test_a_measured_wish_makes_an_lstm_stored_or_dynamic(build) -> None:
    model = build(CELL, w=(1, 64, 8), r=(1, 64, 16))
    stored = cell_decision(model, demotion=Demotion(STORAGE, "it is slower", "1 ms"))
    assert (stored.mode, stored.figures, len(stored.weights)) == (STORAGE, "1 ms", 2)
    dynamic = cell_decision(model, demotion=Demotion(Mode.DYNAMIC, "it is faster", "2 ms"))
    assert (dynamic.mode, dynamic.figures, dynamic.data) == (Mode.DYNAMIC, "2 ms", "x")
    assert dynamic.reason.endswith(": it is faster")


def test_an_lstm_in_a_body_becomes_dynamic(build) -> None:
    model = build(
        """(float[2,4,8] x, bool c) => (float[2,1,4,16] y) {
        y = If (c) <
            then_branch = t () => (float[2,1,4,16] u) { [n] u = LSTM <hidden_size = 16> (x, w, r) },
            else_branch = e () => (float[2,1,4,16] v) { [m] v = LSTM <hidden_size = 16> (x, w, r) }>
        }""",
        w=(1, 64, 8),
        r=(1, 64, 16),
    )
    assert cell_decision(model).mode is Mode.DYNAMIC


# --- every row of the table of operators ------------------------------------------------------------------------------

# What stands between two convolutions, the decision on the node [n], and constants.
ROWS = {
    "Conv": ("[n] b = Conv(a, k)", STATIC, {"k": (8, 8, 1, 1)}),
    "ConvTranspose": ("[n] b = ConvTranspose(a, k)", STORAGE, {"k": (8, 8, 2, 2)}),
    "Gemm": ("[f] f = Flatten(a) [n] g = Gemm(f, k) [r] b = Reshape(g, s)", STATIC,
             {"k": (512, 8), "s": np.array([1, 8, 1, 1])}),
    "MatMul": ("[n] b = MatMul(a, k)", STATIC, {"k": (8, 8)}),
    **{op: (f"[r] f = Reshape(a, s) [n] g, h = {op} <hidden_size = 8> (f, k, l) [q] b = Reshape(h, t)", STORAGE,
            {"k": (1, rows, 64), "l": (1, rows, 8), "s": np.array([8, 1, 64]), "t": np.array([1, 8, 1, 1])})
       for op, rows in (("LSTM", 32), ("GRU", 24), ("RNN", 8))},
    "Gather": ("[n] b = Gather <axis = 2> (a, k)", STATIC, {"k": np.array([0, 2])}),
    "Add": ("[n] b = Add(a, a)", STATIC, {}),
    "Mul": ("[n] b = Mul(a, a)", STATIC, {}),
    "AveragePool": ("[n] b = AveragePool <kernel_shape = [2,2]> (a)", STATIC, {}),
    **{op: (f"[n] b = {op}(a)", STATIC, {})
       for op in ("GlobalAveragePool", "LeakyRelu", "Sigmoid", "HardSigmoid", "Softmax", "Relu")},
    "Tanh": ("[n] b = Tanh(a)", FLOAT, {}),
    "Concat": ("[n] b = Concat <axis = 2> (a, a)", STATIC, {}),
    "DepthToSpace": ("[n] d = DepthToSpace <blocksize = 2> (a) [c] b = Concat <axis = 1> (d, d, d, d)", STATIC, {}),
    "Expand": ("[n] b = Expand(a, k)", STATIC, {"k": np.array([2, 8, 8, 8])}),
    "Flatten": ("[n] f = Flatten <axis = 2> (a) [c] g = Concat <axis = 0> (f, f) [r] b = Reshape(g, k)", STATIC,
                {"k": np.array([2, 8, 8, 8])}),
    "MaxPool": ("[n] b = MaxPool <kernel_shape = [2,2]> (a)", STATIC, {}),
    "Pad": ('[n] b = Pad <mode = "reflect"> (a, k)', FLOAT, {"k": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
    "ReduceMax": ("[n] b = ReduceMax <axes = [2, 3]> (a)", STATIC, {}),
    "Reshape": ("[n] f = Reshape(a, k) [c] g = Concat <axis = 1> (f, f) [r] b = Reshape(g, l)", STATIC,
                {"k": np.array([8, 64]), "l": np.array([2, 8, 8, 8])}),
    "Resize": ('[n] b = Resize <mode = "nearest"> (a, , k)', STATIC, {"k": np.array([1, 1, 2, 2], np.float32)}),
    "Slice": ("[n] b = Slice(a, k, l, l)", STATIC, {"k": np.array([0]), "l": np.array([2])}),
    "SpaceToDepth": ("[n] d = SpaceToDepth <blocksize = 2> (a) [s] b = DepthToSpace <blocksize = 2> (d)", FLOAT, {}),
    "Split": ("[n] p, q = Split <axis = 1> (a, k) [c] b = Concat <axis = 1> (q, p)", STATIC, {"k": np.array([4, 4])}),
    "Squeeze": ("[u] u = Unsqueeze(a, k) [c] v = Concat <axis = 0> (u, u) [n] b = Squeeze(v, k)", STATIC,
                {"k": np.array([1])}),
    "Tile": ("[n] b = Tile(a, k)", STATIC, {"k": np.array([1, 1, 2, 2])}),
    "Transpose": ("[n] b = Transpose <perm = [0,1,3,2]> (a)", STATIC, {}),
    "Unsqueeze": ("[n] u = Unsqueeze(a, k) [c] v = Concat <axis = 0> (u, u) [s] b = Squeeze(v, k)", STATIC,
                  {"k": np.array([1])}),
    "Clip": ("[n] b = Clip(a, k, l)", STATIC, {"k": np.array(0, np.float32), "l": np.array(6, np.float32)}),
}  # fmt: skip


def test_the_rows_are_those_of_the_table() -> None:
    planned = {op for (domain, op), row in OPERATORS.items() if not domain and row.role is not Role.FLOAT}
    assert set(ROWS) == planned


@pytest.mark.parametrize("op", list(ROWS))
def test_each_operator_between_convolutions_is_decided(
    op: str, build, plan_of, quantize_to, lonely_pairs, tmp_path: Path
) -> None:
    middle, mode, weights = ROWS[op]
    model = between_convolutions(build, middle, **weights)
    plan = plan_of(model)
    assert plan.by_node["n"].mode is mode
    assert plan.by_node["n"].op_type == op
    assert plan.by_node["first"].mode is plan.by_node["last"].mode is STATIC
    assert all(decision.reason for decision in plan.decisions)
    quantize_to(model, tmp_path / "q.onnx")
    assert lonely_pairs(tmp_path / "q.onnx") == []
    assert count_kernels(tmp_path / "q.onnx").heavy_float == int(op == "ConvTranspose")


# Which nodes have a bias that can make up for rounded weights.

WEIGHT = np.linspace(-1, 1, 32 * 32, dtype=np.float32).reshape(32, 32)
BIAS = np.ones(32, np.float32)
KERNEL = WEIGHT[..., None, None]


def mean_of(plan: Plan) -> Mean | None:
    return next(one.mean for one in plan.decisions if one.weights)


IMAGE, VECTOR = "(float[1,32,8,8] x) => (float[1,N,8,8] y)", "(float[4,32] x) => (float[4,32] y)"


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        (f"{IMAGE} {{ y = Conv(x, k, b) }}", Mean("x", 1)),
        (f"{IMAGE} {{ y = Conv(x, k) }}", Mean("x", 1)),
        (IMAGE.replace("x)", "x, float[32] c)") + "{ y = Conv(x, k, c) }", None),
        (f"{IMAGE} {{ y = ConvTranspose(x, k, b) }}", Mean("x", 1)),
        (f"{IMAGE} {{ y = ConvTranspose(x, k) }}", Mean("x", 1)),
        (f"{IMAGE} {{ y = ConvTranspose <group=2>(x, k) }}", Mean("x", 1)),
        (f"{IMAGE} {{ y = ConvTranspose <group=2>(x, k, twice) }}", Mean("x", 1)),
        (f"{IMAGE} {{ y = ConvTranspose <group=2>(x, k, b) }}", None),
        (f"{VECTOR} {{ y = Gemm(x, w) }}", None),
        (f"{VECTOR} {{ y = Gemm(x, w, b) }}", Mean("x", -1)),
        (f"{VECTOR} {{ y = Gemm <alpha=2.0>(x, w, b) }}", Mean("x", -1)),
        (f"{VECTOR} {{ y = Gemm(x, w, one) }}", None),
        (f"{VECTOR} {{ p = MatMul(x, w) y = Add(p, b) }}", Mean("x", -1)),
        (f"{VECTOR} {{ p = MatMul(x, w) y = Sub(p, b) }}", Mean("x", -1)),
        (f"{VECTOR} {{ p = MatMul(x, w) y = Add(p, x) }}", None),
        (VECTOR.replace("y)", "y, float[4,32] p)") + "{ p = MatMul(x, w) y = Add(p, b) }", Mean("x", -1)),
        (f"{VECTOR} {{ p = MatMul(w, x) y = Add(p, b) }}", None),
    ],
)
def test_a_constant_bias_of_each_channel_is_corrected(build, plan_of, text: str, mean: Mean | None) -> None:
    made = build(text, w=WEIGHT, k=KERNEL, b=BIAS, one=np.ones(1, np.float32), twice=np.ones(64, np.float32))
    assert mean_of(plan_of(made)) == mean
