"""Plans that were weighed: what was expected of them, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onnxq.numbers.ratios import decibels
from onnxq.planning.plan import Plan
from onnxq.scheme import Mode
from onnxq.searching.alternatives import Way
from onnxq.searching.prices import Assignment
from onnxq.searching.search import Point

# Of short timings, a difference of so little says nothing.
_SAME_SPEED = 0.98
# What is trusted of a plan may lie below every number.
_LOWEST_SQNR = -100.0


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


def correction(measured: Iterable[Candidate], goal: float) -> float:
    """Return by how many decibels plans near a goal are better than the sums of what their codes make alone.

    Codes that err alike make more noise together, and what an output is trusted with is less than what was seen of it.
    The plan counts that came closest to the goal.

    Args:
        measured: plans whose models were run.
        goal: SQNR in decibels.
    """
    known = [
        (max(one.sqnr, _LOWEST_SQNR), decibels(one.assignment.noise))
        for one in measured
        if one.sqnr is not None and one.sqnr < math.inf and one.assignment.noise > 0
    ]
    seen, alone = min(known, key=lambda pair: abs(pair[0] - goal), default=(0.0, 0.0))
    return seen - alone


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
