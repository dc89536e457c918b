"""Measurements of plans: node times from the runtime's profile, error, and speed."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.provenance import file_digest, model_digest, sample_digest
from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample
from onnxq.errors import EngineError, tolerate
from onnxq.evaluation.latency import ENOUGH, Latency, measure_latencies
from onnxq.ir import Graph, all_graphs
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.runtime.targets import Target
from onnxq.search.cost_cache import CostCache, cost_key
from onnxq.search.cost_model import CostModel, OfferedOption, alternatives, takers, wishes
from onnxq.search.evaluator import BuiltModel, PlanEvaluator
from onnxq.search.kernel_times import UNTIMED, NodeTimes, trace_kernels
from onnxq.search.search import Demotions
from onnxq.search.sensitivity import (
    ProbeByLayerKind,
    QuantizerToggleSession,
    Sensitivities,
    likely_shares,
    measure_sensitivities,
)
from onnxq.search.tradeoff import OptionSensitivities
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import Progress, cached_by_mtime, silent


class PlanTester(Protocol):
    """Builds the models of plans and measures their accuracy."""

    def plan(self, demotions: Demotions) -> Plan:
        """Return the plan with some nodes demoted."""
        ...

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR estimate in decibels of the worst output."""
        ...


class Profiler(PlanTester, Protocol):
    """Builds the models of plans and measures their accuracy and time."""

    @property
    def measured(self) -> int:
        """The number of models built and run so far."""
        ...

    def measure_sensitivities(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Sensitivities:
        """Measure the error of each quantizer of a plan, or only of the own quantizers of `nodes`."""
        ...

    @property
    def run(self) -> float:
        """Seconds of a run of the float model; constant if node times are cached."""
        ...

    @property
    def process(self) -> float:
        """Seconds of a process that runs the float model over the samples, the unit of efforts."""
        ...

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return the time of each node; None stands for the float model."""
        ...

    def expresses(self, plan: Plan) -> bool:
        """Return whether a plan's model can be built, at any opset."""
        ...

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the speeds of plans relative to the float model, timed in turns; NaN if unknown."""
        ...


# Measured times: models are built, compared with the float model, profiled and timed

TIMED_SAMPLES = 4
"""Number of samples that models are timed on."""

# Total runs under the profiler: as many as the float model does in this time, within these limits.
_PROFILED_SECONDS = 0.06
_FEWEST_RUNS, _MOST_RUNS = 4, 12
# Runs with switches may take this many times as long as the float model's; on small models they hardly take longer.
_SWITCHED_SLOWDOWN = 10
# Timing rounds. Each loads the models anew, so other load on the machine cannot decide by hitting one round.
_ROUNDS = 3
_SHORTEST_RUN_SECONDS = 1e-6
_digest = cached_by_mtime(file_digest)


@dataclass(frozen=True, eq=False)
class Timing:
    """How models are timed.

    Attributes:
        seconds: time to spend on one candidate beside the float model.
        engine: runs and times the models.
    """

    samples: Sequence[Sample]
    seconds: float
    engine: Engine = field(default_factory=OnnxRuntime)


@dataclass(frozen=True, eq=False)
class PlanProfiler:
    """Measures plans with one encoding config.

    Attributes:
        costs: cache of node times.
        progress: called at the stages ``search`` and ``nsr``.
        known_sensitivities: measured sensitivities; they stay when more samples are added to the evaluation.
        timed: latencies beside the float model, by the digest of the file.
    """

    evaluator: PlanEvaluator
    config: EncodingConfig
    reference: Path
    timing: Timing
    costs: CostCache = field(default_factory=CostCache)
    progress: Progress = silent
    known_sensitivities: dict[Hashable, Sensitivities] = field(default_factory=dict)
    timed: dict[str, Latency] = field(default_factory=dict)

    @property
    def measured(self) -> int:
        """The number of models built and run so far."""
        return self.evaluator.count

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        """Return the plan with some nodes demoted."""
        return self.evaluator.bench.plan(demotions)

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR estimate in decibels of the worst output."""
        found = self.evaluator.sqnr(plan, self.config)
        # The total is not known, so the bar only counts.
        self.progress("search", self.measured, 0)
        return found

    def measure_sensitivities(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Sensitivities:
        """Measure the error of each quantizer of a plan, or only of the own quantizers of `nodes`."""
        key = plan.effect, None if nodes is None else frozenset(nodes), self.config.key

        def on_progress(done: int, total: int) -> None:
            self.progress("sensitivity", done, total)

        if key not in self.known_sensitivities:
            board, bench = QuantizerToggleSession.of(self.evaluator, plan, self.config, nodes), self.evaluator.bench
            probe = ProbeByLayerKind(board, bench.graph) if bench.is_large else board
            shares = likely_shares(plan, self.evaluator.statistics)
            count, longest = len(self.evaluator.answered.samples), _SWITCHED_SLOWDOWN * runs * self.run
            self.known_sensitivities[key] = measure_sensitivities(
                probe, count, runs, on_progress, shares=shares, longest=longest
            )
        return self.known_sensitivities[key]

    @property
    def run(self) -> float:
        """Seconds of a run of the float model by its profile, so that they are constant if node times are cached."""
        return max(self.times(None).total / 1e9 or self.evaluator.answered.seconds, _SHORTEST_RUN_SECONDS)

    @property
    def process(self) -> float:
        """Seconds of a process that runs the float model over the samples, the unit of efforts."""
        return self.evaluator.process_seconds(self.run)

    def expresses(self, plan: Plan) -> bool:
        """Return whether a plan's model can be built, at any opset."""
        return self.evaluator.bench.expresses(plan)

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return the times of nodes, measured or cached; None stands for the float model."""
        if not self.timing.engine.profiles:
            return UNTIMED
        effect = (self.evaluator.bench.emit, plan.effect) if plan is not None else None
        return self.costs.times(self._key(self.evaluator.bench.digest, effect), lambda: self._profiled(plan))

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the speeds of plans relative to the float model, timed in turns; NaN if unknown."""
        return self.speeds_of([self.evaluator.candidate(plan, self.config).path for plan in plans])

    def speeds_of(self, models: Sequence[Path]) -> list[float]:
        """Return the speeds of models relative to the float model, timed in turns or cached.

        The speed of a model that could not be timed is NaN. It is not cached, because a later try may succeed.
        """
        keys = {model: self._key(_digest(model), "speed") for model in models}
        requested = [model for model in models if keys[model] not in self.costs.speeds]
        for model, latency in (self._latencies(requested) if requested else {}).items():
            self.costs.speed(keys[model], latency.speed)
            self.timed[_digest(model)] = latency
        return [self.costs.speeds.get(keys[model], math.nan) for model in models]

    def found_speed(self, model: Path, now: float) -> float:
        """Return the cached speed of a model; without one, cache and return `now`."""
        return self.costs.speed(self._key(model_digest(model), "verdict"), now)

    def _latencies(self, models: Sequence[Path]) -> dict[Path, Latency]:
        """Time models together. If one fails, time each alone; a failing model has no entry."""
        timing, found = self.timing, dict[Path, Latency]()
        seconds = len(models) * timing.seconds
        with tolerate("timing a model that was tried"):
            given = (self.reference, *models)
            latencies = measure_latencies(
                given, timing.samples, seconds=seconds, rounds=_ROUNDS, enough=ENOUGH, engine=timing.engine
            )
            found = dict(zip(models, latencies, strict=True))
        if not found and len(models) > 1:
            for model in models:
                found |= self._latencies([model])
        return found

    def _key(self, digest: str, settings: object) -> str:
        engine = self.timing.engine
        described = f"{engine.name}, {engine.version}, {engine.threads_given} threads"
        return cost_key(digest, self._samples, settings, described)

    def _profiled(self, plan: Plan | None) -> NodeTimes:
        bench, timed, engine = self.evaluator.bench, self.timing.samples, self.timing.engine
        model = BuiltModel(bench.prepared, {}) if plan is None else self.evaluator.candidate(plan, self.config)
        samples = timed if len(list(all_graphs(bench.graph))) > 1 else tuple(_of_other_shapes(timed))
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
            kernels = engine.profile(model.path, samples, bench.prepared.parent, math.ceil(self._runs / len(samples)))
        return trace_kernels(kernels, bench.graph, model.quantized)

    @cached_property
    def _samples(self) -> tuple[str, ...]:
        return tuple(sample_digest(sample) for sample in self.timing.samples)

    @property
    def _runs(self) -> int:
        return min(max(round(_PROFILED_SECONDS / max(self.evaluator.answered.seconds, 1e-6)), _FEWEST_RUNS), _MOST_RUNS)


def _of_other_shapes(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples with new shapes: without bodies, node times do not depend on values."""
    seen = set()
    for sample in samples:
        shapes = tuple(sorted((name, np.shape(array)) for name, array in sample.items()))
        if shapes not in seen:
            seen.add(shapes)
            yield sample


# Measurements before the search: node times per mode, and sensitivities

# Options whose nodes take less than this share of the float run are not worth a profiled model.
_SEEN_SHARE = 0.05


def profile_costs(
    profiler: Profiler,
    graph: Graph,
    target: Target,
    stores: Mapping[str, Demotion],
    *,
    latest: float,
    progress: Progress,
) -> CostModel:
    """Profile the float model, the all-static model, and one model per option that some node can take.

    Options are left out in three cases: their nodes take hardly any time, no model can be built, or a run makes too
    many events for a profile. If the scheme itself has nodes in an option, it stays with the times of the static model.

    `stores` has demotions that leave no integer kernels. After the time `latest` of the monotonic clock, no more
    options are profiled.
    """
    full = profiler.plan({})
    requested = tuple(offered_options(profiler, full, target, stores))
    total = 2 + len(requested)
    progress("profile", 0, total)
    floats = profiler.times(None)
    progress("profile", 1, total)
    static = profiler.times(full)
    offers = []
    for number, one in enumerate(requested, start=2):
        progress("profile", number, total)
        mode = one.alternative.mode
        already = frozenset(other.node for other in full.decisions if other.mode is mode and other.node in one.nodes)
        taken = sum(floats.nodes.get(node, 0.0) for node in one.nodes)
        if taken > _SEEN_SHARE * floats.total and time.monotonic() < latest and profiler.expresses(one.plan):
            offers.append(replace(one, times=profiler.times(one.plan)))
        elif already:
            # The option of the scheme must be an offer too, to be compared with float.
            offers.append(OfferedOption(one.alternative, full, already, static))
    return CostModel(graph, target, full, floats, static, tuple(offer for offer in offers if offer.times.nodes))


def offered_options(
    profiler: Profiler, full: Plan, target: Target, stores: Mapping[str, Demotion]
) -> Iterator[OfferedOption]:
    """Yield each option that some node can take, with the plan in which all such nodes take it, untimed."""
    for alternative in alternatives(target):
        wished = wishes(alternative, full, target)
        nodes = takers(alternative, profiler.plan(wished), wished.keys())
        if nodes:
            plan = profiler.plan({**stores, **{node: wished[node] for node in nodes}})
            yield OfferedOption(alternative, plan, nodes, UNTIMED)


def measure_option_sensitivities(
    profiler: Profiler,
    full: Plan,
    stores: Mapping[str, Demotion],
    requested: Mapping[OfferedOption, Set[str]],
    runs: int,
) -> OptionSensitivities:
    """Measure the errors of the scheme's quantizers and of each option; each quantizer gets an equal share of the runs.

    `stores` has demotions that leave no integer kernels. `requested` has the nodes to measure in each option, and
    `runs` is the number of sample runs in all.
    """
    # Dynamic nodes can always have compressed weights instead.
    dynamic = [one.node for one in full.decisions if one.mode is Mode.DYNAMIC]
    static = profiler.plan({node: stores[node] for node in dynamic})
    own = len(static.activations) + sum(bool(one.weights) for one in static.decisions)
    each = runs / max(own + sum(map(len, requested.values())), 1)
    return OptionSensitivities(
        profiler.measure_sensitivities(static, None, math.ceil(own * each)),
        {
            offer.alternative: profiler.measure_sensitivities(offer.plan, nodes, math.ceil(len(nodes) * each))
            for offer, nodes in requested.items()
        },
    )
