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
from onnxq.judging.gate import Scores
from onnxq.judging.goal import Goal
from onnxq.judging.metrics import Metric, score
from onnxq.judging.verify import Verification, verify
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
from onnxq.trials import TRIED_SAMPLES, Trials
from onnxq.workbench import Workbench

# The samples that are to come are not those that were measured, so the search aims a little higher than the gate.
_HEADROOM = 1.0
# Aims beyond these, such as infinity, would say the same: nothing that is computed in float32, or anything finite.
_HIGHEST_AIM = 150.0
_LOWEST_AIM = -100.0
# Enough to tell candidates apart; the one that is taken is timed for longer.
_SEARCH_SECONDS = 1.0
# A metric falls as the noise rises, so the noisiest aim is tried first.
_METRIC_AIMS = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and what the model does that it makes."""

    recipe: Recipe
    outcome: Outcome
    verification: Verification
    scores: Scores | None
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True)
class Files:
    """Where the models lie.

    Attributes:
        reference: file of the float model.
        staged: where the model is built.
        external_data: whether its weights lie beside it.
    """

    reference: Path
    staged: Path
    external_data: bool


@dataclass(frozen=True, eq=False)
class Chooser:
    """What it takes to choose, build and verify once the evidence is there.

    Attributes:
        bench: plans and builds.
        files: the float model, and where the model is built.
        samples: those by which it is chosen.
        judged: those by which what was chosen is judged.
        evidence: of the plan's activations.
        seconds: time to spend on comparing latency; 0 leaves it out.
        progress: told of each stage.
        costs: node times that were measured before, to which new ones are added.
    """

    bench: Workbench
    files: Files
    samples: SampleSource
    judged: SampleSource
    evidence: Evidence
    seconds: float
    progress: Progress
    costs: CostCache = field(default_factory=CostCache)

    @cached_property
    def trials(self) -> Trials:
        """Candidates are tried on a few of the samples."""
        return Trials.of(self.bench, self.files.reference, evenly(self.samples, TRIED_SAMPLES), self.evidence)

    def with_evidence(self, evidence: Evidence) -> Chooser:
        """Return a chooser that builds from other evidence."""
        return self if evidence is self.evidence else replace(self, evidence=evidence)

    def refined(self, plan: Plan, recipe: Recipe, accuracy: Accuracy) -> Refined:
        """Return how the codes of a plan are chosen best, see `refine`."""
        basis = Basis(recipe, self.evidence)
        if not accuracy.methods:
            return Refined(basis)
        return refine(Folds(self.trials, self.samples), plan, basis, accuracy, self.progress)

    def follow(self, plan: Plan, recipe: Recipe, goal: Goal) -> Chosen:
        """Build what a plan and a recipe say, without a search."""
        outcome = Outcome(plan, (), 0)
        verification = self._built(outcome, recipe)
        return Chosen(recipe, outcome, verification, self._scores(goal.metric))

    def choose(self, plan: Plan, recipe: Recipe, effort: Effort, goal: Goal, last: Accuracy) -> Chosen:
        """Choose by measuring, and step back when the model turns out slower than float.

        Args:
            plan: what the scheme wants.
            recipe: how codes are chosen.
            effort: how much to measure.
            goal: how faithful the model has to be. Of a metric's plans the first that loses little enough is taken.
            last: what is tried for the accuracy of the plan that is chosen.
        """
        trials = self.trials
        aims = (_aim(goal.min_sqnr),) if goal.metric is None else _METRIC_AIMS
        for aim in aims:
            outcome = self._search(trials, recipe, effort, aim)
            refined = self.refined(outcome.plan, recipe, last)
            verification = self._built(outcome, refined.basis.recipe)
            latency = verification.latency
            if self._measurable and latency and verification.slower and outcome.plan.decodes:
                weighed = tuple(replace(point, chosen=False) for point in outcome.frontier)
                outcome = replace(self._stored(trials, recipe, outcome, plan, latency.speed, aim), frontier=weighed)
                refined = self.refined(outcome.plan, recipe, last)
                verification = self._built(outcome, refined.basis.recipe)
            scores = self._scores(goal.metric)
            if scores is None or scores.drop <= goal.max_drop:
                break
        return Chosen(refined.basis.recipe, outcome, verification, scores, refined.gains)

    def _stored(
        self, trials: Trials, recipe: Recipe, outcome: Outcome, plan: Plan, speed: float, aim: float
    ) -> Outcome:
        """Return a plan that computes in float: with the same codes where these are faithful, else searched."""
        same = self.bench.plan(as_stored(outcome.plan, plan, slower(speed)))
        if trials.sqnr(same, recipe) >= aim:
            return replace(outcome, plan=same, regions=())
        return self._quietest(trials, recipe, without_integers(self.bench.plan, plan, speed), aim)

    @property
    def _measurable(self) -> bool:
        """Whether latency is asked for, and this machine's tells anything about the target's."""
        return self.seconds > 0 and self.bench.target.name == DEFAULT_TARGET and not self.bench.is_large

    def _search(self, trials: Trials, recipe: Recipe, effort: Effort, aim: float) -> Outcome:
        if not self._measurable:
            return self._quietest(trials, recipe, self.bench.plan, aim)
        target = self.bench.target
        seconds = min(self.seconds, _SEARCH_SECONDS)
        laboratory = Laboratory(trials, recipe, self.files.reference, seconds, self.costs, self.progress)
        return find_fastest(laboratory, self.bench.graph, target, aim, effort, self.progress)

    def _quietest(self, trials: Trials, recipe: Recipe, planner: Planner, aim: float) -> Outcome:
        measure = partial(trials.sqnr, recipe=recipe)
        return leave_what_hurts(planner, measure, aim, self.progress, alone=not self.bench.is_large)

    def _built(self, outcome: Outcome, recipe: Recipe) -> Verification:
        self.bench.build(outcome.plan, self.evidence, recipe, self.files.staged, external_data=self.files.external_data)
        self.progress("verify", 0, 0)
        return verify(self.files.reference, self.files.staged, self.judged, seconds=self.seconds)

    def _scores(self, metric: Metric | None) -> Scores | None:
        if metric is None:
            return None
        found = (score(metric, open_session(path), self.judged) for path in (self.files.reference, self.files.staged))
        return Scores(metric.name, *found)


def _aim(min_sqnr: float) -> float:
    """Return the decibels to aim at, which noise can be weighed against."""
    return min(max(min_sqnr + _HEADROOM, _LOWEST_AIM), _HIGHEST_AIM)
