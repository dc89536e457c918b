"""Which factors of channels a model can afford: those that cost it no time, or that fidelity needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from onnxq.accuracy.refining import Refined
from onnxq.encoding.folding import costly, folded
from onnxq.encoding.range_choice import pooled
from onnxq.encoding.recipe import Recipe
from onnxq.numbers.ratios import decibels
from onnxq.planning.plan import Plan
from onnxq.searching.laboratory import Laboratory
from onnxq.trials import Trials

# Less than 5 % is not seen in so short a time.
_NO_SLOWER = 0.95
# Models that tell which of the factors fidelity needs; of more groups so few tell little.
_TRIED = 12


def affordable(laboratory: Laboratory, plan: Plan, refined: Refined, aim: float) -> Refined:
    """Return what was refined with all factors of channels, with those that cost no node or fidelity needs, or none.

    Where floats become codes or codes floats, factors keep kernels from being the fastest there are. With all of them,
    with those that cost no node, and with none: the first of the three that costs no time is taken; where that misses
    the aim, the first that does not; then all but those that fidelity does not need. Where that misses the aim too, it
    is the most faithful of those with which the model is faster than in float.

    Args:
        laboratory: builds, times and judges.
        plan: the one in which as much is integer as the scheme allows.
        refined: how its codes are chosen best.
        aim: how faithful the model has to be, in decibels.
    """
    if refined.unmigrated is None:
        return refined
    trials, every, none = laboratory.trials, refined.basis.recipe, refined.unmigrated
    graph = trials.bench.graph
    some = replace(every, migration=folded(graph, plan, every.migration))
    recipes = list({recipe.migration.key: recipe for recipe in (every, some, none)}.values())
    speeds = laboratory.speeds_of([trials.candidate(plan, recipe).path for recipe in recipes])
    quick = [speed >= _NO_SLOWER * speeds[-1] for speed in speeds]
    if quick[0]:
        return refined
    taken = next((one for one in compress(recipes, quick) if trials.sqnr(plan, one) >= aim), None)
    if taken is None:
        taken = recipes[0] = _needed(trials, plan, every, costly(graph, plan, every.migration), aim)
    if trials.sqnr(plan, taken) < aim:
        # The less there is to be left in float until the aim is reached, the more time is there to be paid with.
        paying = [recipe for recipe, speed in zip(recipes, speeds, strict=True) if speed > 1]
        taken = max(paying or compress(recipes, quick), key=lambda one: trials.sqnr(plan, one))
    if taken is every:
        return refined
    reached = decibels(pooled(trials.noise(plan, taken))) if taken.migration.factors else math.nan
    return refined.with_factors_of(taken, reached, f"the model is {max(speeds) / speeds[0]:.2f}x as fast without")


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
