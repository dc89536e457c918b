"""Measuring plans: node times from the runtime's profile or from an analytic estimate, error, and speed."""

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
from onnxq.ir import Graph, Node, all_graphs
from onnxq.planning.plan import DECODING, Decision, Demotion, Plan
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.runtime.targets import Target
from onnxq.search.cost_cache import CostCache, cost_key
from onnxq.search.cost_model import CostModel, OfferedOption, alternatives, takers, wishes
from onnxq.search.evaluator import BuiltModel, PlanEvaluator
from onnxq.search.kernel_times import UNTIMED, NodeTimes, trace_kernels
from onnxq.search.search import Demotions, sizes_of
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
    """Builds the models of plans and tells how faithful they are."""

    def plan(self, demotions: Demotions) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        ...

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR in decibels that the worst output can be trusted to have."""
        ...


class Profiler(PlanTester, Protocol):
    """Builds the models of plans and measures them."""

    @property
    def is_timed(self) -> bool:
        """Whether times are those of runs, rather than what is to be computed."""
        ...

    @property
    def measured(self) -> int:
        """How many models were built and run so far."""
        ...

    def noises(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Sensitivities:
        """Measure what the codes of a plan add in noise one by one, or those that some of its nodes alone have."""
        ...

    @property
    def run(self) -> float:
        """Seconds of a run of the float model, the same where node times are known."""
        ...

    @property
    def process(self) -> float:
        """Seconds that a process takes to run the float model over the samples, by which efforts are measured."""
        ...

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node takes; None stands for the float model."""
        ...

    def expresses(self, plan: Plan) -> bool:
        """Whether a model can be built that does what a plan says, whatever opset that needs."""
        ...

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return how many times as fast as the float model the models of plans run, all by turns; NaN if unknown."""
        ...


# Measuring plans: their models are built, compared with the float model, profiled and timed.

TIMED_SAMPLES = 4
"""On how many samples models are timed."""

# Runs under the profiler, in all: so many seconds' worth of runs of the float model, between these.
_PROFILED_SECONDS = 0.06
_FEWEST_RUNS, _MOST_RUNS = 4, 12
# So many times as long as the float model's may runs with switches take; on small models they take hardly longer.
_SWITCHED_SLOWDOWN = 10
# Models are loaded anew for each: other work that meets a single one would decide.
_ROUNDS = 3
_SHORTEST_RUN_SECONDS = 1e-6
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
class PlanProfiler:
    """What the search for the fastest plan measures, with one recipe.

    Attributes:
        evaluator: builds candidates and knows the float model's outputs.
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

    evaluator: PlanEvaluator
    recipe: EncodingConfig
    reference: Path
    timing: Timing
    costs: CostCache = field(default_factory=CostCache)
    progress: Progress = silent
    asked: dict[Hashable, Sensitivities] = field(default_factory=dict)
    timed: dict[str, Latency] = field(default_factory=dict)
    weighs: bool = True

    @property
    def is_timed(self) -> bool:
        """Whether times are those of runs."""
        return True

    @property
    def measured(self) -> int:
        """How many models were built and run so far."""
        return self.evaluator.count

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        return self.evaluator.bench.plan(demotions)

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR in decibels that the worst output can be trusted to have."""
        found = self.evaluator.sqnr(plan, self.recipe)
        # How many there will be is not known, so the bar only counts.
        self.progress("search", self.measured, 0)
        return found

    def noises(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Sensitivities:
        """Measure what the codes of a plan add in noise one by one, or those that some of its nodes alone have."""
        key = plan.effect, None if nodes is None else frozenset(nodes), self.recipe.key, self.weighs

        def told(done: int, total: int) -> None:
            self.progress("noise", done, total)

        if key not in self.asked:
            board, bench = QuantizerToggleSession.of(self.evaluator, plan, self.recipe, nodes), self.evaluator.bench
            asked = ProbeByLayerKind(board, bench.graph) if bench.is_large else board
            shares = likely_shares(plan, self.evaluator.evidence)
            count, longest = len(self.evaluator.answered.samples), _SWITCHED_SLOWDOWN * runs * self.run
            self.asked[key] = measure_sensitivities(
                asked, count, runs, told, shares=shares, longest=longest, weighed=self.weighs
            )
        return self.asked[key]

    @property
    def run(self) -> float:
        """Seconds of a run of the float model by its profile, so that they are the same where node times are known."""
        return max(self.times(None).total / 1e9 or self.evaluator.answered.seconds, _SHORTEST_RUN_SECONDS)

    @property
    def process(self) -> float:
        """Seconds that a process takes to run the float model over the samples, by which efforts are measured."""
        return self.evaluator.process_seconds(self.run)

    def expresses(self, plan: Plan) -> bool:
        """Whether a model can be built that does what a plan says, whatever opset that needs."""
        return self.evaluator.bench.expresses(plan)

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node takes, as measured now or before; None stands for the float model."""
        effect = (self.evaluator.bench.emit, plan.effect) if plan is not None else None
        return self.costs.times(self._key(self.evaluator.bench.digest, effect), lambda: self._profiled(plan))

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return how many times as fast as the float model the models of plans run, all by turns; NaN if unknown."""
        return self.speeds_of([self.evaluator.candidate(plan, self.recipe).path for plan in plans])

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
        bench = self.evaluator.bench
        model = BuiltModel(bench.prepared, {}) if plan is None else self.evaluator.candidate(plan, self.recipe)
        timed, engine = self.timing.samples, self.timing.engine
        samples = timed if len(list(all_graphs(bench.graph))) > 1 else tuple(_of_other_shapes(timed))
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
        return min(max(round(_PROFILED_SECONDS / max(self.evaluator.answered.seconds, 1e-6)), _FEWEST_RUNS), _MOST_RUNS)


def _of_other_shapes(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples whose shapes no earlier one has: without bodies, nodes take no longer for other values."""
    seen = set()
    for sample in samples:
        shapes = tuple(sorted((name, np.shape(array)) for name, array in sample.items()))
        if shapes not in seen:
            seen.add(shapes)
            yield sample


# Measuring plans where time tells nothing, as for another machine: what is to be computed stands for it.

# Nanoseconds of a core of today for a node, an element of what it gives, and a product with a weight.
_NODE_NS, _ELEMENT_NS, _PRODUCT_NS = 5_000.0, 0.5, 0.1
# Part of that which integers take: they are a quarter of the bytes.
_INTEGER_SHARE = 1 / 4
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


@dataclass(frozen=True, eq=False)
class AnalyticProfiler(PlanProfiler):
    """A profiler that takes no times, so that a search finds the same on every machine.

    A node takes what its products and elements take, as far as shapes tell, and a quarter of that as the integers that
    the scheme wants. Whether other integers than these gain any time is not known, so that none are taken.
    """

    @property
    def is_timed(self) -> bool:
        """Whether times are those of runs."""
        return False

    @property
    def run(self) -> float:
        """Seconds that a run of the float model is taken for."""
        return self.times(None).total / 1e9

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node is taken to run; None stands for the float model."""
        if plan is None:
            return self._floats
        found = {name: time * self._share(plan.by_node.get(name)) for name, time in self._floats.nodes.items()}
        return replace(self._floats, nodes=found)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return how many times as fast as the float model the models of plans are taken to run."""
        return [self._floats.total / self.times(plan).total for plan in plans]

    def _share(self, decision: Decision | None) -> float:
        if decision is None or decision.mode not in DECODING:
            return 1.0
        wanted = self._full.by_node[decision.node].mode
        return _INTEGER_SHARE if decision.mode is wanted else 1.0

    @cached_property
    def _full(self) -> Plan:
        return self.plan({})

    @cached_property
    def _floats(self) -> NodeTimes:
        sizes, nodes = sizes_of(self._full), list(self._nodes())
        elements = {node.name: float(_count(_shape(node))) for node in nodes}
        products = {node.name: sizes.get(node.name, 0) * _positions(node) for node in nodes}
        times = {name: _NODE_NS + _ELEMENT_NS * held + _PRODUCT_NS * products[name] for name, held in elements.items()}
        return NodeTimes(times, {}, elements, 0.0)

    def _nodes(self) -> Iterator[Node]:
        for scope in all_graphs(self.evaluator.bench.graph):
            yield from scope.nodes


def _positions(node: Node) -> int:
    """Return how often each weight of a node is multiplied."""
    shape = _shape(node)
    return _count(shape[:1]) * _count(shape[2:]) if node.op in _CONVOLUTIONS else _count(shape[:-1])


def _shape(node: Node) -> Sequence[object]:
    return next((tensor.shape or () for tensor in node.outputs), ())


def _count(shape: Sequence[object]) -> int:
    """Return how many elements a shape holds, as far as its dimensions are fixed."""
    return math.prod(dim for dim in shape if isinstance(dim, int) and dim > 0)


# What is measured of a model before plans are weighed: each node's time in each mode, and the noise of codes.

# Nodes that take less of a run in float are not worth a model that tells what else than static they could be.
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
    """Profile the float model, the one in which all is static, and one for each alternative that any node can take.

    Args:
        profiler: builds and measures.
        graph: the prepared graph.
        target: the runtime.
        stores: demotions that leave no node an integer kernel.
        latest: value of the monotonic clock after which no more alternatives are profiled: each takes as long as the
            model runs.
        progress: told of the stage ``profile``.

    Returns:
        The costs. Alternatives are left out whose nodes take hardly any of the time, for which no model can be built,
        such as one at the opset that they need, and whose run makes too many events for a profile.
    """
    full = profiler.plan({})
    asked = tuple(offered_options(profiler, full, target, stores))
    total = 2 + len(asked)
    progress("profile", 0, total)
    floats = profiler.times(None)
    progress("profile", 1, total)
    static = profiler.times(full)
    offers = []
    for number, one in enumerate(asked, start=2):
        progress("profile", number, total)
        mode = one.alternative.mode
        already = frozenset(other.node for other in full.decisions if other.mode is mode and other.node in one.nodes)
        taken = sum(floats.nodes.get(node, 0.0) for node in one.nodes)
        if taken > _SEEN_SHARE * floats.total and time.monotonic() < latest and profiler.expresses(one.plan):
            offers.append(replace(one, times=profiler.times(one.plan)))
        elif already:
            # What the scheme wants can only be weighed against float where it is an offer too.
            offers.append(OfferedOption(one.alternative, full, already, static))
    return CostModel(graph, target, full, floats, static, tuple(offer for offer in offers if offer.times.nodes))


def offered_options(
    profiler: Profiler, full: Plan, target: Target, stores: Mapping[str, Demotion]
) -> Iterator[OfferedOption]:
    """Yield each alternative that any node can take, with a plan in which all take it that can; nothing is timed."""
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
    asked: Mapping[OfferedOption, Set[str]],
    runs: int,
) -> OptionSensitivities:
    """Measure what codes add in noise, with as many runs as there are for each.

    Args:
        profiler: builds and measures.
        full: what the scheme wants.
        stores: demotions that leave no node an integer kernel.
        asked: the nodes that are asked about as what they are offered; all are asked about as what the scheme wants.
        runs: how often to run a sample, see `measure_sensitivities`.
    """
    # What the scheme wants dynamic can always be stored.
    dynamic = [one.node for one in full.decisions if one.mode is Mode.DYNAMIC]
    static = profiler.plan({node: stores[node] for node in dynamic})
    own = len(static.activations) + sum(bool(one.weights) for one in static.decisions)
    each = runs / max(own + sum(map(len, asked.values())), 1)
    return OptionSensitivities(
        profiler.noises(static, None, math.ceil(own * each)),
        {
            offer.alternative: profiler.noises(offer.plan, nodes, math.ceil(len(nodes) * each))
            for offer, nodes in asked.items()
        },
    )
