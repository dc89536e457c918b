"""A plan that is faster than the fastest faithful one, and faithful once it was trained."""

from __future__ import annotations

from dataclasses import replace

from onnxq.evaluation.goal import Goal
from onnxq.search.context import Chosen
from onnxq.steps.budget import Budget
from onnxq.steps.steps import Evidenced, Prepared, Settled, settled
from onnxq.training.settings import Training
from onnxq.training.step import trained

# What training gives back, as a rule; how much it is for a model is known once a plan of it was trained.
_BELOW = 2.0
_ATTEMPTS = 2
# Less is within what samples differ by.
_LEAST = 0.5


def faster(model: Prepared, seen: Evidenced, first: Settled, goal: Goal, budget: Budget, training: Training) -> Settled:
    """Search for the fastest plan that is just not faithful enough, train it, and take it where it is faithful then.

    What training gave back of the first plan is what the next one lacks: less, where the first was not faithful after
    all, or more, where it could have lacked more. Where a plan that lacks so little is no faster, the next lacks twice
    as much. The model of the plan that is taken, or of the one that was there, is built where the model is staged.

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
    best = staged = first
    gained = 0.0
    doubt = "no plan is faster that training could make faithful"
    for _ in range(_ATTEMPTS):
        staged = less = settled(model, seen, Goal(reached - below, force=True), budget)
        if not _is_other(less.chosen, best.chosen) or not _is_faster(less.chosen, best.chosen):
            if gained:
                break
            below *= 2
            continue
        staged = after = trained(model, seen, less, goal, budget, replace(training, minutes=minutes), None)
        gained = _decibels(after.chosen) - _decibels(less.chosen)
        if not _is_faithful(after.chosen, goal):
            sqnr = _decibels(after.chosen)
            doubt = f"a faster plan had {sqnr:.1f} dB after training, which are not enough, so it was not taken"
            if not _LEAST < gained < below:
                break
        elif not _is_faster(after.chosen, best.chosen):
            doubt = "a plan that was trained is not faster after all, so it was not taken"
            break
        else:
            best = after
            if gained < below + _LEAST:
                break
        below = gained
    if staged is not best:
        _build_again(model, seen, best)
    return best if best is not first else replace(first, doubts=(*first.doubts, doubt))


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


def _build_again(model: Prepared, seen: Evidenced, before: Settled) -> None:
    """Build what was settled where another model is staged."""
    bench, files, chosen = seen.runnable, model.files, before.chosen
    plan = chosen.outcome.plan
    codes = chosen.codes or bench.codes_of(plan, before.refined.basis.evidence, chosen.recipe)
    bench.write(plan, codes, files.staged, external_data=files.external_data)
