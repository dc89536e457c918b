"""What it takes to choose: searches for plans, and the models that these make, built and judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from onnxq.algorithms.encoding_config import Recipe
from onnxq.algorithms.encodings import Codes
from onnxq.calibration.provenance import file_digest
from onnxq.calibration.statistics import Evidence
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.evaluation.goal import Goal, aim_of
from onnxq.evaluation.latency import Latency, selection_adjusted_interval
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.verification import COMPARED_SAMPLES, Verification, Verifier
from onnxq.planning.plan import Plan
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.engines import measures_target
from onnxq.search.cost_cache import CostCache
from onnxq.search.cross_validation import Basis, Folds
from onnxq.search.effort import Accuracy
from onnxq.search.efforts import Effort
from onnxq.search.evaluator import Panel, Trials, candidate_key
from onnxq.search.fallback import coarser_weights, leave_what_hurts
from onnxq.search.profiling import TIMED_SAMPLES, Laboratory, Timing, Untimed
from onnxq.search.refinement import Gain, Refined, affordable, asked_for, refine
from onnxq.search.search import NodeNoises, Outcome, Planner
from onnxq.search.sensitivity import SILENT, Noises, node_noises
from onnxq.search.workbench import Workbench
from onnxq.system.resources import NEVER, Progress, silent

# Aims are higher by so much where no samples could be spared to judge by: codes and plan fit those that are seen.
_UNSPARED = 4.0
# What a model is said to lack that no goal allows, such as one that is not finite.
_UNSOUND = 1.5
# Enough to tell candidates apart; the one that is taken is timed for longer.
_SEARCH_SECONDS = 0.5
# Part of the time there is that goes to how codes are chosen.
_REFINING = 1 / 3
# Runs of each sample in which the noise of a large model's groups of layers is measured.
_GROUP_RUNS = 3
# Runs of the float model that take as long as the shortest search.
SEARCH_RUNS = 40
# Seconds that the last model takes to be built, loaded and looked at.
_BUILDING = 2.0


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and what the model does that it makes.

    Where codes are others than the recipe's, it holds them, and where ranges were found again after that, on how many
    samples. `keeps_up` is False if the model is not shown to be as fast as the float model, as far as that was asked.
    """

    recipe: Recipe
    outcome: Outcome
    verification: Verification
    scores: Scores | None
    gains: tuple[Gain, ...] = ()
    tried_on: tuple[Sample, ...] = ()
    rounds: int = 1
    codes: Codes | None = None
    refitted: int = 0
    keeps_up: bool = True

    def lacks(self, goal: Goal) -> float:
        """Return by how many decibels the worst output misses a goal that is none of a metric; 0 where it does not."""
        found = self.verification.agreements
        if goal.metric is not None or not all(output.same_shapes for one in found for output in one.outputs):
            return 0.0
        lacking = max(goal.min_sqnr - min(one.worst_sqnr for one in found), 0.0)
        return lacking if all(one.sound for one in found) else max(lacking, _UNSOUND)


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
        panel: those of the samples by which candidates are tried, and the candidates.
        costs: node times that were measured before, to which new ones are added.
    """

    bench: Workbench
    files: Files
    samples: SampleSource
    judge: Verifier
    evidence: Evidence
    progress: Progress
    panel: Panel
    costs: CostCache = field(default_factory=CostCache)

    @cached_property
    def trials(self) -> Trials:
        """Candidates are tried on a few of the samples."""
        return Trials(self.bench, self.evidence, self.panel.answered, built=self.panel.built)

    def with_evidence(self, evidence: Evidence) -> Chooser:
        """Return a chooser that builds from other evidence."""
        return self if evidence is self.evidence else replace(self, evidence=evidence)

    def refined(self, plan: Plan, recipe: Recipe, accuracy: Accuracy, enough: float = math.inf) -> Refined:
        """Return how the codes of a plan are chosen best, see `refine`.

        Args:
            plan: what becomes of each node.
            recipe: how its codes are chosen before.
            accuracy: what is tried.
            enough: decibels that are not improved on, unless with all effort.
        """
        folds = Folds(self.trials, self.samples)
        basis = asked_for(folds, plan, Basis(recipe, self.evidence), accuracy)
        if not accuracy.methods or not self.has_time(0):
            return Refined(basis)
        until = self.judge.deadline.part(_REFINING, self._reserved)
        return refine(folds, plan, basis, accuracy, self.progress, until, enough)

    def affordable(self, plan: Plan, refined: Refined, goal: Goal) -> Refined:
        """Return what was refined with the factors of channels that cost no time or that fidelity needs.

        Args:
            plan: the one in which as much is integer as the scheme allows.
            refined: how its codes are chosen best.
            goal: how faithful the model has to be.
        """
        if not self.measurable or not self.has_time(SEARCH_RUNS):
            return refined
        return affordable(self.laboratory(refined.basis.recipe), plan, refined, self.aim(goal))

    def aim(self, goal: Goal) -> float:
        """Return the decibels to aim at, which are more where the samples that judge have chosen as well."""
        return aim_of(goal.min_sqnr + (0.0 if self._is_judged_apart else _UNSPARED))

    @property
    def _is_judged_apart(self) -> bool:
        """Whether other samples judge than choose."""
        return self.judge.samples is not self.samples

    def follow(self, plan: Plan, recipe: Recipe) -> Chosen:
        """Build what a plan and a recipe say, without a search."""
        outcome = Outcome(plan, (), 0)
        verification = self.built(outcome, recipe)
        return Chosen(recipe, outcome, verification, self.judge.scores(self.files.staged, 1))

    @property
    def measurable(self) -> bool:
        """Whether latency is asked for, and what runs here tells anything about the target's."""
        known = measures_target(self.bench.target, self.judge.engine)
        return self.judge.seconds > 0 and known and not self.bench.is_large

    def search(self, trials: Trials, recipe: Recipe, effort: Effort, aim: float) -> Outcome:
        """Return the fastest plan that reaches an aim in decibels; where no times are known, as `Untimed` has it."""
        # Many a model is quantized without a search.
        from onnxq.search.frontier import fastest_whole, find_fastest

        quietest = partial(self.quietest, trials, recipe, self.bench.plan, aim, effort.measurements)
        weighs = self.measurable or (self.bench.scheme.multiplies_integers and not self.bench.is_large)
        if not weighs or not self.has_time(SEARCH_RUNS):
            return quietest()
        effort = replace(effort, seconds=min(effort.seconds, self.judge.deadline.left - self._reserved))
        laboratory = replace(self.laboratory(recipe), trials=trials)
        given = laboratory, self.bench.graph, self.bench.target, aim
        if not self.measurable:
            return find_fastest(*given, replace(effort, processes=math.inf), silent)
        if not laboratory.timing.engine.profiles:
            return replace(quiet := quietest(), plan=fastest_whole(laboratory, self.bench.target, quiet.plan, aim))
        return find_fastest(*given, effort, self.progress)

    def smaller(self, trials: Trials, recipe: Recipe, effort: Effort, aim: float) -> Chooser:
        """Return a chooser for plans in which as many weights as an aim in decibels takes have 4 bits, given time."""
        asked = replace(self.laboratory(recipe), trials=trials)
        share = asked.process / asked.run if self.measurable else _GROUP_RUNS * len(trials.answered.samples)

        def is_late() -> bool:
            return trials.count >= effort.measurements or not self.has_time(SEARCH_RUNS)

        runs, target = math.ceil(effort.noise * share), self.bench.target
        coarser = coarser_weights(asked, target, aim, runs=runs, most=effort.tried, is_late=is_late)
        return replace(self, bench=replace(self.bench, fixed={**self.bench.fixed, **coarser}))

    def laboratory(self, recipe: Recipe) -> Laboratory:
        """Return what measures plans whose codes are chosen so, and knows what was measured for others."""
        return replace(self._laboratory, recipe=recipe)

    @cached_property
    def _laboratory(self) -> Laboratory:
        samples = tuple(evenly(self.trials.answered.samples, TIMED_SAMPLES))
        timing = Timing(samples, min(self.judge.seconds, _SEARCH_SECONDS), self.judge.timer or OnnxRuntime())
        given = self.trials, Recipe(), self.files.reference, timing, self.costs, self.progress
        return (Laboratory if self.measurable else Untimed)(*given, timed=self._timed)

    @cached_property
    def _timed(self) -> dict[str, Latency]:
        """The times of models that searches have timed, by the digests of their files."""
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

        def measure(plan: Plan) -> float | None:
            in_time = trials.count < most and self.has_time(len(trials.answered.samples))
            return trials.sqnr(plan, recipe) if in_time else None

        told = self._told(trials, recipe, planner) if self.bench.is_large else None
        size = None if told else partial(trials.size, recipe=recipe)
        found = leave_what_hurts(planner, measure, aim, self.progress, told=told, size=size)
        return replace(found, measured=trials.count)

    def _told(self, trials: Trials, recipe: Recipe, planner: Planner) -> NodeNoises:
        """Return what tells the noise of a large model's nodes, measured in groups when it is first asked for."""
        runs = _GROUP_RUNS * len(trials.answered.samples)

        def measure() -> Noises:
            # With nothing known, the smallest nodes go first.
            laboratory = replace(self.laboratory(recipe), trials=trials)
            return laboratory.noises(planner({}), None, runs) if self.has_time(runs) else SILENT

        return node_noises(self.bench.graph, self.bench.target, measure)

    def has_time(self, runs: float) -> bool:
        """Whether there is time for so many runs of the float model before the last model is built and judged."""
        left, wanted = self.judge.deadline.left, runs * self.trials.answered.seconds
        return self.judge.deadline == NEVER or (left > 0 and left > self._reserved + wanted)

    @property
    def _reserved(self) -> float:
        """Seconds that it is expected to take to build the last model and judge it."""
        if self.judge.deadline == NEVER:
            return 0.0
        runs = 2 * min(len(self.judge.samples), COMPARED_SAMPLES) + self.judge.scored
        return runs * self.trials.answered.seconds + self.judge.seconds + _BUILDING

    def built(self, outcome: Outcome, recipe: Recipe, number: int = 1) -> Verification:
        """Build the model of a plan where it is staged, and judge it.

        Args:
            outcome: of the search.
            recipe: how codes are chosen.
            number: of the look at the samples that judge; without spared ones each plan that was tried is a look.
        """
        staged, external = self.files.staged, self.files.external_data
        if external or not self.panel.built.copied(candidate_key(outcome.plan, recipe, self.evidence), staged):
            self.bench.build(outcome.plan, self.evidence, recipe, staged, external_data=external)
        self.progress("verify", 0, 0)
        looks = number if self._is_judged_apart else number + outcome.measured
        known = selection_adjusted_interval(self._timed, file_digest(staged)) if self._timed else None
        return self.judge.verified(staged, looks, known)
