"""The context of a search (prepared model, samples, evaluator, profiler) and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.encodings import Encodings
from onnxq.calibration.provenance import file_digest
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import AccuracyEffort, Effort
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.evaluation.goal import Goal, aim_of
from onnxq.evaluation.latency import Latency, selection_adjusted_interval
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.verification import COMPARED_SAMPLES, Verification, Verifier
from onnxq.ir import constants
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.planning.plan import Plan
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.sessions import return_memory
from onnxq.search.cost_cache import CostCache
from onnxq.search.cross_validation import AlgorithmResult, CrossValidator
from onnxq.search.evaluator import CandidateSamples, PlanEvaluator, candidate_key
from onnxq.search.greedy import greedy_fallback
from onnxq.search.mixed_precision import CERTIFICATE_BYTES, BitAllocator, WeightFormat, weight_formats
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.profiling import TIMED_SAMPLES, PlanProfiler, Timing
from onnxq.search.refinement import (
    MethodGain,
    RefinedEncoding,
    apply_requested_methods,
    drop_costly_scales,
    refine,
    requests_methods,
)
from onnxq.search.search import NodeSensitivity, Planner, PlanSearch, SensitivitiesOfNodes
from onnxq.search.sensitivity import NO_ERROR, Sensitivities, sensitivity_by_node
from onnxq.system.resources import NEVER, Progress

# Without a holdout set, aims are this much higher, because encodings and plan fit the samples that they are measured
# on.
NO_HOLDOUT_MARGIN_DB = 4.0
# Deficit of an output that no goal allows, such as one with non-finite values.
INVALID_OUTPUT_DEFICIT_DB = 1.5
# Enough to rank candidates; the chosen one is timed for longer.
_SEARCH_SECONDS = 0.5
# Share of the remaining time for accuracy methods.
_REFINEMENT_SHARE = 1 / 3
# Runs per sample to measure the error of a large model's groups of layers.
_GROUP_RUNS = 3
# The shortest search takes as long as this many runs of the float model.
SEARCH_RUNS = 40
# Seconds to build, load and check the last model.
_BUILD_SECONDS = 2.0


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan, its encoding, and the verified quality of its model.

    Attributes:
        encodings: set only if the encodings differ from those of `config`.
        keeps_up: False if latency was measured and the model is not shown to be as fast as the float model.
    """

    config: EncodingConfig
    outcome: PlanSearch
    verification: Verification
    scores: Scores | None
    gains: tuple[MethodGain, ...] = ()
    tried_on: tuple[Sample, ...] = ()
    rounds: int = 1
    encodings: Encodings | None = None
    keeps_up: bool = True

    def lacks(self, goal: Goal) -> float:
        """Return by how many decibels the worst output misses the goal; 0 if it reaches it.

        The result is also 0 if the goal is a metric, or if output shapes differ.
        """
        found = self.verification.agreements
        if goal.metric is not None or not all(output.same_shapes for one in found for output in one.outputs):
            return 0.0
        lacking = max(goal.min_sqnr - min(one.worst_sqnr for one in found), 0.0)
        return lacking if all(one.sound for one in found) else max(lacking, INVALID_OUTPUT_DEFICIT_DB)


@dataclass(frozen=True)
class ModelPaths:
    """Paths of the models.

    Attributes:
        reference: the float model.
        staged: the file that the quantized model is built in.
        external_data: whether weights of the quantized model lie in a file beside it.
    """

    reference: Path
    staged: Path
    external_data: bool


@dataclass(frozen=True, eq=False)
class SearchContext:
    """All that is needed to choose, build and verify a plan after calibration.

    Attributes:
        samples: samples to choose by.
        verifier: verifies the chosen model.
        split: the samples that evaluate candidates, and the candidates built so far.
        costs: node times of earlier runs; new ones are added.
    """

    bench: PreparedModel
    files: ModelPaths
    samples: SampleSource
    verifier: Verifier
    statistics: CalibrationStatistics
    progress: Progress
    split: CandidateSamples
    costs: CostCache = field(default_factory=CostCache)

    @cached_property
    def evaluator(self) -> PlanEvaluator:
        """The evaluator of candidates, on a few of the samples."""
        return PlanEvaluator(self.bench, self.statistics, self.split.answered, built=self.split.built)

    def with_statistics(self, statistics: CalibrationStatistics) -> SearchContext:
        """Return the same context with other calibration statistics."""
        return self if statistics is self.statistics else replace(self, statistics=statistics)

    def refined(
        self, plan: Plan, config: EncodingConfig, accuracy: AccuracyEffort, enough: float = math.inf
    ) -> RefinedEncoding:
        """Run the accuracy methods for a plan; see `refine`.

        From `enough` decibels on, no method is tried, unless at full effort.
        """
        basis = AlgorithmResult(config, self.statistics)
        if not accuracy.methods and not requests_methods(plan):
            # The float model need not run to evaluate nothing.
            return RefinedEncoding(basis)
        validator = CrossValidator(self.evaluator, self.samples)
        basis = apply_requested_methods(validator, plan, basis, accuracy)
        if not accuracy.methods or not self.has_time(0):
            return RefinedEncoding(basis)
        until = self.verifier.deadline.part(_REFINEMENT_SHARE, self._reserved)
        return refine(validator, plan, basis, accuracy, self.progress, until, enough)

    def drop_costly_scales(self, plan: Plan, refined: RefinedEncoding, goal: Goal) -> RefinedEncoding:
        """Drop channel scales that cost time and that the accuracy does not need.

        `plan` has as many integer nodes as the scheme allows.
        """
        if not self.measurable or not self.has_time(SEARCH_RUNS):
            return refined
        return drop_costly_scales(self.profiler(refined.basis.config), plan, refined, self.aim(goal))

    def aim(self, goal: Goal) -> float:
        """Return the SQNR in decibels to aim at: higher if there is no separate holdout set."""
        return aim_of(goal.min_sqnr + (0.0 if self._has_own_holdout else NO_HOLDOUT_MARGIN_DB))

    @property
    def _has_own_holdout(self) -> bool:
        return self.verifier.samples is not self.samples

    def follow(self, plan: Plan, config: EncodingConfig) -> SearchResult:
        """Build and verify the model of a plan without a search."""
        return self.verified(PlanSearch(plan, (), 0), config)

    def verified(self, outcome: PlanSearch, config: EncodingConfig) -> SearchResult:
        """Build and verify the model of a plan that was found."""
        verification = self.built(outcome, config)
        return SearchResult(config, outcome, verification, self.verifier.scores(self.files.staged, 1))

    @property
    def measurable(self) -> bool:
        """True if latency is wanted, and there is an engine whose times are valid for the target."""
        return self.verifier.seconds > 0 and not self.bench.is_large

    def search(self, evaluator: PlanEvaluator, config: EncodingConfig, effort: Effort, aim: float) -> PlanSearch:
        """Return the fastest plan that reaches an SQNR in decibels.

        Without valid times on this machine, it is the plan of least error that keeps as many integer nodes as it can.
        """
        # Many models are quantized without a search, so this is imported late.
        from onnxq.search.frontier import fastest_uniform_plan, find_fastest

        lowest_error = partial(self.lowest_error, evaluator, config, self.bench.plan, aim)
        if not self.measurable or not self.has_time(SEARCH_RUNS):
            return lowest_error()
        effort = replace(effort, seconds=min(effort.seconds, self.verifier.deadline.left - self._reserved))
        profiler = replace(self.profiler(config), evaluator=evaluator)
        given = profiler, self.bench.graph, self.bench.target, aim
        if not profiler.timing.engine.profiles:
            found = lowest_error()
            return replace(found, plan=fastest_uniform_plan(profiler, self.bench.target, found.plan, aim))
        return find_fastest(*given, effort, self.progress)

    def with_chosen_bits(
        self, evaluator: PlanEvaluator, config: EncodingConfig, effort: Effort | None, aim: float, most: float | None
    ) -> PlanSearch:
        """Return the plan of least error in a file of `most` bytes, or the smallest file that reaches `aim`.

        Without `effort` or samples, the errors of weights themselves count, and nothing is measured.
        """
        bench, is_measured = self.bench, effort is not None and self.has_time(SEARCH_RUNS)
        full = bench.plan({})
        profiler = replace(self.profiler(config), evaluator=evaluator)

        def measure(plan: Plan, some: Set[str]) -> Mapping[str, float]:
            count = len(evaluator.answered.samples)
            runs = min(len(some) + _GROUP_RUNS * count, SEARCH_RUNS * count)
            return profiler.measure_sensitivities(plan, some, runs).nodes

        formats = self._weight_formats
        if not formats or (most is None and not is_measured):
            return PlanSearch(full, (), evaluator.count)
        floats = sum(one[-1].bytes for one in formats.values())
        allocator = BitAllocator(
            bench.plan,
            formats,
            sum(one.nbytes for one in constants(bench.graph)) - floats,
            measure if is_measured else None,
            partial(evaluator.sqnr, config=config) if is_measured else None,
            None if bench.is_large else partial(evaluator.size, config=config),
        )

        def is_late() -> bool:
            return effort is None or not self.has_time(SEARCH_RUNS)

        if most is not None:
            plan, sizes = allocator.within(most - CERTIFICATE_BYTES, aim)
        else:
            plan, sizes = allocator.smallest(aim, is_late, effort.tried if effort is not None else 0)
        nsr = allocator.sensitivities.items()
        seen = (NodeSensitivity(node, full.by_node[node].mode, sqnr_of_ratio(ratio)) for node, ratio in nsr)
        return PlanSearch(plan, tuple(sorted(seen, key=lambda one: one.sqnr)), evaluator.count, sizes=sizes)

    @cached_property
    def _weight_formats(self) -> Mapping[tuple[str, ...], Sequence[WeightFormat]]:
        """The formats of each weight, whose errors do not depend on the encoding config."""
        return weight_formats(self.bench.plan, self.bench.graph, self.bench.target, self.bench.expresses)

    def profiler(self, config: EncodingConfig) -> PlanProfiler:
        """Return a profiler for plans with this encoding; it shares the measurements of the others."""
        return replace(self._profiler, config=config)

    @cached_property
    def _profiler(self) -> PlanProfiler:
        samples = tuple(evenly(self.evaluator.answered.samples, TIMED_SAMPLES))
        seconds, engine = min(self.verifier.seconds, _SEARCH_SECONDS), next(iter(self.verifier.engines), OnnxRuntime())
        timing = Timing(samples, seconds, engine)
        given = self.evaluator, EncodingConfig(), self.files.reference, timing, self.costs, self.progress
        return PlanProfiler(*given, timed=self._timed)

    @cached_property
    def _timed(self) -> dict[str, Latency]:
        """Latencies of timed models, by the digest of the file."""
        return {}

    def lowest_error(
        self, evaluator: PlanEvaluator, config: EncodingConfig, planner: Planner, aim: float
    ) -> PlanSearch:
        """Return a plan that reaches `aim` with as few demoted nodes as possible, or the best found in time.

        `aim` is an SQNR in decibels.
        """
        if not self.has_time(0):
            return PlanSearch(planner({}), (), 0)

        def measure(plan: Plan) -> float | None:
            return evaluator.sqnr(plan, config) if self.has_time(len(evaluator.answered.samples)) else None

        sensitivities = self._sensitivities_of_nodes(evaluator, config, planner) if self.bench.is_large else None
        size = None if sensitivities else partial(evaluator.size, config=config)
        found = greedy_fallback(planner, measure, aim, self.progress, known=sensitivities, size=size)
        return replace(found, measured=evaluator.count)

    def _sensitivities_of_nodes(
        self, evaluator: PlanEvaluator, config: EncodingConfig, planner: Planner
    ) -> SensitivitiesOfNodes:
        """Return the sensitivities of a large model's nodes, measured in groups at the first use."""
        runs = _GROUP_RUNS * len(evaluator.answered.samples)

        def measure() -> Sensitivities:
            # Without measurements, the smallest nodes are demoted first.
            profiler = replace(self.profiler(config), evaluator=evaluator)
            return profiler.measure_sensitivities(planner({}), None, runs) if self.has_time(runs) else NO_ERROR

        return sensitivity_by_node(self.bench.graph, self.bench.target, measure)

    def has_time(self, runs: float) -> bool:
        """Return whether time is left for `runs` of the float model, besides the final build and verification."""
        left, wanted = self.verifier.deadline.left, runs * self.evaluator.answered.seconds
        return self.verifier.deadline == NEVER or (left > 0 and left > self._reserved + wanted)

    @property
    def _reserved(self) -> float:
        """Seconds that the final build and verification are expected to take."""
        if self.verifier.deadline == NEVER:
            return 0.0
        runs = 2 * min(len(self.verifier.samples), COMPARED_SAMPLES) + self.verifier.scored
        return runs * self.evaluator.answered.seconds + self.verifier.seconds + _BUILD_SECONDS

    def built(self, outcome: PlanSearch, config: EncodingConfig, number: int = 1) -> Verification:
        """Build the model of a plan at the staged path and verify it.

        `number` counts the uses of the holdout set. Without a holdout set, each model that was tried counts too.
        """
        staged, external = self.files.staged, self.files.external_data
        reference = None
        if external or not self.split.built.copied(candidate_key(outcome.plan, config, self.statistics), staged):
            build = partial(self.bench.build, outcome.plan, self.statistics, config, staged, external_data=external)
            if self.bench.is_large:
                # Encoding waits for the disk now and then.
                with self.verifier.running_ahead(self.bench.prepared) as reference:
                    build()
                return_memory()
            else:
                build()
        self.progress("verify", 0, 0)
        looks = number if self._has_own_holdout else number + outcome.measured
        verification = self.verifier.verified(staged, looks, self._known_latencies(staged) if self._timed else ())
        # The verification shared its session.
        del reference
        return verification

    def _known_latencies(self, model: Path) -> tuple[Latency | None, ...]:
        """Return what the search measured of a model."""
        return (selection_adjusted_interval(self._timed, file_digest(model)),)
