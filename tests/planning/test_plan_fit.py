"""Plans beside models: those of other models, and those that cannot be carried out, are told in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import SchemeError
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.numerics.pairs import Pairs
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Activation, AwqScales, Decision, Mean, Plan, Weight
from onnxq.planning.plan_fit import check_fits
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS

CPU = TARGETS["onnxruntime-cpu"]


def cell(plan: Plan) -> Decision:
    return plan.by_node["n"]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda plan: edited(plan, "n", weights=cell(plan).weights[:1]),
         r"node 'n' is dynamic and its weights are inputs \[1, 2\], found \[1\]"),
        (lambda plan: edited(plan, "n", weights=cell(plan).weights + cell(plan).weights[1:]),
         r"inputs \[1, 2\], found \[1, 2, 2\]"),
        (lambda plan: edited(plan, "n", data="r"), "the data of node 'n' is 'x', found 'r'"),
        (lambda plan: edited(plan, "n", mean=Mean("x", 2)),
         "node 'n' has a mean, and no LSTM has a bias that is corrected; leave it out"),
    ],
)  # fmt: skip
def test_a_cell_becomes_integers_as_a_whole(edit, sentence: str, build) -> None:
    model = build(
        "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }",
        w=(1, 64, 8),
        r=(1, 64, 16),
    )
    graph = prepare(read_model(model))
    plan = make_plan(graph, PRESETS["int8"], CPU, emit=AllowedOps.ORT)
    check_fits(edited(plan, "n", weights=cell(plan).weights[::-1]), graph)
    with pytest.raises(SchemeError, match=f"^the plan does not fit the model: .*{sentence}"):
        check_fits(edit(plan), graph)


def test_a_plan_whose_encoder_is_not_installed_is_told(build) -> None:
    graph = prepare(read_model(build("(float[2,64] x) => (float[2,32] y) { [n] y = MatMul(x, w) }", w=(64, 32))))
    plan = make_plan(graph, PRESETS["int8"], CPU)
    weights = tuple(replace(one, spec=replace(one.spec, method="theirs")) for one in plan.by_node["n"].weights)
    sentence = "method 'theirs' is unknown, .* found at weight 'w' of node 'n'"
    with pytest.raises(SchemeError, match=f"^the plan does not fit the model: {sentence}"):
        check_fits(edited(plan, "n", weights=weights), graph)


def edited(plan: Plan, node: str, /, **changes: object) -> Plan:
    return replace(
        plan,
        decisions=tuple(replace(one, **changes) if one.node == node else one for one in plan.decisions),
    )


def weight_of(plan: Plan, **changes: object) -> tuple[Weight, ...]:
    return (replace(plan.by_node["stem"].weights[0], **changes),)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda plan: edited(plan, "stem", node="stemm"), "it has no node 'stemm'; did you mean 'stem'"),
        (lambda plan: edited(plan, "stem", op_type="Gemm"), "node 'stem' is Conv, in the plan Gemm"),
        (lambda plan: replace(plan, decisions=plan.decisions[1:]), "its Conv 'stem' has no entry under nodes"),
        (lambda plan: edited(plan, "stem", weights=weight_of(plan, tensor="w")), "input 1 of node 'stem' is not 'w'"),
        (lambda plan: edited(plan, "stem", weights=weight_of(plan, index=7)), "input 7 of node 'stem' is not 'w0'"),
        (
            lambda plan: edited(plan, "stem", weights=weight_of(plan, index=0, tensor="x")),
            "weight 'x' of node 'stem' is not constant",
        ),
        (lambda plan: edited(plan, "stem", weights=weight_of(plan, axis=4)), "has 4 axes, no axis 4"),
        (
            lambda plan: edited(plan, "stem", weights=weight_of(plan, spec=QuantSpec("int16"))),
            "weight 'w0' of node 'stem' has pairs 'row', which values of int8 alone have to fit in, and is int16",
        ),
        (
            lambda plan: edited(plan, "stem", weights=weight_of(plan, axis=1)),
            "weight 'w0' of node 'stem' is summed over axis 1, along which its output channels lie, too",
        ),
        (
            lambda plan: edited(plan, "stem", weights=weight_of(plan, spec=QuantSpec("int8-narrow", (7,)))),
            r"per block of \[7\] have no fast integer kernel .*, found at weight 'w0' of node 'stem'",
        ),
        (
            lambda plan: edited(plan, "stem", weights=weight_of(plan, spec=QuantSpec("int16"), pairs=Pairs.NONE)),
            "weights as symmetric int16 per tensor have no fast integer kernel",
        ),
        (
            lambda plan: replace(
                plan, activations=(replace(plan.activations[0], spec=QuantSpec("uint4", symmetric=False)),)
            ),
            "activations as uint4 per tensor have no integer kernel on onnxruntime-cpu; "
            "use int8, uint8, int16, uint16 per tensor, found at tensor 'x'",
        ),
        (lambda plan: edited(plan, "stem", bias=3), "node 'stem' has no input 3 to be a bias"),
        (lambda plan: edited(plan, "stem", data="y"), "node 'stem' does not read 'y'"),
        (lambda plan: edited(plan, "stem", mode=Mode.FLOAT), "node 'stem' is float and has weights"),
        (lambda plan: edited(plan, "stem", data="w0"), "the data of node 'stem' is 'x', found 'w0'"),
        (
            lambda plan: edited(plan, "stem_relu", mode=Mode.WEIGHT_ONLY),
            "node 'stem_relu' is weight-only and lacks weights; give them, or make it float",
        ),
        (
            lambda plan: edited(plan, "stem", mode=Mode.DYNAMIC),
            "node 'stem' cannot be dynamic: onnxruntime-cpu has no dynamic integer kernel for Conv",
        ),
        (
            lambda plan: edited(plan, "stem", weights=weight_of(plan) * 2),
            r"node 'stem' is static and its weight is input 1, found \[1, 1\]",
        ),
        (
            lambda plan: edited(plan, "stem_relu", mean=Mean("x", 1)),
            "node 'stem_relu' has a mean and no weight at input 1 whose rounding it makes up for; leave it out",
        ),
        (
            lambda plan: edited(plan, "stem", mean=Mean("y", 1)),
            "the mean of node 'stem' is that of its data 'x', found 'y'",
        ),
        (lambda plan: edited(plan, "stem", mean=Mean("x", 0)), "of node 'stem' is along axis 1 of its data, found 0"),
        (lambda plan: edited(plan, "stem", mean=Mean("x", 9)), "of node 'stem' is along axis 1 of its data, found 9"),
        (
            lambda plan: replace(plan, activations=(Activation("w0", QuantSpec("int8"), "w0"), *plan.activations)),
            "it has no tensor 'w0' that is fed or computed",
        ),
        (lambda plan: edited(plan, "stem_relu", mode=Mode.DYNAMIC), "node 'stem_relu' is dynamic and lacks weights"),
        (lambda plan: replace(plan, activations=()), "node 'stem' is static and its data 'x' has no entry under"),
        (
            lambda plan: replace(plan, activations=(Activation("xx", QuantSpec("int8"), "x"),)),
            "it has no tensor 'xx'",
        ),
        (
            lambda plan: replace(plan, activations=(Activation("x", QuantSpec("int8"), "other"),)),
            "it has no tensor 'other'",
        ),
    ],
)
def test_a_plan_of_another_model_is_told_by_its_first_difference(edit, sentence: str, plan: Plan, prepared) -> None:
    with pytest.raises(SchemeError, match=f"^the plan does not fit the model: .*{sentence}"):
        check_fits(edit(plan), prepared)


def test_a_plan_may_name_tensors_of_bodies(build, plan_of) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
            y = If (c) <
                then_branch = t () => (float[4,32] u) { a = Neg(x) [inner] u = MatMul(a, w) },
                else_branch = e () => (float[4,32] v) { v = Tanh(x) }>
        }""",
        w=(32, 32),
    )
    plan = plan_of(model)
    assert plan.observed_tensors == ("a",)
    check_fits(plan, prepare(read_model(model)))


@pytest.mark.parametrize(
    ("awq", "sentence"),
    [
        (AwqScales("z", (1.0, 2.0)), "it has no tensor 'z' that is computed"),
        (AwqScales("n", (1.0, 2.0)), r"tensor 'n' is of shape \[3, 64\], found 2 factors for its last axis"),
        (AwqScales("n", (0.0,) * 64), "the factors of tensor 'n' are above 0 and finite, found others"),
    ],
)
def test_factors_of_something_else_are_refused(awq: AwqScales, sentence: str, build) -> None:
    text = "(float[3,64] x) => (float[3,64] y) {n = LayerNormalization(x, s) y = MatMul(n, w)}"
    graph = prepare(read_model(build(text, s=(64,), w=(64, 64))))
    plan = make_plan(graph, PRESETS["int4-block32"], CPU)
    check_fits(replace(plan, awq=(AwqScales("n", (0.5,) * 64),)), graph)
    with pytest.raises(SchemeError, match=f"^the plan does not fit the model: {sentence}"):
        check_fits(replace(plan, awq=(awq,)), graph)
