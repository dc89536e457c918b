"""What a search works with: the prepared model, samples, evaluator and profiler, and the result it ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.encodings import Encodings
from onnxq.calibration.provenance import file_digest
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import Accuracy, Effort
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
from onnxq.search.cross_validation import AlgorithmResult, CrossValidator
from onnxq.search.evaluator import EvaluationSplit, PlanEvaluator, candidate_key
from onnxq.search.fallback import choose_fewer_bits, greedy_fallback
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.profiling import TIMED_SAMPLES, AnalyticProfiler, PlanProfiler, Timing
from onnxq.search.refinement import (
    MethodGain,
    RefinedEncoding,
    apply_requested_methods,
    drop_costly_scales,
    refine,
)
from onnxq.search.search import Planner, PlanSearch, SensitivitiesOfNodes
from onnxq.search.sensitivity import NO_ERROR, Sensitivities, sensitivity_by_node
from onnxq.system.resources import NEVER, Progress, silent

# Without a holdout set, aims are so many decibels higher: encodings and plan fit the samples that are seen.
NO_HOLDOUT_MARGIN_DB = 4.0
# Decibels that an output lacks which no goal allows, such as one that is not finite.
INVALID_OUTPUT_DEFICIT_DB = 1.5
# Enough to tell candidates apart; the one that is taken is timed for longer.
_SEARCH_SECONDS = 0.5
# Part of the time that is left which goes to accuracy methods.
_REFINEMENT_SHARE = 1 / 3
# Runs of each sample that measure the error of a large model's groups of layers.
_GROUP_RUNS = 3
# Runs of the float model that take as long as the shortest search.
SEARCH_RUNS = 40
# Seconds that the last model takes to be built, loaded and looked at.
_BUILD_SECONDS = 2.0


@dataclass(frozen=True)
class SearchResult:
    """What was chosen, and what the model does that it makes.

    Where codes are others than the recipe's, it holds them, and where ranges were found again after that, on how many
    samples. `keeps_up` is False if the model is not shown to be as fast as the float model, as far as that was asked.
    """

    recipe: EncodingConfig
    outcome: PlanSearch
    verification: Verification
    scores: Scores | None
    gains: tuple[MethodGain, ...] = ()
    tried_on: tuple[Sample, ...] = ()
    rounds: int = 1
    codes: Encodings | None = None
    refitted: int = 0
    keeps_up: bool = True

    def lacks(self, goal: Goal) -> float:
        """Return by how many decibels the worst output misses a goal that is none of a metric; 0 where it does not."""
        found = self.verification.agreements
        if goal.metric is not None or not all(output.same_shapes for one in found for output in one.outputs):
            return 0.0
        lacking = max(goal.min_sqnr - min(one.worst_sqnr for one in found), 0.0)
        return lacking if all(one.sound for one in found) else max(lacking, INVALID_OUTPUT_DEFICIT_DB)


@dataclass(frozen=True)
class ModelPaths:
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
class SearchContext:
    """What it takes to choose, build and verify once the evidence is there.

    Attributes:
        bench: plans and builds.
        files: the float model, and where the model is built.
        samples: those by which it is chosen.
        judge: of what was chosen.
        evidence: of the plan's activations.
        progress: told of each stage.
        split: those of the samples by which candidates are tried, and the candidates.
        costs: node times that were measured before, to which new ones are added.
    """

    bench: PreparedModel
    files: ModelPaths
    samples: SampleSource
    judge: Verifier
    evidence: CalibrationStatistics
    progress: Progress
    split: EvaluationSplit
    costs: CostCache = field(default_factory=CostCache)

    @cached_property
    def evaluator(self) -> PlanEvaluator:
        """Candidates are tried on a few of the samples."""
        return PlanEvaluator(self.bench, self.evidence, self.split.answered, built=self.split.built)

    def with_evidence(self, evidence: CalibrationStatistics) -> SearchContext:
        """Return the same context with other calibration statistics."""
        return self if evidence is self.evidence else replace(self, evidence=evidence)

    def refined(
        self, plan: Plan, recipe: EncodingConfig, accuracy: Accuracy, enough: float = math.inf
    ) -> RefinedEncoding:
        """Return how the codes of a plan are chosen best, see `refine`.

        Args:
            plan: what becomes of each node.
            recipe: how its codes are chosen before.
            accuracy: what is tried.
            enough: decibels that are not improved on, unless with all effort.
        """
        validator = CrossValidator(self.evaluator, self.samples)
        basis = apply_requested_methods(validator, plan, AlgorithmResult(recipe, self.evidence), accuracy)
        if not accuracy.methods or not self.has_time(0):
            return RefinedEncoding(basis)
        until = self.judge.deadline.part(_REFINEMENT_SHARE, self._reserved)
        return refine(validator, plan, basis, accuracy, self.progress, until, enough)

    def drop_costly_scales(self, plan: Plan, refined: RefinedEncoding, goal: Goal) -> RefinedEncoding:
        """Return what was refined with the factors of channels that cost no time or that fidelity needs.

        Args:
            plan: the one in which as much is integer as the scheme allows.
            refined: how its codes are chosen best.
            goal: how faithful the model has to be.
        """
        if not self.measurable or not self.has_time(SEARCH_RUNS):
            return refined
        return drop_costly_scales(self.profiler(refined.basis.recipe), plan, refined, self.aim(goal))

    def aim(self, goal: Goal) -> float:
        """Return the decibels to aim at, which are more where the samples that judge have chosen as well."""
        return aim_of(goal.min_sqnr + (0.0 if self._is_judged_apart else NO_HOLDOUT_MARGIN_DB))

    @property
    def _is_judged_apart(self) -> bool:
        """Whether other samples judge than choose."""
        return self.judge.samples is not self.samples

    def follow(self, plan: Plan, recipe: EncodingConfig) -> SearchResult:
        """Build what a plan and a recipe say, without a search."""
        outcome = PlanSearch(plan, (), 0)
        verification = self.built(outcome, recipe)
        return SearchResult(recipe, outcome, verification, self.judge.scores(self.files.staged, 1))

    @property
    def measurable(self) -> bool:
        """Whether latency is asked for, and what runs here tells anything about the target's."""
        known = measures_target(self.bench.target, self.judge.engine)
        return self.judge.seconds > 0 and known and not self.bench.is_large

    def search(self, evaluator: PlanEvaluator, recipe: EncodingConfig, effort: Effort, aim: float) -> PlanSearch:
        """Return the fastest plan that reaches an aim in decibels; see `AnalyticProfiler` where no times are known."""
        # Many a model is quantized without a search.
        from onnxq.search.frontier import fastest_uniform_plan, find_fastest

        lowest_error = partial(self.lowest_error, evaluator, recipe, self.bench.plan, aim, effort.measurements)
        weighs = self.measurable or (self.bench.scheme.multiplies_integers and not self.bench.is_large)
        if not weighs or not self.has_time(SEARCH_RUNS):
            return lowest_error()
        effort = replace(effort, seconds=min(effort.seconds, self.judge.deadline.left - self._reserved))
        profiler = replace(self.profiler(recipe), evaluator=evaluator)
        given = profiler, self.bench.graph, self.bench.target, aim
        if not self.measurable:
            return find_fastest(*given, replace(effort, processes=math.inf), silent)
        if not profiler.timing.engine.profiles:
            found = lowest_error()
            return replace(found, plan=fastest_uniform_plan(profiler, self.bench.target, found.plan, aim))
        return find_fastest(*given, effort, self.progress)

    def smaller(self, evaluator: PlanEvaluator, recipe: EncodingConfig, effort: Effort, aim: float) -> SearchContext:
        """Return a context for plans in which as many weights have 4 bits as an aim in decibels allows, given time."""
        asked = replace(self.profiler(recipe), evaluator=evaluator)
        share = asked.process / asked.run if self.measurable else _GROUP_RUNS * len(evaluator.answered.samples)

        def is_late() -> bool:
            return evaluator.count >= effort.measurements or not self.has_time(SEARCH_RUNS)

        runs, target = math.ceil(effort.noise * share), self.bench.target
        coarser = choose_fewer_bits(asked, target, aim, runs=runs, most=effort.tried, is_late=is_late)
        return replace(self, bench=replace(self.bench, fixed={**self.bench.fixed, **coarser}))

    def profiler(self, recipe: EncodingConfig) -> PlanProfiler:
        """Return what measures plans whose codes are chosen so, and knows what was measured for others."""
        return replace(self._profiler, recipe=recipe)

    @cached_property
    def _profiler(self) -> PlanProfiler:
        samples = tuple(evenly(self.evaluator.answered.samples, TIMED_SAMPLES))
        timing = Timing(samples, min(self.judge.seconds, _SEARCH_SECONDS), self.judge.timer or OnnxRuntime())
        given = self.evaluator, EncodingConfig(), self.files.reference, timing, self.costs, self.progress
        return (PlanProfiler if self.measurable else AnalyticProfiler)(*given, timed=self._timed)

    @cached_property
    def _timed(self) -> dict[str, Latency]:
        """The times of models that searches have timed, by the digests of their files."""
        return {}

    def lowest_error(
        self, evaluator: PlanEvaluator, recipe: EncodingConfig, planner: Planner, aim: float, most: float = math.inf
    ) -> PlanSearch:
        """Return the plan that leaves out the fewest of what hurts to reach an aim in decibels, as far as time allows.

        Args:
            evaluator: try plans.
            recipe: how codes are chosen.
            planner: plans with some nodes left out.
            aim: decibels to reach.
            most: models to build and run.
        """
        if not self.has_time(0):
            return PlanSearch(planner({}), (), 0)

        def measure(plan: Plan) -> float | None:
            in_time = evaluator.count < most and self.has_time(len(evaluator.answered.samples))
            return evaluator.sqnr(plan, recipe) if in_time else None

        told = self._told(evaluator, recipe, planner) if self.bench.is_large else None
        size = None if told else partial(evaluator.size, recipe=recipe)
        found = greedy_fallback(planner, measure, aim, self.progress, told=told, size=size)
        return replace(found, measured=evaluator.count)

    def _told(self, evaluator: PlanEvaluator, recipe: EncodingConfig, planner: Planner) -> SensitivitiesOfNodes:
        """Return what tells the noise of a large model's nodes, measured in groups when it is first asked for."""
        runs = _GROUP_RUNS * len(evaluator.answered.samples)

        def measure() -> Sensitivities:
            # With nothing known, the smallest nodes go first.
            profiler = replace(self.profiler(recipe), evaluator=evaluator)
            return profiler.noises(planner({}), None, runs) if self.has_time(runs) else NO_ERROR

        return sensitivity_by_node(self.bench.graph, self.bench.target, measure)

    def has_time(self, runs: float) -> bool:
        """Whether there is time for so many runs of the float model before the last model is built and judged."""
        left, wanted = self.judge.deadline.left, runs * self.evaluator.answered.seconds
        return self.judge.deadline == NEVER or (left > 0 and left > self._reserved + wanted)

    @property
    def _reserved(self) -> float:
        """Seconds that it is expected to take to build the last model and judge it."""
        if self.judge.deadline == NEVER:
            return 0.0
        runs = 2 * min(len(self.judge.samples), COMPARED_SAMPLES) + self.judge.scored
        return runs * self.evaluator.answered.seconds + self.judge.seconds + _BUILD_SECONDS

    def built(self, outcome: PlanSearch, recipe: EncodingConfig, number: int = 1) -> Verification:
        """Build the model of a plan where it is staged, and judge it.

        Args:
            outcome: of the search.
            recipe: how codes are chosen.
            number: of the look at the samples that judge; without spared ones each plan that was tried is a look.
        """
        staged, external = self.files.staged, self.files.external_data
        if external or not self.split.built.copied(candidate_key(outcome.plan, recipe, self.evidence), staged):
            self.bench.build(outcome.plan, self.evidence, recipe, staged, external_data=external)
        self.progress("verify", 0, 0)
        looks = number if self._is_judged_apart else number + outcome.measured
        known = selection_adjusted_interval(self._timed, file_digest(staged)) if self._timed else None
        return self.judge.verified(staged, looks, known)
