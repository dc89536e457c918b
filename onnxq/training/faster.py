"""A plan that is faster than the fastest faithful one, and faithful once it was trained."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.accuracy.refining import Refined
from onnxq.budget import Budget
from onnxq.deadline import NEVER
from onnxq.engines.engine import Engine
from onnxq.judging.goal import Goal
from onnxq.searching.choosing import Chosen
from onnxq.searching.cost_cache import CostCache
from onnxq.steps import Evidenced, Prepared, chosen
from onnxq.training.settings import Training
from onnxq.training.step import trained

# What training gives back at least, as a rule.
_BELOW = 4.0


@dataclass(frozen=True, eq=False)
class Faster:
    """What is to be written after all.

    Attributes:
        refined: what its codes rest on.
        chosen: the plan, and what its model does.
        doubts: sentences about what could not be learned, and why nothing was gained.
    """

    refined: Refined
    chosen: Chosen
    doubts: tuple[str, ...] = ()


def faster(
    model: Prepared,
    seen: Evidenced,
    first: tuple[Refined, Chosen],
    goal: Goal,
    budget: Budget,
    training: Training,
    known: CostCache,
    engine: Engine | None = None,
) -> Faster:
    """Search for the fastest plan that is just not faithful enough, train it, and take it where it is faithful then.

    Its model, or that of the plan that was there, is built where the model is staged.

    Args:
        model: the float model.
        seen: the samples to learn from, and those by which all models are judged.
        first: the fastest plan that is faithful without training, and what its codes rest on.
        goal: how faithful a model has to be.
        budget: what may be spent on the search, without methods whose factors training does not keep.
        training: how.
        known: node times.
        engine: what times models of another target.
    """
    before = first[1]
    reached = goal.min_sqnr if goal.metric is None else before.verification.agreement.worst_sqnr
    lower = Goal(min(reached, before.verification.agreement.worst_sqnr) - _BELOW, force=True)
    less, found = chosen(model, seen, lower, budget, known, NEVER, engine)
    if found.outcome.plan.effect == before.outcome.plan.effect or not _is_faster(found, before):
        return _as_before(model, seen, first, "no plan is faster that training could make faithful")
    after, told = trained(model, seen, less, found, goal, budget, training, None)
    if not _is_faithful(after, goal):
        sqnr = after.verification.agreement.worst_sqnr
        why = f"a faster plan had {sqnr:.1f} dB after training, which are not enough, so it was not taken"
        return _as_before(model, seen, first, why)
    if not _is_faster(after, before):
        return _as_before(model, seen, first, "a plan that was trained is not faster after all, so it was not taken")
    return Faster(less, after, told)


def _is_faster(one: Chosen, other: Chosen) -> bool:
    latency, before = one.verification.latency, other.verification.latency
    return latency is not None and before is not None and latency.speed > before.speed


def _is_faithful(found: Chosen, goal: Goal) -> bool:
    if goal.metric is None:
        return found.lacks(goal) == 0
    return found.scores is not None and found.scores.is_trusted(goal.max_drop)


def _as_before(model: Prepared, seen: Evidenced, first: tuple[Refined, Chosen], why: str) -> Faster:
    """Return the plan that was there, whose model is built again."""
    (refined, before), files = first, model.files
    bench, plan = seen.bench, before.outcome.plan
    codes = before.codes or bench.codes_of(plan, refined.basis.evidence, before.recipe)
    bench.write(plan, codes, files.staged, external_data=files.external_data)
    return Faster(refined, before, (why,))
