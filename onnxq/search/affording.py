"""Which factors of channels a model can afford: those that cost it no time, or that fidelity needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from onnxq.algorithms.folding import costly, folded
from onnxq.algorithms.range_choice import pooled
from onnxq.algorithms.recipe import Recipe
from onnxq.numerics.affine import decibels
from onnxq.planning.plan import Plan
from onnxq.search.laboratory import Laboratory
from onnxq.search.refining import Refined
from onnxq.search.trials import Trials

# Less is not seen in so short a time.
_NO_SLOWER = 0.98
# Where a model misses its aim by so many decibels, most of it stays in float, and the search weighs what factors cost.
_FAR = 3.0
# Models that tell which of the factors fidelity needs; of more groups so few tell little.
_TRIED = 12


def affordable(laboratory: Laboratory, plan: Plan, refined: Refined, aim: float) -> Refined:
    """Return what was refined with all factors of channels, or without those that cost time and fidelity does not need.

    Where floats become codes or codes floats, factors keep kernels from being the fastest there are; those that cost no
    node cost no time. The latter alone are taken where the model is more faithful so, and all are kept where it is as
    fast with them; else the latter are taken, where these miss the aim all but those that fidelity does not need, and
    where that misses it too, the more faithful of both with which the model is faster than in float. All are kept too
    where the model is far from the aim with them.

    Args:
        laboratory: builds, times and judges.
        plan: the one in which as much is integer as the scheme allows.
        refined: how its codes are chosen best.
        aim: how faithful the model has to be, in decibels.
    """
    if refined.unmigrated is None:
        return refined
    trials, every = laboratory.trials, refined.basis.recipe
    graph = trials.bench.graph
    free = folded(graph, plan, every.migration)
    if free.key == every.migration.key or trials.sqnr(plan, every) < aim - _FAR:
        return refined
    fewer = replace(every, migration=free) if free.factors else refined.unmigrated
    if trials.sqnr(plan, fewer) > trials.sqnr(plan, every):
        return _with(trials, plan, refined, fewer, "the model is more faithful without")
    speeds = laboratory.speeds_of([trials.candidate(plan, recipe).path for recipe in (every, fewer)])
    # Without times nothing says that any factors cost time.
    if any(map(math.isnan, speeds)) or speeds[0] >= _NO_SLOWER * speeds[1]:
        return refined
    taken = fewer
    if trials.sqnr(plan, fewer) < aim:
        taken = _needed(trials, plan, every, costly(graph, plan, every.migration), aim)
    if trials.sqnr(plan, taken) < aim:
        # The less there is to be left in float until the aim is reached, the more time is there to be paid with.
        paying = [recipe for recipe, speed in zip((taken, fewer), speeds, strict=True) if speed > 1]
        taken = max(paying or [fewer], key=lambda one: trials.sqnr(plan, one))
    if taken is every:
        return refined
    return _with(trials, plan, refined, taken, f"the model is {speeds[1] / speeds[0]:.2f}x as fast without")


def _with(trials: Trials, plan: Plan, refined: Refined, taken: Recipe, reason: str) -> Refined:
    """Return what was refined with the factors of a recipe, and why without the others."""
    reached = decibels(pooled(trials.noise(plan, taken))) if taken.migration.factors else math.nan
    return refined.with_factors_of(taken, reached, reason)


def _needed(trials: Trials, plan: Plan, every: Recipe, groups: Sequence[frozenset[str]], aim: float) -> Recipe:
    """Return a recipe without the factors that fidelity does not need, as far as a few models tell.

    What goes is told by halves, the larger parts first: a part goes whole where the aim is reached without it, or
    nothing is lost; else one half of it is tried after the other.

    Args:
        trials: build and judge.
        plan: what becomes of each node.
        every: with all factors.
        groups: tensors whose factors cost time, those together that have them together or not at all; where there are
            many, all are kept.
        aim: how faithful the model has to be, in decibels.
    """
    kept, pending = every, deque([groups] if 0 < len(groups) <= _TRIED else [])
    for _ in range(_TRIED):
        if not pending:
            break
        part = pending.popleft()
        left = kept.migration.factors.keys() - frozenset().union(*part)
        other = replace(kept, migration=kept.migration.select(left))
        if trials.sqnr(plan, other) >= min(aim, trials.sqnr(plan, kept)):
            kept = other
        elif len(part) > 1:
            middle = len(part) // 2
            pending += (part[:middle], part[middle:])
    return kept
