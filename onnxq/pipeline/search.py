"""The search: a plan is chosen by measuring, and its model built and judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxq.evaluation.goal import Goal
from onnxq.evaluation.metrics import Scorer
from onnxq.evaluation.verification import Verifier
from onnxq.pipeline.calibrate import CalibratedModel, accuracy_tried, initial_config
from onnxq.pipeline.request import Budget
from onnxq.search.accuracy_methods import have_methods
from onnxq.search.candidate import Recipe, Workshop
from onnxq.search.results import SearchResult
from onnxq.search.search import Search
from onnxq.system.resources import NEVER, Deadline


@dataclass(frozen=True, eq=False)
class SearchedModel:
    """What is to be written.

    Attributes:
        seen: the calibrated model that it was chosen for.
        result: the chosen candidate, and what its model does.
        warnings: sentences about what could not be done.
    """

    seen: CalibratedModel
    result: SearchResult
    warnings: tuple[str, ...] = ()

    def with_search_of(self, other: SearchedModel) -> SearchedModel:
        """Return the same with what the search of another rung measured, none of whose plans was taken."""
        trail, before = self.result.trail, other.result.trail
        trail = replace(
            trail,
            measured=trail.measured + before.measured,
            rounds=trail.rounds + before.rounds,
            late=trail.late or before.late,
            sensitivities=before.sensitivities,
            frontier=tuple(replace(point, chosen=False) for point in before.frontier),
        )
        return replace(self, result=replace(self.result, trail=trail))


def search_for_plan(seen: CalibratedModel, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> SearchedModel:
    """Choose encodings and which plan is carried out, and build and judge its model."""
    model, search = seen.model, open_search(seen, goal, budget, deadline)
    model.ahead.check()
    if model.replay is not None:
        result = search.replayed(seen.plan)
    elif budget.effort is None:
        result = search.applied()
    else:
        result = search.run(stored=bool(model.form.stored_because))
    return SearchedModel(seen, result)


def open_search(seen: CalibratedModel, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> Search:
    """Return what a search is given; times that it measures are added to those that are known."""
    model, accuracy = seen.model, accuracy_tried(seen.model, budget)
    recipe = Recipe(initial_config(model), seen.statistics)
    # Without a search only methods compare candidates; then the float model need not run.
    compares = budget.effort is not None or have_methods(seen.plan, recipe, accuracy)
    workshop = Workshop.of(
        seen.bench,
        model.reference,
        seen.samples.fit,
        seen.statistics,
        model.result_name,
        count=accuracy.evaluation_samples(len(seen.samples.fit)) if compares else 0,
        external_data=model.external_data,
        progress=budget.progress,
    )
    return Search(
        workshop,
        seen.samples.fit,
        recipe,
        verifier_for(seen, goal, budget, deadline),
        model.reference,
        goal,
        budget.effort,
        accuracy,
        model.times,
        deadline,
    )


def verifier_for(seen: CalibratedModel, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> Verifier:
    """Return what judges the models that are built."""
    model = seen.model
    # The time of another runtime tells nothing of the target's.
    timed = budget.latency_seconds if model.target_engine.engine is not None else 0.0
    holdout, metric = seen.samples.holdout, goal.own_metric
    scorer = Scorer.of_holdout(metric, model.reference, holdout) if metric is not None else None
    engine = model.target_engine.caching(seen.bench.prepared.parent)
    return Verifier(model.reference, holdout, timed, scorer, deadline, engine, seen.bench.prepared)
