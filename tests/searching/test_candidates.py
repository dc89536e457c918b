"""What is expected of plans, and which of those that were measured are told."""

from __future__ import annotations

import math

import pytest

from onnxq.planning.plan import Decision, Plan
from onnxq.scheme import Mode
from onnxq.searching.candidates import Candidate, correction, distinct, fastest, points
from onnxq.searching.prices import Assignment


def candidate(
    noise: float, sqnr: float | None = None, speed: float | None = None, mode: Mode = Mode.STATIC
) -> Candidate:
    plan = Plan((Decision("a", "Conv", mode, "why"),), (), "int8", "onnxruntime-cpu")
    return Candidate(Assignment(frozenset(), {}, 1e6, noise), plan, 0.0, frozenset(), sqnr=sqnr, speed=speed)


def test_the_plan_nearest_to_the_goal_says_how_far_sums_are_off() -> None:
    measured = [candidate(0.01, 15.0), candidate(0.001, 28.0), candidate(0.0, math.inf), candidate(0.001)]
    assert correction(measured, 16.0) == pytest.approx(-5.0)
    assert correction(measured, 25.0) == pytest.approx(-2.0)
    assert correction(measured[2:], 25.0) == 0.0
    assert correction([candidate(0.01, -math.inf)], 20.0) == -120.0


def test_of_plans_as_fast_the_most_faithful_is_taken() -> None:
    quick, quiet = candidate(0.1, 20.0, 2.0), candidate(0.1, 30.0, 1.97)
    assert fastest([quick, quiet, candidate(0.1, 40.0, 1.5)]) is quiet


def test_plans_of_one_effect_are_told_once_as_they_were_measured_last() -> None:
    first, again, other = candidate(0.1, 20.0), candidate(0.1, 20.0, 2.0), candidate(0.1, 30.0, mode=Mode.FLOAT)
    assert list(distinct([first, again, other])) == [first, other]
    found = points([first, again, other], other)
    assert {(point.static, point.speed, point.chosen) for point in found} == {(1, 2.0, False), (0, None, True)}
