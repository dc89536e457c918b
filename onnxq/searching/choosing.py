"""Choosing by measuring: the range method and the plan that are faithful enough, checked on the model they make."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from onnxq.accuracy.effort import Accuracy
from onnxq.accuracy.folds import Basis, Folds
from onnxq.accuracy.refining import Gain, Refined, refine
from onnxq.deadline import NEVER
from onnxq.encoding.codes import Codes
from onnxq.encoding.recipe import Recipe
from onnxq.evidence.evidence import Evidence
from onnxq.judging.goal import Goal
from onnxq.judging.judge import Judge
from onnxq.judging.scoring import Scores
from onnxq.judging.verify import COMPARED_SAMPLES, Verification
from onnxq.planning.plan import Plan
from onnxq.progress import Progress
from onnxq.samples.data import evenly
from onnxq.samples.inputs import Sample, SampleSource
from onnxq.searching.affording import affordable
from onnxq.searching.cost_cache import CostCache
from onnxq.searching.frontier import find_fastest
from onnxq.searching.laboratory import TIMED_SAMPLES, Laboratory
from onnxq.searching.measures import Effort
from onnxq.searching.noises import Noises
from onnxq.searching.search import Outcome, Planner, as_stored, leave_what_hurts, slower, without_integers
from onnxq.targets import DEFAULT_TARGET
from onnxq.trials import TRIED_SAMPLES, Trials
from onnxq.workbench import Workbench

# The samples that are to come are not those that were measured, so the search aims a little higher than the gate.
_HEADROOM = 1.5
# Aims beyond these, such as infinity, would say the same: nothing that is computed in float32, or anything finite.
_HIGHEST_AIM = 150.0
_LOWEST_AIM = -100.0
# Enough to tell candidates apart; the one that is taken is timed for longer.
_SEARCH_SECONDS = 1.0
# How often a plan is searched again where the one before is not faithful enough to samples that it was not chosen by.
_MORE_SEARCHES = 2
# So many of those samples then join the ones that candidates are tried on.
_JOINING = 4
# Part of the time there is that goes to how codes are chosen.
_REFINING = 1 / 3
# Runs of the float model that take as long as the shortest search.
_SEARCH_RUNS = 40
# Seconds that the last model takes to be built, loaded and looked at.
_BUILDING = 2.0
_UNFAITHFUL = "with integers the model is not faithful enough to samples that it was not chosen by"
# A metric falls as the noise rises, so the noisiest aim is tried first.
_METRIC_AIMS = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and what the model does that it makes; `codes` where these are others than the recipe's."""

    recipe: Recipe
    outcome: Outcome
    verification: Verification
    scores: Scores | None
    gains: tuple[Gain, ...] = ()
    tried_on: tuple[Sample, ...] = ()
    rounds: int = 1
    codes: Codes | None = None

    def lacks(self, goal: Goal) -> float:
        """Return by how many decibels the worst output misses a goal that is none of a metric; 0 where it does not."""
        found = self.verification.agreements
        if goal.metric is not None or not all(output.same_shapes for one in found for output in one.outputs):
            return 0.0
        lacking = max(goal.min_sqnr - min(one.worst_sqnr for one in found), 0.0)
        return lacking if all(one.sound for one in found) else max(lacking, _HEADROOM)


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
        judge: of what was chosen.
        evidence: of the plan's activations.
        progress: told of each stage.
        costs: node times that were measured before, to which new ones are added.
    """

    bench: Workbench
    files: Files
    samples: SampleSource
    judge: Judge
    evidence: Evidence
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
        if not accuracy.methods or not self.has_time(0):
            return Refined(basis)
        until = self.judge.deadline.part(_REFINING, self._reserved)
        return refine(Folds(self.trials, self.samples), plan, basis, accuracy, self.progress, until)

    def affordable(self, plan: Plan, refined: Refined, goal: Goal) -> Refined:
        """Return what was refined with the factors of channels that cost no time or that fidelity needs.

        Args:
            plan: the one in which as much is integer as the scheme allows.
            refined: how its codes are chosen best.
            goal: how faithful the model has to be.
        """
        if not self.measurable or not self.has_time(_SEARCH_RUNS):
            return refined
        return affordable(self.laboratory(refined.basis.recipe), plan, refined, _aim(goal.min_sqnr))

    def follow(self, plan: Plan, recipe: Recipe) -> Chosen:
        """Build what a plan and a recipe say, without a search."""
        outcome = Outcome(plan, (), 0)
        verification = self.built(outcome, recipe)
        return Chosen(recipe, outcome, verification, self.judge.scores(self.files.staged, 1))

    def choose(self, plan: Plan, recipe: Recipe, effort: Effort, goal: Goal, last: Accuracy) -> Chosen:
        """Choose by measuring, and step back when the model turns out slower than float, or not faithful enough.

        Args:
            plan: what the scheme wants.
            recipe: how codes are chosen.
            effort: how much to measure.
            goal: how faithful the model has to be. Of a metric's plans the first that loses little enough is taken.
            last: what is tried for the accuracy of the plan that is chosen.
        """
        choice = _Choice(self, plan, recipe, effort, goal, last)
        if goal.metric is None:
            return choice.faithful()
        return choice.by_metric()

    def stored(self, trials: Trials, choice: _Choice, outcome: Outcome, speed: float, aim: float) -> Outcome:
        """Return a plan that computes in float: with the same codes where these are faithful, else searched."""
        reason = slower(speed)
        same = self.bench.plan(as_stored(outcome.plan, choice.plan, reason))
        if trials.sqnr(same, choice.recipe) >= aim:
            return replace(outcome, plan=same, regions=(), times=())
        return self.quietest(trials, choice.recipe, without_integers(self.bench.plan, choice.plan, reason), aim)

    @property
    def measurable(self) -> bool:
        """Whether latency is asked for, and this machine's tells anything about the target's."""
        own = self.bench.target.name == DEFAULT_TARGET and self.judge.engine is None
        return self.judge.seconds > 0 and own and not self.bench.is_large

    def search(self, trials: Trials, recipe: Recipe, effort: Effort, aim: float) -> Outcome:
        """Return the fastest plan that reaches an aim in decibels, or where time tells nothing the least noisy one.

        Where there is no time for a search, it is what the scheme says.
        """
        if not self.measurable or not self.has_time(_SEARCH_RUNS):
            return self.quietest(trials, recipe, self.bench.plan, aim, effort.measurements)
        seconds = min(effort.seconds, self.judge.deadline.left - self._reserved)
        effort = replace(effort, seconds=seconds)
        laboratory = replace(self.laboratory(recipe), trials=trials)
        return find_fastest(laboratory, self.bench.graph, self.bench.target, aim, effort, self.progress)

    def laboratory(self, recipe: Recipe) -> Laboratory:
        """Return what measures plans whose codes are chosen so."""
        seconds, timed = min(self.judge.seconds, _SEARCH_SECONDS), tuple(evenly(self.trials.samples, TIMED_SAMPLES))
        reference, asked = self.files.reference, self._asked
        return Laboratory(self.trials, recipe, reference, timed, seconds, self.costs, self.progress, asked)

    @cached_property
    def _asked(self) -> dict[Hashable, Noises]:
        """Noise that was measured for one search, which others need not measure again."""
        return {}

    def quietest(self, trials: Trials, recipe: Recipe, planner: Planner, aim: float, most: float = math.inf) -> Outcome:
        """Return the plan that leaves out the fewest of what hurts to reach an aim in decibels, as far as time allows.

        Args:
            trials: try plans.
            recipe: how codes are chosen.
            planner: plans with some nodes left out.
            aim: decibels to reach.
            most: models to build and run.
        """
        if not self.has_time(0):
            return Outcome(planner({}), (), 0)

        def measure(plan: Plan) -> float:
            # What was not tried is not taken.
            in_time = len(trials.measured) < most and self.has_time(len(trials.samples))
            return trials.sqnr(plan, recipe) if in_time else -math.inf

        found = leave_what_hurts(planner, measure, aim, self.progress, alone=not self.bench.is_large)
        return replace(found, measured=len(trials.measured))

    def has_time(self, runs: float) -> bool:
        """Whether there is time for so many runs of the float model before the last model is built and judged."""
        left = self.judge.deadline.left
        return self.judge.deadline == NEVER or (left > 0 and left > self._reserved + runs * self.trials.seconds)

    @property
    def _reserved(self) -> float:
        """Seconds that it is expected to take to build the last model and judge it."""
        if self.judge.deadline == NEVER:
            return 0.0
        runs = 2 * min(len(self.judge.samples), COMPARED_SAMPLES)
        return runs * self.trials.seconds + self.judge.seconds + _BUILDING

    def built(self, outcome: Outcome, recipe: Recipe, number: int = 1) -> Verification:
        """Build the model of a plan where it is staged, and judge it.

        Args:
            outcome: of the search.
            recipe: how codes are chosen.
            number: of the look at the samples that judge. Where none could be spared for that, the search looked at
                them for each plan that it tried.
        """
        self.bench.build(outcome.plan, self.evidence, recipe, self.files.staged, external_data=self.files.external_data)
        self.progress("verify", 0, 0)
        apart = self.judge.samples is not self.samples
        return self.judge.verified(self.files.staged, number if apart else number + outcome.measured)


@dataclass(frozen=True, eq=False)
class _Choice:
    """One choice by measuring: what a chooser is asked for, see `Chooser.choose`."""

    chooser: Chooser
    plan: Plan
    recipe: Recipe
    effort: Effort
    goal: Goal
    last: Accuracy

    def by_metric(self) -> Chosen:
        """Return the first of ever more faithful plans that a metric can be trusted to lose little enough by.

        A plan that reaches the next aims too is not searched for again. The last one is returned where none will do.
        """
        trials = self.chooser.trials
        reached, number = -math.inf, 0
        for aim in _METRIC_AIMS:
            if aim <= reached:
                continue
            number += 1
            found = self._attempted(trials, aim, number)
            if found.scores is None or found.scores.is_trusted(self.goal.max_drop):
                break
            if not self.chooser.has_time(_SEARCH_RUNS):
                break
            reached = trials.sqnr(found.outcome.plan, self.recipe)
        return found

    def faithful(self) -> Chosen:
        """Return a plan that is faithful to the samples that judge it, or the last that was tried.

        Where it is not, those of them join the trials that it is least faithful to, the aim rises by what lacked, and
        the search goes on; in the end weights are only stored.
        """
        trials, aim = self.chooser.trials, _aim(self.goal.min_sqnr)
        found = self._attempted(trials, aim)
        for number in range(_MORE_SEARCHES + 1):
            lacking = found.lacks(self.goal)
            if not lacking or not any(one.weights for one in found.outcome.plan.decisions):
                break
            last = number == _MORE_SEARCHES or not self.chooser.has_time(_SEARCH_RUNS)
            trials, aim = self._with_hardest(trials), min(aim + lacking, _HIGHEST_AIM)
            found = self._attempted(trials, aim, number + 2, stored=last)
            found = replace(found, rounds=number + 2)
            if last:
                break
        return found

    def _with_hardest(self, trials: Trials) -> Trials:
        chooser = self.chooser
        return trials.joined(chooser.files.reference, chooser.judge.hardest(chooser.files.staged, _JOINING))

    def _attempted(self, trials: Trials, aim: float, number: int = 1, *, stored: bool = False) -> Chosen:
        """Search for a plan, build it and judge it; one that is slower than float steps back to stored weights."""
        chooser = self.chooser
        if stored:
            planner = without_integers(chooser.bench.plan, self.plan, _UNFAITHFUL)
            outcome = chooser.quietest(trials, self.recipe, planner, aim, self.effort.measurements)
        else:
            outcome = chooser.search(trials, self.recipe, self.effort, aim)
        refined = chooser.refined(outcome.plan, self.recipe, self.last)
        verification = chooser.built(outcome, refined.basis.recipe, number)
        latency = verification.latency
        if latency and outcome.plan.decodes and self._is_slower(verification):
            weighed = tuple(replace(point, chosen=False) for point in outcome.frontier)
            outcome = replace(chooser.stored(trials, self, outcome, latency.speed, aim), frontier=weighed)
            refined = chooser.refined(outcome.plan, self.recipe, self.last)
            verification = chooser.built(outcome, refined.basis.recipe, number)
        scores = chooser.judge.scores(chooser.files.staged, number)
        return Chosen(refined.basis.recipe, outcome, verification, scores, refined.gains, trials.samples)

    def _is_slower(self, verification: Verification) -> bool:
        """Whether the model that is staged is slower than the float model, by what was found of it first."""
        if not self.chooser.measurable:
            # Another runtime's time tells nothing of the target's.
            return self.chooser.judge.engine is not None and verification.slower
        laboratory = self.chooser.laboratory(self.recipe)
        return laboratory.found_slower(self.chooser.files.staged, verification.slower)


def _aim(min_sqnr: float) -> float:
    """Return the decibels to aim at, which noise can be weighed against."""
    return min(max(min_sqnr + _HEADROOM, _LOWEST_AIM), _HIGHEST_AIM)
