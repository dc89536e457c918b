"""Choosing by measuring: the range method and the plan that are faithful enough, checked on the model they make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from onnxq.accuracy.effort import Accuracy
from onnxq.accuracy.folds import Basis, Folds
from onnxq.accuracy.refining import Gain, Refined, refine
from onnxq.encoding.recipe import Recipe
from onnxq.evidence.evidence import Evidence
from onnxq.metrics import Metric, score
from onnxq.planning.plan import Plan
from onnxq.progress import Progress
from onnxq.runtime import open_session
from onnxq.samples.data import evenly
from onnxq.samples.inputs import SampleSource
from onnxq.searching.cost_cache import CostCache
from onnxq.searching.frontier import find_fastest
from onnxq.searching.laboratory import Laboratory
from onnxq.searching.measures import Effort
from onnxq.searching.search import Outcome, Planner, as_stored, leave_what_hurts, slower, without_integers
from onnxq.targets import DEFAULT_TARGET
from onnxq.trials import Trials
from onnxq.verify import Verification, verify
from onnxq.workbench import Workbench

# The samples that are to come are not those that were measured, so the search aims a little higher than the gate.
_HEADROOM = 1.0
# Goals beyond these, such as infinity, would say the same: nothing that is computed in float32, or anything finite.
_HIGHEST_GOAL = 150.0
_LOWEST_GOAL = -100.0
# Each costs time in every trial; the confidence bound allows for how few they are.
_SEARCH_SAMPLES = 16
# Enough to tell candidates apart; the one that is taken is timed for longer.
_SEARCH_SECONDS = 1.0
# A metric falls as the noise rises, so the noisiest goal is tried first.
_METRIC_GOALS = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)


@dataclass(frozen=True)
class Wish:
    """How faithful the model has to be.

    Attributes:
        min_sqnr: SQNR in decibels of the worst output; not asked for where there is a metric.
        metric: what else tells whether the model is good.
        max_drop: how much less than the float model's the metric may be.
    """

    min_sqnr: float
    metric: Metric | None = None
    max_drop: float = 0.0


@dataclass(frozen=True)
class Scores:
    """What a metric says of both models, on the calibration samples in their order.

    Attributes:
        name: of the metric.
        reference: of the float model.
        candidate: of the quantized model.
    """

    name: str
    reference: float
    candidate: float

    @property
    def drop(self) -> float:
        """How much less the quantized model's is."""
        return self.reference - self.candidate


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and what the model does that it makes."""

    recipe: Recipe
    outcome: Outcome
    verification: Verification
    scores: Scores | None
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True, eq=False)
class Chooser:
    """What it takes to choose, build and verify once the evidence is there.

    Attributes:
        bench: plans and builds.
        reference: file of the float model.
        samples: the data.
        evidence: of the plan's activations.
        staged: where the model is built.
        external_data: whether its weights lie beside it.
        seconds: time to spend on comparing latency; 0 leaves it out.
        progress: told of each stage.
        costs: node times that were measured before, to which new ones are added.
    """

    bench: Workbench
    reference: Path
    samples: SampleSource
    evidence: Evidence
    staged: Path
    external_data: bool
    seconds: float
    progress: Progress
    costs: CostCache = field(default_factory=CostCache)

    @cached_property
    def trials(self) -> Trials:
        """Candidates are tried on a few of the samples."""
        return Trials.of(self.bench, self.reference, evenly(self.samples, _SEARCH_SAMPLES), self.evidence)

    def with_evidence(self, evidence: Evidence) -> Chooser:
        """Return a chooser that builds from other evidence."""
        return self if evidence is self.evidence else replace(self, evidence=evidence)

    def refined(self, plan: Plan, recipe: Recipe, accuracy: Accuracy) -> Refined:
        """Return how the codes of a plan are chosen best, see `refine`."""
        basis = Basis(recipe, self.evidence)
        if not accuracy.methods:
            return Refined(basis)
        return refine(Folds(self.trials, self.samples), plan, basis, accuracy, self.progress)

    def follow(self, plan: Plan, recipe: Recipe, wish: Wish) -> Chosen:
        """Build what a plan and a recipe say, without a search."""
        outcome = Outcome(plan, (), 0)
        verification = self._built(outcome, recipe)
        return Chosen(recipe, outcome, verification, self._scores(wish.metric))

    def choose(self, plan: Plan, recipe: Recipe, effort: Effort, wish: Wish, last: Accuracy) -> Chosen:
        """Choose by measuring, and step back when the model turns out slower than float.

        Args:
            plan: what the scheme wants.
            recipe: how codes are chosen.
            effort: how much to measure.
            wish: how faithful the model has to be. Of a metric's plans the first that loses little enough is taken.
            last: what is tried for the accuracy of the plan that is chosen.
        """
        trials = self.trials
        goals = (_goal(wish.min_sqnr),) if wish.metric is None else _METRIC_GOALS
        for goal in goals:
            outcome = self._search(trials, recipe, effort, goal)
            refined = self.refined(outcome.plan, recipe, last)
            verification = self._built(outcome, refined.basis.recipe)
            latency = verification.latency
            if self._measurable and latency and verification.slower and outcome.plan.decodes:
                weighed = tuple(replace(point, chosen=False) for point in outcome.frontier)
                outcome = replace(self._stored(trials, recipe, outcome, plan, latency.speed, goal), frontier=weighed)
                refined = self.refined(outcome.plan, recipe, last)
                verification = self._built(outcome, refined.basis.recipe)
            scores = self._scores(wish.metric)
            if scores is None or scores.drop <= wish.max_drop:
                break
        return Chosen(refined.basis.recipe, outcome, verification, scores, refined.gains)

    def _stored(
        self, trials: Trials, recipe: Recipe, outcome: Outcome, plan: Plan, speed: float, goal: float
    ) -> Outcome:
        """Return a plan that computes in float: with the same codes where these are faithful, else searched."""
        same = self.bench.plan(as_stored(outcome.plan, plan, slower(speed)))
        if trials.sqnr(same, recipe) >= goal:
            return replace(outcome, plan=same, regions=())
        return self._quietest(trials, recipe, without_integers(self.bench.plan, plan, speed), goal)

    @property
    def _measurable(self) -> bool:
        """Whether latency is asked for, and this machine's tells anything about the target's."""
        return self.seconds > 0 and self.bench.target.name == DEFAULT_TARGET and not self.bench.is_large

    def _search(self, trials: Trials, recipe: Recipe, effort: Effort, goal: float) -> Outcome:
        if not self._measurable:
            return self._quietest(trials, recipe, self.bench.plan, goal)
        target = self.bench.target
        seconds = min(self.seconds, _SEARCH_SECONDS)
        laboratory = Laboratory(trials, recipe, self.reference, seconds, self.costs, self.progress)
        return find_fastest(laboratory, self.bench.graph, target, goal, effort, self.progress)

    def _quietest(self, trials: Trials, recipe: Recipe, planner: Planner, goal: float) -> Outcome:
        measure = partial(trials.sqnr, recipe=recipe)
        return leave_what_hurts(planner, measure, goal, self.progress, alone=not self.bench.is_large)

    def _built(self, outcome: Outcome, recipe: Recipe) -> Verification:
        self.bench.build(outcome.plan, self.evidence, recipe, self.staged, external_data=self.external_data)
        self.progress("verify", 0, 0)
        return verify(self.reference, self.staged, self.samples, seconds=self.seconds)

    def _scores(self, metric: Metric | None) -> Scores | None:
        if metric is None:
            return None
        found = (score(metric, open_session(path), self.samples) for path in (self.reference, self.staged))
        return Scores(metric.name, *found)


def _goal(min_sqnr: float) -> float:
    """Return the decibels to aim at, which noise can be weighed against."""
    return min(max(min_sqnr + _HEADROOM, _LOWEST_GOAL), _HIGHEST_GOAL)
