"""A plan that is faster than the fastest faithful one, and faithful once it was trained."""

from __future__ import annotations

from dataclasses import replace

from onnxq.budget import Budget
from onnxq.judging.goal import Goal
from onnxq.searching.choosing import Chosen
from onnxq.steps import Evidenced, Prepared, Settled, settled
from onnxq.training.settings import Training
from onnxq.training.step import trained

# What training gives back at most, as a rule; how much it is for a model is known once a plan of it was trained.
_BELOW = 4.0
_ATTEMPTS = 2
# Less is within what samples differ by.
_LEAST = 0.5


def faster(model: Prepared, seen: Evidenced, first: Settled, goal: Goal, budget: Budget, training: Training) -> Settled:
    """Search for the fastest plan that is just not faithful enough, train it, and take it where it is faithful then.

    Where training does not give back what that plan lacks, the next one lacks no more than what it gave back. The model
    of the plan that is taken, or of the one that was there, is built where the model is staged.

    Args:
        model: the float model.
        seen: the samples to learn from, and those by which all models are judged.
        first: the fastest plan that is faithful without training.
        goal: how faithful a model has to be.
        budget: what may be spent on each search.
        training: how; each attempt has an equal part of its minutes.
    """
    worst, below = _decibels(first.chosen), _BELOW
    reached = worst if goal.metric is not None else min(goal.min_sqnr, worst)
    minutes = None if training.minutes is None else training.minutes / _ATTEMPTS
    doubt = "no plan is faster that training could make faithful"
    for _ in range(_ATTEMPTS):
        less = settled(model, seen, Goal(reached - below, force=True), budget)
        if not _is_other(less.chosen, first.chosen) or not _is_faster(less.chosen, first.chosen):
            break
        after = trained(model, seen, less, goal, budget, replace(training, minutes=minutes), None)
        if _is_faithful(after.chosen, goal):
            if _is_faster(after.chosen, first.chosen):
                return after
            doubt = "a plan that was trained is not faster after all, so it was not taken"
            break
        sqnr, gained = _decibels(after.chosen), _decibels(after.chosen) - _decibels(less.chosen)
        doubt = f"a faster plan had {sqnr:.1f} dB after training, which are not enough, so it was not taken"
        if not _LEAST < gained < below:
            break
        below = gained
    return _as_before(model, seen, first, doubt)


def _decibels(found: Chosen) -> float:
    return found.verification.agreement.worst_sqnr


def _is_other(one: Chosen, other: Chosen) -> bool:
    return one.outcome.plan.effect != other.outcome.plan.effect


def _is_faster(one: Chosen, other: Chosen) -> bool:
    latency, before = one.verification.latency, other.verification.latency
    return latency is not None and before is not None and latency.speed > before.speed


def _is_faithful(found: Chosen, goal: Goal) -> bool:
    if goal.metric is None:
        return found.lacks(goal) == 0
    return found.scores is not None and found.scores.is_trusted(goal.max_drop)


def _as_before(model: Prepared, seen: Evidenced, first: Settled, why: str) -> Settled:
    """Return the plan that was there, whose model is built again."""
    before, bench, files = first.chosen, seen.runnable, model.files
    plan = before.outcome.plan
    codes = before.codes or bench.codes_of(plan, first.refined.basis.evidence, before.recipe)
    bench.write(plan, codes, files.staged, external_data=files.external_data)
    return replace(first, doubts=(*first.doubts, why))
