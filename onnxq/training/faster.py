"""A plan that is faster than the fastest faithful one, and faithful once it was trained."""

from __future__ import annotations

from dataclasses import replace

from onnxq.budget import Budget
from onnxq.judging.goal import Goal
from onnxq.searching.choosing import Chosen
from onnxq.steps import Evidenced, Prepared, Settled, settled
from onnxq.training.settings import Training
from onnxq.training.step import trained

# What training gives back at least, as a rule.
_BELOW = 4.0


def faster(model: Prepared, seen: Evidenced, first: Settled, goal: Goal, budget: Budget, training: Training) -> Settled:
    """Search for the fastest plan that is just not faithful enough, train it, and take it where it is faithful then.

    Its model, or that of the plan that was there, is built where the model is staged.

    Args:
        model: the float model.
        seen: the samples to learn from, and those by which all models are judged.
        first: the fastest plan that is faithful without training.
        goal: how faithful a model has to be.
        budget: what may be spent on the search.
        training: how.
    """
    before = first.chosen
    worst = before.verification.agreement.worst_sqnr
    reached = worst if goal.metric is not None else min(goal.min_sqnr, worst)
    less = settled(model, seen, Goal(reached - _BELOW, force=True), budget)
    if less.chosen.outcome.plan.effect == before.outcome.plan.effect or not _is_faster(less.chosen, before):
        return _as_before(model, seen, first, "no plan is faster that training could make faithful")
    after = trained(model, seen, less, goal, budget, training, None)
    if not _is_faithful(after.chosen, goal):
        sqnr = after.chosen.verification.agreement.worst_sqnr
        why = f"a faster plan had {sqnr:.1f} dB after training, which are not enough, so it was not taken"
        return _as_before(model, seen, first, why)
    if not _is_faster(after.chosen, before):
        return _as_before(model, seen, first, "a plan that was trained is not faster after all, so it was not taken")
    return after


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
