"""What is expected of plans, and which of those that were measured are told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Decision, Plan
from onnxq.search.frontier import WeighedPlan, distinct, expectation, fastest, halfway, is_worth_trying, points
from onnxq.search.tradeoff import Assignment


def candidate(
    noise: float, sqnr: float | None = None, speed: float | None = None, mode: Mode = Mode.STATIC
) -> WeighedPlan:
    plan = Plan((Decision("a", "Conv", mode, "why"),), (), "int8", "onnxruntime-cpu")
    return WeighedPlan(Assignment(frozenset(), {}, 1e6, noise), plan, 0.0, frozenset(), sqnr=sqnr, speed=speed)


def test_one_plan_says_how_far_predictions_are_off() -> None:
    trusted = expectation([candidate(0.01, 15.0), candidate(0.0, math.inf), candidate(0.001)], 16.0)
    assert [trusted(predicted) for predicted in (20.0, 23.0)] == pytest.approx([15.0, 18.0])
    assert expectation([candidate(0.001)], 25.0)(17.0) == 17.0
    assert expectation([candidate(0.01, -math.inf)], 20.0)(20.0) == -100.0


@pytest.mark.parametrize("steepness", [0.5, 1.0, 2.0])
def test_plans_that_differ_say_how_much_more_is_trusted_for_each_decibel(steepness: float) -> None:
    measured = [candidate(10 ** (-alone / 10), 20 + steepness * (alone - 30)) for alone in (25.0, 30.0, 35.0)]
    trusted = expectation(measured, 20.0)
    assert trusted(30.0) == pytest.approx(20.0, abs=0.2)
    assert trusted(33.0) - trusted(30.0) == pytest.approx(3 * steepness, rel=0.2)


def test_luck_turns_no_line_around_and_far_plans_say_little() -> None:
    misled = expectation([candidate(0.01, 25.0), candidate(0.001, 15.0)], 20.0)
    assert misled(30.0) > misled(20.0)
    near, far = candidate(0.01, 18.0), candidate(0.1, -60.0)
    assert expectation([near, far], 20.0)(20.0) == pytest.approx(18.0, abs=1.0)


@pytest.mark.parametrize(("nanoseconds", "is_tried"), [(0.9e6, True), (0.995e6, False), (1.1e6, False)])
def test_a_plan_that_hardly_gains_time_is_not_worth_trying(nanoseconds: float, is_tried: bool) -> None:
    faithful = candidate(0.1, 20.0)
    one = replace(faithful.assignment, nanoseconds=nanoseconds)
    assert is_worth_trying(one, faithful.assignment) is is_tried


def test_of_plans_as_fast_the_most_faithful_is_taken() -> None:
    quick, quiet = candidate(0.1, 20.0, 2.0), candidate(0.1, 30.0, 1.97)
    assert fastest([quick, quiet, candidate(0.1, 40.0, 1.5)]) is quiet


def test_plans_of_one_effect_are_told_once_as_they_were_measured_last() -> None:
    first, again, other = candidate(0.1, 20.0), candidate(0.1, 20.0, 2.0), candidate(0.1, 30.0, mode=Mode.FLOAT)
    assert list(distinct([first, again, other])) == [first, other]
    found = points([first, again, other], other)
    assert {(point.static, point.speed, point.chosen) for point in found} == {(1, 2.0, False), (0, None, True)}


@pytest.mark.parametrize(("low", "high", "found"), [(0, 5, 3), (0, 3, 2), (3, 5, 4), (1, 2, 1)])
def test_halfway_is_told_by_time_and_not_by_how_many_there_are(low: int, high: int, found: int) -> None:
    times = [10.0, 11.0, 12.0, 19.0, 20.0, 21.0]
    assert halfway(lambda index: Assignment(frozenset(), {}, times[index], 0.0), low, high) == found
