"""Plans that were weighed: what was expected of them, and what was measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.config.scheme import Mode
from onnxq.numerics.affine import decibels
from onnxq.planning.plan import Plan
from onnxq.search.alternatives import Way
from onnxq.search.prices import Assignment
from onnxq.search.search import Point

# Of short timings, a difference of so little says nothing.
_SAME_SPEED = 0.98
# A plan that is expected to take less than a faithful one, but more than this part of it, is not worth a model.
_HARDLY_FASTER = 0.98
# What is trusted of a plan may lie below every number.
_LOWEST_SQNR = -100.0
# A plan that is so many decibels from the goal counts half of one that has just reached it.
_NEAR = 3.0
# How spread in decibels, squared, plans have to be to say half of how much more is trusted for each that is predicted.
_PRIOR = 2.0
# Between these: luck must not turn the line around.
_FLATTEST, _STEEPEST = 0.25, 4.0


@dataclass(frozen=True)
class Candidate:
    """An assignment with its plan, how it was found, and what was measured of it.

    Attributes:
        assignment: which nodes run how.
        plan: what carries it out.
        weight: nanoseconds that a noise-to-signal ratio of one was worth.
        without: what nodes were not allowed to be.
        predicted: SQNR in decibels that was expected of the worst output before it was measured; None where nothing
            was known of its noise.
        sqnr: SQNR in decibels that the worst output can be trusted to have.
        speed: how many times as fast as the float model.
    """

    assignment: Assignment
    plan: Plan
    weight: float
    without: frozenset[Way]
    predicted: float | None = None
    sqnr: float | None = None
    speed: float | None = None


def expectation(measured: Iterable[Candidate], goal: float) -> Callable[[float], float]:
    """Return what tells the SQNR that a plan can be expected to be trusted with from what is predicted of it.

    Codes that err alike make more noise together than alone, what an output is trusted with is less than what was seen
    of it, and behind a Softmax or Sigmoid noise grows slower than in front. A line through the measured plans tells all
    of these, and is less misled by the luck of one of them: least squares, plans far from the goal counting less, and
    with few of them, or none that differ, a decibel more for each that is predicted (ridge regression).

    Args:
        measured: plans whose models were run.
        goal: SQNR in decibels.
    """
    known = [
        (decibels(one.assignment.noise), max(one.sqnr, _LOWEST_SQNR))
        for one in measured
        if one.sqnr is not None and one.sqnr < math.inf and one.assignment.noise > 0
    ]
    if not known:
        return lambda predicted: predicted
    alone, seen = np.array(known).T
    weights = 1 / (1 + np.square((seen - goal) / _NEAR))
    weights /= weights.sum()
    centre, height = float(weights @ alone), float(weights @ seen)
    off = alone - centre
    steepness = float(weights @ (off * (seen - height)) + _PRIOR) / float(weights @ np.square(off) + _PRIOR)
    steepness = min(max(steepness, _FLATTEST), _STEEPEST)
    return lambda predicted: height + steepness * (predicted - centre)


def expected_at(assigned: Callable[[int], Assignment], trusted: Callable[[float], float], index: int) -> float:
    """Return the SQNR in decibels that is expected of one of some assignments.

    Args:
        assigned: they, by their places.
        trusted: what is expected of what is predicted, see `expectation`.
        index: of the one.
    """
    return trusted(decibels(assigned(index).noise))


def is_worth_trying(one: Assignment, faithful: Assignment) -> bool:
    """Whether an assignment is expected to be so much faster than a faithful one that it is seen."""
    return one.nanoseconds < _HARDLY_FASTER * faithful.nanoseconds


def halfway(assigned: Callable[[int], Assignment], low: int, high: int) -> int:
    """Return which assignment between two takes a time that is nearest to halfway between theirs, from above."""
    middle = (assigned(low).nanoseconds + assigned(high).nanoseconds) / 2
    found = bisect_left(range(low + 1, high), middle, key=lambda index: assigned(index).nanoseconds) + low + 1
    return min(found, high - 1)


def fastest(timed: Sequence[Candidate]) -> Candidate:
    """Return the fastest, or the most faithful one of those that are not told from it by their speed."""
    most = max(one.speed or 0.0 for one in timed)
    alike = (one for one in timed if (one.speed or 0.0) >= _SAME_SPEED * most)
    return max(alike, key=lambda one: one.sqnr or -math.inf)


def distinct(tried: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the first of each that make the same model."""
    seen = set()
    for one in tried:
        if one.plan.effect not in seen:
            seen.add(one.plan.effect)
            yield one


def points(tried: Iterable[Candidate], best: Candidate) -> tuple[Point, ...]:
    """Return what to tell of plans, by expected time; of those that make the same model the last."""
    known: dict[object, Point] = {}
    for one in tried:
        known[one.plan.effect] = Point(
            one.plan.count(Mode.STATIC),
            one.plan.count(Mode.DYNAMIC),
            one.assignment.nanoseconds / 1e6,
            one.sqnr,
            one.speed,
            one.plan.effect == best.plan.effect,
            one.plan.count(Mode.WEIGHT_ONLY),
            one.predicted,
        )
    return tuple(sorted(known.values(), key=lambda point: point.milliseconds))
