"""Measuring plans: their models are built, compared with the float model, profiled and timed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from onnxq.algorithms.recipe import Recipe
from onnxq.calibration.provenance import file_digest, model_digest, sample_digest
from onnxq.data.inputs import Sample
from onnxq.errors import EngineError, tolerate
from onnxq.evaluation.latency import ENOUGH, Latency, measure_latencies
from onnxq.ir import scopes
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.engine import Engine
from onnxq.runtime.local import OnnxRuntime
from onnxq.search.candidate_files import Candidate
from onnxq.search.cost_cache import CostCache, cost_key
from onnxq.search.kernel_times import NodeTimes, trace_kernels
from onnxq.search.layer_groups import ByKind
from onnxq.search.noises import Noises, likely_shares, measure_noises
from onnxq.search.switchboard import Switchboard
from onnxq.search.trials import Trials
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.resources import Progress, cached_by_mtime, silent

TIMED_SAMPLES = 4
"""On how many samples models are timed."""

# Runs under the profiler, in all: so many seconds' worth of runs of the float model, between these.
_PROFILED = 0.06
_FEWEST_RUNS, _MOST_RUNS = 4, 12
# So many times as long as the float model's may runs with switches take; on small models they take hardly longer.
_SWITCHED = 10
# Models are loaded anew for each: other work that meets a single one would decide.
_ROUNDS = 3
_SHORTEST_RUN = 1e-6
_digest = cached_by_mtime(file_digest)


@dataclass(frozen=True, eq=False)
class Timing:
    """How models are timed.

    Attributes:
        samples: on which they run.
        seconds: time to spend on timing one candidate beside the float model.
        engine: what runs them, in its own number of threads.
    """

    samples: Sequence[Sample]
    seconds: float
    engine: Engine = field(default_factory=OnnxRuntime)


@dataclass(frozen=True, eq=False)
class Laboratory:
    """What the search for the fastest plan measures, with one recipe.

    Attributes:
        trials: builds candidates and knows the float model's outputs.
        recipe: how codes are chosen.
        reference: file of the float model.
        timing: on what models are timed, and for how long.
        costs: node times that were measured before, to which new ones are added.
        progress: told of the stage ``search``.
        asked: the noise that was measured before, which is not measured again where more samples join those that
            candidates are tried on.
        timed: the times of models beside the float model, by the digests of their files.
        weighs: whether noise counts by the samples on which it depends what can be trusted, to choose plans by.
    """

    trials: Trials
    recipe: Recipe
    reference: Path
    timing: Timing
    costs: CostCache = field(default_factory=CostCache)
    progress: Progress = silent
    asked: dict[Hashable, Noises] = field(default_factory=dict)
    timed: dict[str, Latency] = field(default_factory=dict)
    weighs: bool = True

    @property
    def is_timed(self) -> bool:
        """Whether times are those of runs."""
        return True

    @property
    def measured(self) -> int:
        """How many models were built and run so far."""
        return self.trials.count

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        return self.trials.bench.plan(demotions)

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR in decibels that the worst output can be trusted to have."""
        found = self.trials.sqnr(plan, self.recipe)
        # How many there will be is not known, so the bar only counts.
        self.progress("search", self.measured, 0)
        return found

    def noises(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Noises:
        """Measure what the codes of a plan add in noise one by one, or those that some of its nodes alone have."""
        key = plan.effect, None if nodes is None else frozenset(nodes), self.recipe.key, self.weighs

        def told(done: int, total: int) -> None:
            self.progress("noise", done, total)

        if key not in self.asked:
            board, bench = Switchboard.of(self.trials, plan, self.recipe, nodes), self.trials.bench
            asked = ByKind(board, bench.graph) if bench.is_large else board
            shares = likely_shares(plan, self.trials.evidence)
            count, longest = len(self.trials.answered.samples), _SWITCHED * runs * self.run
            self.asked[key] = measure_noises(
                asked, count, runs, told, shares=shares, longest=longest, weighed=self.weighs
            )
        return self.asked[key]

    @property
    def run(self) -> float:
        """Seconds of a run of the float model by its profile, so that they are the same where node times are known."""
        return max(self.times(None).total / 1e9 or self.trials.answered.seconds, _SHORTEST_RUN)

    @property
    def process(self) -> float:
        """Seconds that a process takes to run the float model over the samples, by which efforts are measured."""
        return self.trials.process_seconds(self.run)

    def expresses(self, plan: Plan) -> bool:
        """Whether a model can be built that does what a plan says, whatever opset that needs."""
        return self.trials.bench.expresses(plan)

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node takes, as measured now or before; None stands for the float model."""
        effect = (self.trials.bench.emit, plan.effect) if plan is not None else None
        return self.costs.times(self._key(self.trials.bench.digest, effect), lambda: self._profiled(plan))

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return how many times as fast as the float model the models of plans run, all by turns; NaN if unknown."""
        return self.speeds_of([self.trials.candidate(plan, self.recipe).path for plan in plans])

    def speeds_of(self, models: Sequence[Path]) -> list[float]:
        """Return how many times as fast as the float model some models run, all by turns, as measured now or before.

        The speed of a model that could not be timed is NaN, and is not kept: it may be timed the next time.
        """
        keys = [self._key(_digest(model), "speed") for model in models]
        asked = [model for model, key in zip(models, keys, strict=True) if key not in self.costs.speeds]
        found = self._latencies(asked) if asked else {}
        self.timed.update({_digest(model): latency for model, latency in found.items()})
        for model, key in zip(models, keys, strict=True):
            if model in found:
                self.costs.speed(key, found[model].speed)
        return [self.costs.speeds.get(key, math.nan) for key in keys]

    def found_speed(self, model: Path, now: float) -> float:
        """Return how many times as fast as the float model a model is, as was found before or else now."""
        return self.costs.speed(self._key(model_digest(model), "verdict"), now)

    def _latencies(self, models: Sequence[Path]) -> dict[Path, Latency]:
        """Time models together, or each alone where one of them fails, which then has no speed."""
        timing, found = self.timing, dict[Path, Latency]()
        seconds, engine = len(models) * timing.seconds, timing.engine
        with tolerate("timing a model that was tried"):
            given = (self.reference, *models)
            latencies = measure_latencies(
                given, timing.samples, seconds=seconds, rounds=_ROUNDS, enough=ENOUGH, engine=engine
            )
            found = dict(zip(models, latencies, strict=True))
        if not found and len(models) > 1:
            for model in models:
                found |= self._latencies([model])
        return found

    def _key(self, digest: str, asked: object) -> str:
        engine = self.timing.engine
        return cost_key(
            digest, self._samples, asked, f"{engine.name}, {engine.version}, {engine.threads_given} threads"
        )

    def _profiled(self, plan: Plan | None) -> NodeTimes:
        bench = self.trials.bench
        model = Candidate(bench.prepared, {}) if plan is None else self.trials.candidate(plan, self.recipe)
        timed, engine = self.timing.samples, self.timing.engine
        samples = timed if len(list(scopes(bench.graph))) > 1 else tuple(_of_other_shapes(timed))
        with wrap_plugin_errors(f"engine {engine.name!r}", EngineError):
            kernels = engine.profile(model.path, samples, bench.prepared.parent, math.ceil(self._runs / len(samples)))
        return trace_kernels(kernels, bench.graph, model.coded)

    @cached_property
    def _samples(self) -> tuple[str, ...]:
        """Digests of the samples that are timed."""
        return tuple(sample_digest(sample) for sample in self.timing.samples)

    @property
    def _runs(self) -> int:
        """How often a model runs under the profiler."""
        return min(max(round(_PROFILED / max(self.trials.answered.seconds, 1e-6)), _FEWEST_RUNS), _MOST_RUNS)


def _of_other_shapes(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples whose shapes no earlier one has: without bodies, nodes take no longer for other values."""
    seen = set()
    for sample in samples:
        shapes = tuple(sorted((name, np.shape(array)) for name, array in sample.items()))
        if shapes not in seen:
            seen.add(shapes)
            yield sample
