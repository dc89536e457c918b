"""Which alternatives a runtime has, and which nodes may take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.planner import make_plan
from onnxq.runtime.sessions import multiplies_experts
from onnxq.runtime.targets import TARGETS, target_named
from onnxq.search.assignment import Border, cheapest
from onnxq.search.cost_model import KernelOption, alternatives, takers, wishes
from onnxq.search.tradeoff import UNMEASURED, CostTradeoff
from search.timed_models import TARGET, planned, timed, times

DYNAMIC = KernelOption(Mode.DYNAMIC)
CODES = KernelOption(Mode.WEIGHT_ONLY, QuantSpec("int4", (32,)))


def test_the_cpu_multiplies_integers_with_dynamic_scales_and_blocks_of_8_and_4_bits() -> None:
    assert [(one.mode, one.weight.format if one.weight else "") for one in alternatives(TARGET)] == [
        (Mode.DYNAMIC, ""),
        (Mode.WEIGHT_ONLY, "int8-narrow"),
        (Mode.WEIGHT_ONLY, "int4"),
    ]
    assert not list(alternatives(target_named("tensorrt")))


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_codes_of_every_alternative_keep_a_file_at_a_quarter_of_its_floats(target) -> None:
    for spec in target.kernels.multiplied:
        bits = {"int8-narrow": 8, "int4": 4}[spec.format]
        # A scale for each channel takes next to nothing.
        scales = 32 / spec.granularity[0] if isinstance(spec.granularity, tuple) else 0.0
        assert bits + scales <= 8 * 1.05


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic"])
def test_what_the_scheme_wants_as_integers_may_take_other_codes(perceptron: ModelProto, scheme: str) -> None:
    _, full = planned(perceptron, scheme)
    assert wishes(CODES, full, TARGET).keys() == {"first", "second"}
    assert {one.weight for one in wishes(CODES, full, TARGET).values()} == {CODES.weight}


@pytest.mark.parametrize("scheme", ["int8-per-tensor", "int8-storage", "int8-block32", "torch-fbgemm", "burn-q8s"])
def test_codes_that_the_user_chose_are_not_exchanged(perceptron: ModelProto, scheme: str) -> None:
    _, full = planned(perceptron, scheme)
    assert wishes(CODES, full, TARGET) == {}


def test_stored_weights_may_be_multiplied_as_the_same_codes(perceptron: ModelProto) -> None:
    _, full = planned(perceptron, "int8-storage")
    (multiplied,) = alternatives(target := target_named("openvino"))
    assert wishes(multiplied, full, target).keys() == {"first", "second"}


def test_what_falls_back_takes_nothing(residual: ModelProto, perceptron: ModelProto) -> None:
    for model, expected in ((residual, set()), (perceptron, {"first", "second"})):
        graph, full = planned(model)
        for alternative in (DYNAMIC, CODES):
            wished = wishes(alternative, full, TARGET)
            plan = make_plan(graph, preset_named("int8"), TARGET, wished)
            assert takers(alternative, plan, wished.keys()) == expected


@pytest.mark.skipif(not multiplies_experts(), reason="an old onnxruntime")
@pytest.mark.parametrize(("scheme", "takes"), [("int8", True), ("int8-dynamic", True), ("int8-storage", False)])
def test_experts_may_be_multiplied_unless_the_scheme_stores_them(build, scheme: str, takes: bool) -> None:
    model = build(
        """(float[6,64] x, float[6,4] r) => (float[6,64] y) {
            [experts] y = com.microsoft.MoE <k = 1, activation_type = "relu"> (x, r, w1, b1, w2) }""",
        w1=(4, 64, 64), b1=(4, 64), w2=(4, 64, 64),
    )  # fmt: skip
    model.opset_import.add(domain="com.microsoft", version=1)
    graph, full = planned(model, scheme)
    wished = wishes(CODES, full, TARGET)
    plan = make_plan(graph, preset_named(scheme), TARGET, wished, AllowedOps.FASTEST)
    assert takers(CODES, plan, wished.keys()) == ({"experts"} if takes else set())


# Costs of nodes and borders.


@pytest.fixture
def gated(build: Callable[..., ModelProto]) -> ModelProto:
    """Return two convolutions with a node between them that is never an integer kernel."""
    return build(
        "(float[1,8,8,8] x) => (float[1,8,6,6] y) { [a] p = Conv(x, w0) [tanh] q = Tanh(p) [b] y = Conv(q, w1) }",
        w0=(8, 8, 2, 2),
        w1=(8, 8, 2, 2),
    )


def test_what_runs_longer_behind_an_integer_node_counts_against_it(gated: ModelProto) -> None:
    found = timed(gated, times({"a": 9.0, "tanh": 1.0, "b": 9.0}), times({"a": 3.0, "tanh": 5.0, "b": 3.0}))
    assert found.static_nodes == {"a": 7.0, "b": 3.0}


def test_what_runs_shorter_is_no_gain_of_its_neighbour(gated: ModelProto) -> None:
    found = timed(gated, times({"a": 9.0, "tanh": 5.0, "b": 9.0}), times({"a": 3.0, "tanh": 1.0, "b": 3.0}))
    assert found.static_nodes == {"a": 3.0, "b": 3.0}


def test_measured_borders_count_in_their_direction_and_others_by_size(gated: ModelProto) -> None:
    floats = times({"a": 9.0, "tanh": 1.0, "b": 9.0})
    found = timed(gated, floats, times({"a": 3.0, "tanh": 1.0, "b": 3.0}, {"p": 5_000.0, "q": 4_000.0}))
    assert found.borders == (
        Border(None, ("a",), 3_000, 3_000, tensor="x"),
        Border("a", ("tanh",), 7_000, 5_000, tensor="p"),
        Border(None, ("b",), 4_000, 8_000, tensor="q"),
        Border("b", ("",), 7_000, 8_000, tensor="y"),
    )


def test_floats_that_no_kernel_decodes_cost_their_bytes_and_only_readers_make_codes_of_them(gated: ModelProto) -> None:
    floats, static = times({"a": 9.0, "tanh": 1.0, "b": 9.0}), times({"a": 3.0, "tanh": 1.0, "b": 3.0}, {"q": 4_000.0})
    found = replace(timed(gated, floats, static), target=target_named("openvino"))
    assert [one for one in found.borders if one.tensor in ("", "p")] == [
        Border("a", ("tanh",), 7_000, 200),
        Border(None, ("tanh",), 0, 0, tensor="p"),
        Border("b", ("",), 7_000, 200),
    ]
    both = CostTradeoff(found).assignment(frozenset({"a", "b"}), UNMEASURED, 0.0)
    assert both.nanoseconds == 3.0 + 1.0 + 3.0 + 3_000 + 4_000 + 2 * 200
    assert cheapest(CostTradeoff(found).problem(UNMEASURED, 0.0)) == frozenset()


def test_codes_that_no_kernel_of_their_own_makes_cost_nothing(gated: ModelProto) -> None:
    nodes = times({"a": 3.0, "tanh": 1.0, "b": 3.0}, {"x": 2_000.0})
    found = replace(timed(gated, times({"a": 9.0, "tanh": 1.0, "b": 9.0}), nodes), target=target_named("openvino"))
    assert [one.quantize for one in found.borders if one.tensor == "q"] == [0]
    assert CostTradeoff(found).planned(found.full, UNMEASURED).nanoseconds == nodes.total + 2 * 200


def test_a_clamp_and_its_producer_stay_together_and_followers_need_their_data(residual: ModelProto) -> None:
    names = [one.name for one in prepare(read_model(residual)).nodes]
    found = timed(residual, times(dict.fromkeys(names, 2.0)), times(dict.fromkeys(names, 1.0)))
    assert {("stem_relu", "stem"), ("stem", "stem_relu")} <= set(found.followers)
    assert {("sum", "right"), ("sum", "stem_relu"), ("sum_relu", "sum"), ("sum", "sum_relu")} <= set(found.followers)
    assert ("left", "stem_relu") not in found.followers


def test_what_a_graph_or_body_returns_is_floats_and_bodies_read_what_they_capture(
    build: Callable[..., ModelProto],
) -> None:
    model = build(
        """(float[1,8,8,8] x, bool c) => (float[1,8,6,6] p, float[1,8,4,4] y) {
            [a] p = Conv(x, w0)
            [b] q = Conv(p, w1)
            [choose] y = If (c) <
                then_branch = yes () => (float[1,8,4,4] u) { [inner] u = Sin(q) },
                else_branch = no () => (float[1,8,4,4] v) { [other] v = Cos(q) }>
        }""",
        w0=(8, 8, 3, 3),
        w1=(8, 8, 3, 3),
    )
    found = timed(model, times({"a": 9e3, "b": 9e3}), times({"a": 1e3, "b": 1e3}, {"p": 4e3, "q": 5e3}))
    assert [border.consumers for border in found.borders] == [("a",), ("b", ""), ("inner", "other")]
    integer = CostTradeoff(found).assignment(frozenset({"a", "b"}), UNMEASURED, 0.0)
    assert integer.nanoseconds == 2e3 + 3_000 + 4e3 + 5e3


def test_an_alternative_is_charged_for_what_it_slows_down(perceptron: ModelProto) -> None:
    floats = times({"first": 9.0, "relu": 1.0, "second": 9.0})
    found = timed(perceptron, floats, floats, {CODES: times({"first": 3.0, "relu": 4.0, "second": 2.0})})
    assert found.offered == {CODES: {"first": 6.0, "second": 2.0}}


def test_what_a_node_that_works_on_codes_itself_takes_is_its_own_affair(build: Callable[..., ModelProto]) -> None:
    model = build(
        """(float[4,64] x) => (float[4,64] y) {
            [a] p = MatMul(x, w0) [tanh] q = Tanh(p) [b] r = MatMul(q, w1) [sin] y = Sin(r) }""",
        w0=(64, 64),
        w1=(64, 64),
    )
    floats = times({"a": 9.0, "tanh": 1.0, "b": 9.0, "sin": 1.0})
    slow = times({"a": 2.0, "tanh": 2.0, "b": 50.0, "sin": 7.0})
    found = timed(model, floats, slow, {DYNAMIC: slow}, scheme="int8-dynamic")
    (offer,) = found.offers
    assert offer.nodes == {"a", "b"}
    assert replace(found, offers=(replace(offer, nodes=frozenset({"a"})),)).offered == {DYNAMIC: {"a": 3.0}}


def test_nothing_is_known_of_a_model_whose_profile_is_empty(perceptron: ModelProto) -> None:
    floats = times({"first": 9.0, "relu": 1.0, "second": 9.0})
    for known in (timed(perceptron, floats, times({})), timed(perceptron, times({}), floats)):
        assert known.static_nodes == {}
        assert known.borders == ()
        assert known.worthwhile == {}


def test_nodes_in_bodies_have_their_price_and_share_borders_with_those_around_them(
    build: Callable[..., ModelProto],
) -> None:
    model = build(
        """(float[1,8,8,8] x, bool c) => (float[1,8,4,4] y) {
            [a] p = Conv(x, w0)
            [choose] y = If (c) <
                then_branch = yes () => (float[1,8,4,4] u) { [inner] u = Conv(p, w1) },
                else_branch = no () => (float[1,8,4,4] v) { [other] q = Conv(p, w1) [tanh] v = Tanh(q) }>
        }""",
        w0=(8, 8, 3, 3),
        w1=(8, 8, 3, 3),
    )
    names = ("a", "inner", "other", "tanh")
    found = timed(model, times(dict.fromkeys(names, 9e5)), times(dict.fromkeys(names, 1e5), {"p": 4e3, "u": 2e3}))
    assert found.static_nodes == {"a": 1e5, "inner": 1e5, "other": 1e5}
    assert [(one.producer, one.consumers) for one in found.borders] == [
        (None, ("a",)),
        ("a", ("inner", "other")),
        ("inner", ("",)),
        ("other", ("tanh",)),
    ]
    prices = CostTradeoff(found)
    assert cheapest(prices.problem(UNMEASURED, 0.0)) == {"a", "inner", "other"}


def test_alternatives_that_are_slower_than_float_or_than_finer_codes_are_not_worth_it(perceptron: ModelProto) -> None:
    floats = times({"first": 9.0, "relu": 1.0, "second": 9.0})
    fine = KernelOption(Mode.WEIGHT_ONLY, QuantSpec("int8-narrow", (128,)))
    offers = {
        DYNAMIC: times({"first": 2.0, "relu": 1.0, "second": 9.5}),
        fine: times({"first": 5.0, "relu": 1.0, "second": 4.0}),
        CODES: times({"first": 4.0, "relu": 1.0, "second": 4.5}),
    }
    found = timed(perceptron, floats, floats, offers)
    assert found.worthwhile == {DYNAMIC: {"first": 2.0}, fine: {"first": 5.0, "second": 4.0}, CODES: {"first": 4.0}}
    assert found.offered[DYNAMIC] == {"first": 2.0, "second": 9.5}
