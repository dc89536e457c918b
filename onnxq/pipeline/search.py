"""The third step: a plan is chosen by measuring, and its model built and verified."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxq.errors import tolerate
from onnxq.evaluation.goal import Goal, plenty_of
from onnxq.evaluation.verification import Verifier
from onnxq.passes.preparing.preparation import makes_variants
from onnxq.pipeline.calibrate import CalibratedModel, accuracy_tried, initial_config
from onnxq.pipeline.request import Budget
from onnxq.search.attempts import apply_scheme
from onnxq.search.context import SearchContext, SearchResult
from onnxq.search.cross_validation import CrossValidator
from onnxq.search.evaluator import CandidateSamples
from onnxq.search.refinement import RefinedEncoding
from onnxq.system.resources import NEVER, Deadline


@dataclass(frozen=True, eq=False)
class SearchedModel:
    """What is to be written, whose model stands where it is staged.

    Attributes:
        seen: the calibrated model that it was chosen for.
        refined: what the encodings rest on.
        chosen: the plan, and what its model does.
        warnings: sentences about what could not be done.
    """

    seen: CalibratedModel
    refined: RefinedEncoding
    chosen: SearchResult
    warnings: tuple[str, ...] = ()

    @property
    def is_slowed_by_variants(self) -> bool:
        """Whether it is slower than float, perhaps by what operators became for integer kernels.

        A plan to carry out has the forms that it was made for.
        """
        model = self.seen.model
        slower = any(one.slower and one.significant for one in self.chosen.verification.latencies)
        return slower and model.replay is None and makes_variants(model.bench.making.applied)

    def with_search_of(self, other: SearchedModel) -> SearchedModel:
        """Return the same with what the search of another attempt measured, none of whose plans was taken."""
        searched = other.chosen.outcome
        outcome = replace(
            self.chosen.outcome,
            measured=self.chosen.outcome.measured + searched.measured,
            sensitivities=searched.sensitivities,
            frontier=tuple(replace(point, chosen=False) for point in searched.frontier),
        )
        return replace(self, chosen=replace(self.chosen, outcome=outcome))


def search_for_plan(seen: CalibratedModel, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> SearchedModel:
    """Choose encodings and which plan is carried out, and build and verify its model."""
    model, chooser = seen.model, open_search(seen, goal, budget, deadline)
    if model.replay is not None:
        from onnxq.search.weight_methods import replay

        basis = replay(CrossValidator(chooser.evaluator, seen.samples), seen.plan, seen.statistics)
        model.ahead.check()
        chooser = chooser.with_statistics(basis.statistics)
        return SearchedModel(seen, RefinedEncoding(basis), chooser.follow(seen.plan, basis.config))
    accuracy = accuracy_tried(model, budget)
    refined = chooser.refined(seen.plan, initial_config(model), accuracy, plenty_of(goal))
    model.ahead.check()
    chooser = chooser.with_statistics(refined.basis.statistics)
    if budget.effort is None:
        found = apply_scheme(chooser, seen.plan, refined.basis.config, goal, tables="embeddings" in accuracy.methods)
    else:
        from onnxq.search.attempts import search_plan

        with tolerate("the search for factors of channels that cost no time"):
            refined = chooser.drop_costly_scales(seen.plan, refined, goal)
        given = chooser, seen.plan, refined.basis.config, budget.effort, goal
        found = search_plan(*given, is_stored=model.is_stored)
    return SearchedModel(seen, refined, found)


def open_search(seen: CalibratedModel, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> SearchContext:
    """Return what chooses encodings and plans by measuring; node times are added to those that are known."""
    model, verifier = seen.model, verifier_for(seen, goal, budget, deadline)
    bench, samples = seen.bench, seen.samples
    panel = CandidateSamples(
        model.files.reference, bench.prepared, samples, accuracy_tried(model, budget).evaluation_samples(len(samples))
    )
    given = verifier, seen.statistics, budget.progress, panel, model.costs
    return SearchContext(bench, model.files, samples, *given)


def verifier_for(seen: CalibratedModel, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> Verifier:
    """Return what judges the models that are built."""
    model = seen.model
    # The time of another runtime tells nothing of the target's.
    timed = budget.latency_seconds if model.target_engine.engine is not None else 0.0
    verifier = Verifier.of(model.files.reference, seen.holdout, timed, goal.own_metric)
    engines = model.target_engine.caching(seen.bench.prepared.parent)
    return replace(verifier, deadline=deadline, engines=engines, prepared=seen.bench.prepared)
