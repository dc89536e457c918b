"""Which factors of channels a model can afford: those that cost it no time, or that fidelity needs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import compress

from onnxq.accuracy.refining import Refined
from onnxq.encoding.folding import folded
from onnxq.encoding.range_choice import pooled
from onnxq.numbers.ratios import decibels
from onnxq.planning.plan import Plan
from onnxq.searching.laboratory import Laboratory

# Less than 5 % is not seen in so short a time.
_NO_SLOWER = 0.95


def affordable(laboratory: Laboratory, plan: Plan, refined: Refined, aim: float) -> Refined:
    """Return what was refined with all factors of channels, with those that cost no node, or with none.

    Where floats become codes or codes floats, factors keep kernels from being the fastest there are. The first of the
    three that costs no time is taken; where that misses the aim, the first that does not; where all miss it, the most
    faithful of those with which the model is faster than in float.

    Args:
        laboratory: builds, times and judges.
        plan: the one in which as much is integer as the scheme allows.
        refined: how its codes are chosen best.
        aim: how faithful the model has to be, in decibels.
    """
    if refined.unmigrated is None:
        return refined
    trials, every, none = laboratory.trials, refined.basis.recipe, refined.unmigrated
    some = replace(every, migration=folded(trials.bench.graph, plan, every.migration))
    recipes = list({recipe.migration.key: recipe for recipe in (every, some, none)}.values())
    speeds = laboratory.speeds_of([trials.candidate(plan, recipe).path for recipe in recipes])
    quick = [speed >= _NO_SLOWER * speeds[-1] for speed in speeds]
    if quick[0]:
        return refined
    faithful = (one for one in (*compress(recipes, quick), every) if trials.sqnr(plan, one) >= aim)
    taken = next(faithful, None)
    if taken is None:
        # The less there is to be left in float until the aim is reached, the more time is there to be paid with.
        paying = [recipe for recipe, speed in zip(recipes, speeds, strict=True) if speed > 1]
        taken = max(paying or compress(recipes, quick), key=lambda one: trials.sqnr(plan, one))
    if taken is every:
        return refined
    reached = decibels(pooled(trials.noise(plan, taken))) if taken is some else math.nan
    return refined.with_factors_of(taken, reached, f"the model is {max(speeds) / speeds[0]:.2f}x as fast without")
