"""Decisions and their reasons on small models, and that onnxruntime runs what the plan promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from convolutions import between_convolutions, groups, modes
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.errors import SchemeError
from onnxq.evaluation.verification import count_kernels
from onnxq.ir import read_model
from onnxq.planning import planner
from onnxq.planning.plan import EXCLUDED, Decision, Demotion
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import TARGETS

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT


# --- whole networks -------------------------------------------------------------------------------------------------


def test_a_residual_block_is_integer_throughout(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual)
    assert set(modes(plan).values()) == {STATIC}
    assert [activation.tensor for activation in plan.activations] == ["x", "b", "d", "e", "g", "y"]
    assert plan.taps == ("x", "b", "d", "e", "g", "y")
    assert plan.left_in_float() == ()


def test_a_decision_names_what_becomes_codes(residual: ModelProto, plan_of) -> None:
    decision = plan_of(residual).by_node["stem"]
    assert (decision.op_type, decision.reason, decision.bias, decision.data) == ("Conv", "integer kernel", 2, "x")
    (weight,) = decision.weights
    assert (weight.index, weight.tensor, weight.axis) == (1, "w0", 0)
    assert weight.spec == QuantSpec("int8-narrow", Granularity.CHANNEL)
    assert plan_of(residual).by_node["right"].bias is None


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            "onnxruntime-cpu",
            "computes in float between quantized activations: onnxruntime-cpu decodes int4-narrow weights ",
        ),
        ("qnn", "integer kernel"),
    ],
)
def test_a_decision_says_what_computes_with_weights_of_four_bits(
    target: str, reason: str, residual: ModelProto
) -> None:
    plan = planner.make_plan(prepare(read_model(residual)), PRESETS["int4-int8-data"], TARGETS[target])
    assert plan.by_node["stem"].mode is STATIC
    assert plan.by_node["stem"].reason.startswith(reason)


@pytest.mark.parametrize(
    ("target", "scheme", "rows", "mode"),
    [
        ("onnxruntime-cpu", "int8", 4096, Mode.WEIGHT_ONLY),
        ("onnxruntime-web", "int8-dynamic", 4096, Mode.WEIGHT_ONLY),
        ("onnxruntime-cpu", "int8", 64, STORAGE),
        ("onnxruntime-cpu", "int8-storage", 4096, STORAGE),
        ("openvino", "int8", 4096, Mode.WEIGHT_ONLY),
        ("tensorrt", "int8", 4096, STORAGE),
    ],
)
def test_rows_of_a_large_table_are_looked_up_as_codes(
    build: Callable[..., ModelProto], target: str, scheme: str, rows: int, mode: Mode
) -> None:
    model = build(
        "(int64[3] x) => (float[3,8] y) { [rows] h = Gather(table, x) n = Tanh(h) y = MatMul(n, w) }",
        table=(rows, 256),
        w=(256, 8),
    )
    plan = planner.make_plan(prepare(read_model(model)), PRESETS[scheme], TARGETS[target])
    assert plan.by_node["rows"].mode is mode


@pytest.mark.parametrize(("target", "mode"), [("onnxruntime-cpu", FLOAT), ("openvino", STATIC)])
def test_a_transposed_convolution_is_integers_where_the_runtime_has_a_kernel(
    build: Callable[..., ModelProto], target: str, mode: Mode
) -> None:
    model = build(
        "(float[1,8,8,8] x) => (float[1,4,16,16] y) {"
        "[first] a = Conv(x, w0) [up] b = ConvTranspose <strides = [2,2]> (a, w1) y = Sigmoid(b) }",
        w0=(8, 8, 1, 1),
        w1=(8, 4, 2, 2),
    )
    plan = planner.make_plan(prepare(read_model(model)), PRESETS["int8"], TARGETS[target])
    assert plan.by_node["up"].mode is mode


def test_the_stem_reads_a_quantized_graph_input(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual)
    first = plan.activations[0]
    assert (first.tensor, first.group, first.every_consumer) == ("x", "x", False)
    assert first.spec == QuantSpec("uint8", symmetric=False)


def test_a_matrix_product_gives_floats_to_float_nodes(build, plan_of) -> None:
    model = build(
        "(float[4,32] x) => (float[4,16] y) { [g] a = MatMul(x, w0) [t] b = Tanh(a) [h] y = Gemm(b, w1) }",
        w0=(32, 32),
        w1=(32, 16),
    )
    plan = plan_of(model)
    assert modes(plan) == {"g": STATIC, "t": FLOAT, "h": STATIC}
    assert [activation.tensor for activation in plan.activations] == ["x", "b"]


def test_recurrent_and_embedding_weights_are_stored(build, plan_of) -> None:
    model = build(
        """(int64[5,2] i) => (float[5,1,2,16] y, float[1,2,16] h) {
        [embed] e = Gather(table, i)
        [gru] y, h = GRU <hidden_size = 16> (e, w, r)
        }""",
        table=(40, 8),
        w=(1, 48, 8),
        r=(1, 48, 16),
    )
    plan = plan_of(model)
    assert modes(plan) == {"embed": STORAGE, "gru": STORAGE}
    assert [weight.tensor for weight in plan.by_node["gru"].weights] == ["w", "r"]
    assert plan.taps == ()


def test_float16_weights_are_stored(build, plan_of) -> None:
    weight = np.ones((32, 32), np.float16)
    model = build("(float16[4,32] x) => (float16[4,32] y) { [n] y = MatMul(x, w) }", w=weight)
    decision = plan_of(model).by_node["n"]
    assert decision.mode is STORAGE
    assert "computes in float from int8-narrow weights" in decision.reason


def test_weights_too_small_to_pay_are_left(build, plan_of) -> None:
    model = build("(float[2,4,8] x) => (float[2,4,15] y) { [n] y = MatMul(x, w) }", w=(2, 8, 15))
    assert plan_of(model).by_node["n"].mode is FLOAT
    model = build("(float[2,4,8] x) => (float[2,4,16] y) { [n] y = MatMul(x, w) }", w=(2, 8, 16))
    assert plan_of(model).by_node["n"].mode is STORAGE


def test_a_bias_behind_a_product_is_said_to_be_one(build, plan_of) -> None:
    text = "(float[2,4,32] x) => (float[2,4,8] y) { [p] a = MatMul(x, w) [bias] b = Add(a, k) y = Neg(b) }"
    decision = plan_of(build(text, w=(32, 8), k=(8,))).by_node["bias"]
    assert (decision.mode, decision.reason) == (FLOAT, "adds the bias of p, whose kernel takes it over where it can")


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
    assert plan.by_node["first"].reason == "computes in float from int8-narrow weights: alone it leaves 3.0 dB"
    assert groups(plan) == {"b": "b", "y": "y"}


def test_nodes_demoted_to_float_keep_their_weights(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, demotions={"left": Demotion(FLOAT, "it hurts")})
    assert plan.by_node["left"] == Decision("left", "Conv", FLOAT, "it hurts")


def test_demoting_what_the_scheme_leaves_in_float_changes_nothing(residual: ModelProto, plan_of) -> None:
    scheme = Scheme((Rule(FLOAT, nodes=("left",)), Rule(STATIC)), name="mine")
    plan = plan_of(residual, scheme=scheme)
    assert plan == plan_of(residual, scheme=scheme, demotions={"left": Demotion(STORAGE, "measured")})
    assert plan.by_node["left"].reason == "the scheme mine asks for float"
    assert plan.scheme == "mine"


@pytest.mark.parametrize("preset", ["int8", "int8-storage"])
def test_excluded_nodes_say_so(preset: str, residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme=PRESETS[preset].excluding("left").excluding("ri*"))
    assert [plan.by_node[node].reason == EXCLUDED for node in ("left", "right", "stem")] == [True, True, False]


def test_nodes_of_a_storage_scheme_can_be_demoted_to_float(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme="int8-storage", demotions={"left": Demotion(FLOAT, "it hurts")})
    assert plan.by_node["left"] == Decision("left", "Conv", FLOAT, "it hurts")
    assert plan.by_node["right"].mode is STORAGE


def test_a_storage_scheme_plans_no_activations(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme="int8-storage")
    assert plan.activations == plan.taps == ()
    assert {mode for name, mode in modes(plan).items() if plan.by_node[name].op_type == "Conv"} == {STORAGE}
    assert plan.by_node["stem"].reason.endswith("the scheme int8-storage asks for storage")


def test_rules_choose_specs_by_node(residual: ModelProto, plan_of) -> None:
    per_tensor = Rule(STATIC, nodes=("l*",), weight=QuantSpec("int8-7bit"))
    plan = plan_of(residual, scheme=Scheme((per_tensor, Rule(STATIC))))
    formats = {one.node: one.weights[0].spec.format for one in plan.decisions if one.weights}
    assert formats == {"stem": "int8-narrow", "left": "int8-7bit", "right": "int8-narrow", "last": "int8-7bit"}


def test_rules_may_select_by_tensor(residual: ModelProto, plan_of) -> None:
    plan = plan_of(residual, scheme=Scheme((Rule(FLOAT, tensors=("w2",)), Rule(STATIC))))
    assert modes(plan)["right"] is FLOAT
    assert modes(plan)["sum"] is FLOAT


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule(STATIC, activation=QuantSpec("int16")),
            "activations as int16 per tensor have no integer kernel on onnxruntime-cpu; use uint8 or int8 per tensor",
        ),
        (
            Rule(STATIC, activation=QuantSpec("uint8", Granularity.CHANNEL, symmetric=False)),
            "activations as uint8 per channel have no integer kernel on onnxruntime-cpu; use uint8 or int8 per tensor",
        ),
        (
            Rule(STATIC, weight=QuantSpec("uint8", symmetric=False)),
            "weights as affine uint8 per tensor have no fast integer kernel on onnxruntime-cpu; "
            "use symmetric int8 per tensor or channel, or mode weight-only",
        ),
        (
            Rule(STATIC, weight=QuantSpec("int16")),
            "weights as symmetric int16 per tensor have no fast integer kernel on onnxruntime-cpu; "
            "use symmetric int8 per tensor or channel, or mode weight-only",
        ),
        (Rule(STATIC, nodes=("stemm",)), "node pattern 'stemm' matches nothing in the model; did you mean 'stem'?"),
    ],
)
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
    assert (plan.by_node["inner"].data, plan.taps) == ("a", ("x", "a"))
    assert [one.node for one in plan.decisions] == ["first", "branch", "inner", "idle"]


def test_planning_edits_nothing(residual: ModelProto) -> None:
    from onnxq.config.presets import PRESETS
    from onnxq.ir import to_model

    graph = prepare(read_model(residual))
    before = to_model(graph).SerializeToString(deterministic=True)
    planner.make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    assert to_model(graph).SerializeToString(deterministic=True) == before
