"""Time weighed against noise, what an assignment gives, and the reasons that rest on figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.planning.plan import Demotion
from onnxq.search import tradeoff
from onnxq.search.assignment import Problem, cheapest
from onnxq.search.cost_model import STATIC, KernelOption
from onnxq.search.sensitivity import QuantizerId, Sensitivities
from onnxq.search.tradeoff import UNMEASURED, CostTradeoff, OptionSensitivities, reason_of
from search.timed_models import timed, times

DYNAMIC = KernelOption(Mode.DYNAMIC)
FINE = KernelOption(Mode.WEIGHT_ONLY, QuantSpec("int8-narrow", (128,)))
COARSE = KernelOption(Mode.WEIGHT_ONLY, QuantSpec("int4", (32,)))
FLOATS = times({"first": 9.0, "relu": 1.0, "second": 9.0})


def alone(nodes: Mapping[str, float], **tensors: float) -> Sensitivities:
    """Return what is known of one output: ratios by node and by tensor."""
    ratios = {QuantizerId(node, is_node=True): np.array([ratio]) for node, ratio in nodes.items()}
    return Sensitivities({**ratios, **{QuantizerId(tensor): np.array([ratio]) for tensor, ratio in tensors.items()}})


def test_a_node_that_the_scheme_wants_dynamic_is_stored_where_that_is_faster(perceptron: ModelProto) -> None:
    dynamic = times({"first": 2.0, "relu": 1.0, "second": 20.0})
    found = CostTradeoff(timed(perceptron, FLOATS, dynamic, {DYNAMIC: dynamic}, scheme="int8-dynamic"))
    chosen = found.assignment(frozenset(), UNMEASURED, 0.0)
    assert chosen.alternatives == {"first": DYNAMIC}
    assert found.demotions(chosen, UNMEASURED) == {
        "second": Demotion(
            Mode.STORAGE,
            "it is not faster as an integer kernel on this machine",
            "0.000 ms in float, 0.000 ms as integers",
        )
    }


def test_a_node_that_the_scheme_wants_dynamic_multiplies_codes_where_that_is_faster(perceptron: ModelProto) -> None:
    slow, fast = times(dict.fromkeys(FLOATS.nodes, 4e6)), times(dict.fromkeys(FLOATS.nodes, 2e6))
    floats = times(dict.fromkeys(FLOATS.nodes, 9e6))
    found = CostTradeoff(timed(perceptron, floats, slow, {DYNAMIC: slow, COARSE: fast}, scheme="int8-dynamic"))
    demotions = found.demotions(found.assignment(frozenset(), UNMEASURED, 0.0), UNMEASURED)
    assert demotions["first"] == Demotion(
        Mode.WEIGHT_ONLY,
        "it is faster so, or has less error, than with dynamic scales",
        "9.000 ms in float, 4.000 ms as integers, 2.000 ms with float data and int4 values",
        COARSE.weight,
    )


def test_the_float_side_takes_what_is_cheapest_for_the_weight_of_noise(perceptron: ModelProto) -> None:
    offers = {
        DYNAMIC: times({"first": 2.0, "relu": 1.0, "second": 20.0}),
        FINE: times({"first": 4.0, "relu": 1.0, "second": 20.0}),
    }
    found = CostTradeoff(timed(perceptron, FLOATS, FLOATS, offers))
    sensitivities = OptionSensitivities(alternatives={DYNAMIC: alone({"first": 0.5}), FINE: alone({"first": 0.05})})
    assert found.float_side("first", sensitivities, 0.0) == (DYNAMIC, 2.0)
    assert found.float_side("first", sensitivities, 10.0) == (FINE, 4.5)
    assert found.float_side("first", sensitivities, 110.0) == (None, 9.0)
    assert found.float_side("second", sensitivities, 0.0) == (None, 9.0)
    assert found.without(frozenset({("first", DYNAMIC)})).float_side("first", sensitivities, 0.0) == (FINE, 4.0)


def test_a_node_whose_codes_are_too_coarse_to_store_adds_no_noise_in_float(perceptron: ModelProto) -> None:
    found = CostTradeoff(timed(perceptron, FLOATS, FLOATS))
    sensitivities = OptionSensitivities(alone({"second": 9.0}))
    assert found.float_side("second", sensitivities, 1.0) == (None, 18.0)
    left = {"second": Demotion(Mode.FLOAT, "why")}
    found = replace(found, left=left)
    assert found.float_side("second", sensitivities, 1.0) == (None, 9.0)
    assert found.demotions(found.assignment(frozenset({"first", "relu"}), sensitivities, 1.0), sensitivities) == left


def test_an_assignment_says_time_and_noise(perceptron: ModelProto) -> None:
    floats = times({"first": 9e3, "relu": 1e3, "second": 9e3})
    found = CostTradeoff(
        timed(perceptron, floats, times({"first": 3e3, "relu": 1e3, "second": 3e3}, {"x": 3e3, "a": 3.5e3}))
    )
    sensitivities = OptionSensitivities(alone({"first": 0.01, "second": 0.02}, x=0.1, h=0.05, r=0.2))
    one = found.assignment(frozenset({"first", "relu"}), sensitivities, 0.0)
    # The weights of both are quantized values, and so is what static nodes read.
    assert one.nsr == pytest.approx(0.13)
    assert one.nanoseconds == 3e3 + 1e3 + 9e3 + 3_000 + 3_500
    (demotion,) = found.demotions(one, sensitivities).values()
    assert demotion.reason == "its integer kernel gains less time than its error is worth"


def test_a_node_that_is_too_noisy_to_be_fast_takes_the_time_that_it_takes(perceptron: ModelProto) -> None:
    floats = times({"first": 9e3, "relu": 1e3, "second": 9e3})
    coarse = times({"first": 2e3, "relu": 1e3, "second": 3e3})
    found = CostTradeoff(timed(perceptron, floats, floats, {COARSE: coarse}))
    # A node that takes another option adds the error of that option alone.
    static, coarse_error = alone({"first": 0.02, "second": 0.3}), alone({"first": 0.5, "second": 0.001})
    sensitivities = OptionSensitivities(static, {COARSE: coarse_error})
    one = found.assignment(frozenset(), sensitivities, 1e6)
    assert one.alternatives == {"second": COARSE}
    assert one.nanoseconds == 9e3 + 1e3 + 3e3
    assert one.nsr == pytest.approx(0.021)
    assert found.assignment(frozenset(), sensitivities, 0.0).nanoseconds == 2e3 + 1e3 + 3e3


def test_what_nodes_may_not_be_is_not_chosen(perceptron: ModelProto) -> None:
    slow, fast = (times(dict.fromkeys(FLOATS.nodes, value)) for value in (5e6, 1.0))
    found = CostTradeoff(timed(perceptron, times(dict.fromkeys(FLOATS.nodes, 9e6)), fast, {COARSE: slow}))
    assert cheapest(found.problem(UNMEASURED, 0.0)) == {"first", "relu", "second"}
    kept = found.without(frozenset({("second", STATIC)}))
    one = kept.assignment(cheapest(kept.problem(UNMEASURED, 0.0)), UNMEASURED, 0.0)
    assert one.options == {("first", STATIC), ("relu", STATIC), ("second", COARSE)}
    kept = found.without(frozenset({("second", STATIC), ("second", COARSE)}))
    one = kept.assignment(cheapest(kept.problem(UNMEASURED, 0.0)), UNMEASURED, 0.0)
    assert one.options == {("first", STATIC), ("relu", STATIC)}


def test_what_is_wanted_dynamic_and_was_not_offered_is_stored(perceptron: ModelProto) -> None:
    found = CostTradeoff(timed(perceptron, FLOATS, FLOATS, scheme="int8-dynamic"))
    demotions = found.demotions(found.assignment(frozenset(), UNMEASURED, 0.0), UNMEASURED)
    assert {node: one.mode for node, one in demotions.items()} == {"first": Mode.STORAGE, "second": Mode.STORAGE}


def test_a_plan_means_the_modes_that_it_names(perceptron: ModelProto) -> None:
    slow = times(dict.fromkeys(FLOATS.nodes, 20.0))
    found = CostTradeoff(timed(perceptron, FLOATS, slow, {DYNAMIC: slow}, scheme="int8-dynamic"))
    one = found.planned(found.costs.full, UNMEASURED)
    assert one.alternatives == {"first": DYNAMIC, "second": DYNAMIC}
    assert found.demotions(one, UNMEASURED) == {}


def test_a_node_whose_clamp_a_plan_leaves_out_counts_as_float(build: Build, plan_of) -> None:
    clamped = build(
        """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
            [first] a = Conv(x, w0) [clamp] b = Relu(a) [second] y = Conv(b, w1)
        }""",
        w0=(8, 8, 1, 1),
        w1=(8, 8, 1, 1),
    )
    nodes = times(dict.fromkeys(("first", "clamp", "second"), 1.0))
    found = CostTradeoff(timed(clamped, nodes, nodes))
    without = plan_of(clamped, demotions={"clamp": Demotion(Mode.STORAGE, "it is noisy")})
    assert without.by_node["first"].mode is Mode.STATIC
    assert found.planned(without, UNMEASURED).static == {"second"}


def test_what_is_known_of_a_node_is_what_it_alone_would_make_codes(perceptron: ModelProto) -> None:
    found = CostTradeoff(timed(perceptron, FLOATS, FLOATS, {COARSE: FLOATS}))
    sensitivities = OptionSensitivities(alone({"first": 0.5, "second": 0.25}, x=1.0), {COARSE: alone({"first": 0.125})})
    ways = found.options(sensitivities)
    assert ways["first", STATIC] == 1.5
    assert (ways["second", STATIC], ways["first", COARSE]) == (0.25, 0.125)
    assert ("second", COARSE) not in ways
    assert {(one.node, one.mode) for one in found.sensitivities(sensitivities)} == {
        (node, option.mode) for node, option in ways
    }
    assert (sensitivities.of(COARSE, "first"), sensitivities.of(COARSE, "second"), sensitivities.of(FINE, "first")) == (
        0.125,
        0.0,
        0.0,
    )


def test_an_assignment_takes_what_its_kernels_were_found_to_take(perceptron: ModelProto) -> None:
    prices = CostTradeoff(
        timed(perceptron, FLOATS, FLOATS, {DYNAMIC: times({"first": 2.0, "relu": 1.0, "second": 20.0})})
    )
    before = prices.assignment(frozenset(), UNMEASURED, 0.0)
    assert before.alternatives == {"first": DYNAMIC}


@pytest.mark.parametrize(("second", "whole"), [(9.1e6, True), (12e6, False)])
def test_the_whole_plan_is_the_quickest_where_it_takes_as_long(
    second: float, whole: bool, perceptron: ModelProto
) -> None:
    floats = times({"first": 9e6, "relu": 1e6, "second": 9e6})
    found = CostTradeoff(timed(perceptron, floats, times({"first": 3e6, "relu": 1e6, "second": second})))
    assert found.quickest.static == ({"first", "relu", "second"} if whole else {"first", "relu"})


def test_what_is_best_for_two_weights_is_so_between(perceptron: ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def counted(problem: Problem) -> frozenset[str]:
        solved.append(problem)
        return cheapest(problem)

    floats = times({"first": 9e6, "relu": 1e6, "second": 9e6})
    found = CostTradeoff(timed(perceptron, floats, times({"first": 2e6, "relu": 5e5, "second": 6e6})))
    sensitivities = OptionSensitivities(alone({}, x=1e-3, h=1e-4, r=1e-2))
    weights = [0.0, *(2.0**power for power in range(40))]
    expected = [found.best(sensitivities, weight) for weight in weights]
    monkeypatch.setattr(tradeoff, "cheapest", counted)
    assigned = found.by_weight(sensitivities, weights)
    # The ends first, then what halves them.
    order = sorted(range(len(weights)), key=lambda place: (place not in (0, 40), place % 20, place % 5, place))
    assert {place: assigned(place) for place in order} == dict(enumerate(expected))
    assert len({one.static for one in expected}) > 1
    assert len(solved) < len(weights) / 2


# Reasons name what was weighed, and times only where they were taken.

SLOW_FLOATS, ONE_IS_FASTER = times({"first": 9e6, "second": 9e6}), times({"first": 3e6, "second": 9e6})


@pytest.mark.parametrize(
    ("node", "ratio", "taken", "reason", "figures"),
    [
        (
            "first",
            0.01,
            None,
            "less time than its error is worth",
            "9.000 ms in float, 3.000 ms as integers, 20.0 dB as integers",
        ),
        ("first", 0.0, None, "DequantizeLinear nodes cost", "9.000 ms in float, 3.000 ms as integers"),
        ("second", 0.0, None, "not faster as an integer kernel", "9.000 ms in float, 9.000 ms as integers"),
        ("first", 0.0, DYNAMIC, "than with fixed scales", "9.000 ms in float"),
    ],
)
def test_a_reason_is_what_decided(
    perceptron: ModelProto, node: str, ratio: float, taken: KernelOption | None, reason: str, figures: str
) -> None:
    costs = timed(perceptron, SLOW_FLOATS, ONE_IS_FASTER)
    reported = reason_of(costs, node, Mode.STATIC, ratio, taken)
    assert reason in reported[0]
    assert reported[1].startswith(figures)
