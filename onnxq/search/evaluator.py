"""Evaluation of plans: build the model once, run it on a few samples, and compare it with the float model."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.data.dataset import Subset, group_equal, halves
from onnxq.data.inputs import SampleSource
from onnxq.errors import tolerate
from onnxq.evaluation.reference import ReferenceOutputs, held_bytes
from onnxq.evaluation.sqnr import Pair, SqnrEstimate, estimate_sqnr, nsr_by_sample
from onnxq.ir import Graph, all_graphs
from onnxq.ops import facts_of
from onnxq.passes.preparing.placing import quantized_tensors
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import return_memory
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.publish import stored_bytes

Answers: TypeAlias = Mapping[int, Sequence[Any]]
"""The outputs of a model by sample number."""
Runner: TypeAlias = Callable[[Sequence[int]], Answers]
"""Runs a model on the samples with some numbers."""

# Bytes of files that are kept. Two models are kept whatever their size: the one that runs, and the next.
_FILE_BYTES, _NEEDED_MODELS = 1 << 29, 2
# Bytes of outputs that are kept.
_OUTPUT_BYTES = 1 << 26
# Numbers make the file names of models unique within a process.
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class BuiltModel:
    """The model of a plan.

    Attributes:
        quantized: the tensor of the prepared model that each Q/DQ node stands for; see `quantized_tensors`.
        is_whole: True if the file holds the whole model; False if its weights are in shared files.
    """

    path: Path
    quantized: Mapping[str, str]
    is_whole: bool = True


class BuiltModels:
    """Cache of built models and their outputs, so that each model is built once for evaluation, profiling and timing.

    The least recently used entries are removed when there is no room for more.

    Args:
        room: bytes of files to keep.
        held: bytes of outputs to keep.
    """

    def __init__(self, room: int = _FILE_BYTES, held: int = _OUTPUT_BYTES) -> None:
        self._room, self._held = room, held
        self._models: OrderedDict[Hashable, BuiltModel] = OrderedDict()
        self._answers: OrderedDict[Hashable, Answers] = OrderedDict()
        self._running: dict[Hashable, Future[Answers]] = {}
        self._background = ThreadPoolExecutor(1)

    def model(self, key: Hashable, folder: Path, build: Callable[[Path], BuiltModel]) -> BuiltModel:
        """Return the model of a key, and call `build` in `folder` if it is new. Two models always stay on disk."""
        if key not in self._models:
            self._models[key] = build(folder / f"candidate.{next(_NUMBERS)}.onnx")
        self._models.move_to_end(key)
        while (
            len(self._models) > _NEEDED_MODELS
            and sum(stored_bytes(one.path) for one in self._models.values()) > self._room
        ):
            self._models.popitem(last=False)[1].path.unlink(missing_ok=True)
        return self._models[key]

    def copied(self, key: Hashable, place: Path) -> bool:
        """Copy the file of a known model that is in one file; return whether there is one."""
        known = self._models.get(key)
        if known is None or not known.is_whole:
            return False
        shutil.copyfile(known.path, place)
        return True

    def begin(self, key: Hashable, numbers: Sequence[int], build: Callable[[], Runner]) -> None:
        """Run a model on samples in the background, unless its outputs are known or under way.

        Models run one at a time. `build` runs at once, in the caller's thread.
        """
        if key not in self._running and (lacking := self._lacking(key, numbers)):
            self._running[key] = self._background.submit(build(), lacking)

    def answers(self, key: Hashable, numbers: Sequence[int], build: Callable[[], Runner]) -> list[Sequence[Any]]:
        """Return the outputs of a model for samples: known ones, ones from the background, or new ones."""
        begun = self._running.pop(key, None)
        known = {**self._answers.get(key, {}), **(begun.result() if begun is not None else {})}
        if lacking := [number for number in numbers if number not in known]:
            known |= build()(lacking)
        self._answers[key] = known
        self._answers.move_to_end(key)
        while sum(held_bytes(outputs) for one in self._answers.values() for outputs in one.values()) > self._held:
            self._answers.popitem(last=False)
        return [known[number] for number in numbers]

    def _lacking(self, key: Hashable, numbers: Sequence[int]) -> list[int]:
        known = self._answers.get(key, {})
        return [number for number in numbers if number not in known]


# Evaluating plans

_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})
# Models that are built ahead of the one whose error is wanted.
_BUILT_AHEAD = 1
# Seconds that a process takes before its first run.
_STARTUP_SECONDS = 0.4

Judgement = TypeVar("Judgement")


@dataclass(frozen=True, eq=False)
class _TheseStatistics:
    """Compares statistics by identity in a key, because a comparison by value takes too long."""

    statistics: CalibrationStatistics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TheseStatistics) and self.statistics is other.statistics

    def __hash__(self) -> int:
        return id(self.statistics)


@dataclass(frozen=True)
class _Trusted:
    """Evaluates with `estimate_sqnr`; a class, so that instances with equal files are equal cache keys."""

    files: tuple[str, ...]

    def __call__(self, pairs: Sequence[Pair]) -> SqnrEstimate:
        return estimate_sqnr(pairs, self.files)


@dataclass(frozen=True, eq=False)
class CandidateSamples:
    """The samples that evaluate candidates, run once in the float model, and the candidates built so far.

    Attributes:
        samples: samples to select from, evenly; see `halves`.
        count: number of samples that evaluate.
    """

    reference: Path
    prepared: Path
    samples: SampleSource
    count: int
    built: BuiltModels = field(default_factory=BuiltModels)

    @cached_property
    def answered(self) -> ReferenceOutputs:
        """The samples that evaluate, with the outputs of the float model."""
        found = self._answered(self.count)
        few = len(found.samples)
        # Large outputs reduce the number of samples, so these are spread anew.
        return found if few == min(self.count, len(self.samples)) else self._answered(few)

    def _answered(self, count: int) -> ReferenceOutputs:
        places = sorted(chain.from_iterable(halves(self.samples, count)))
        return ReferenceOutputs.of(self.reference, self.prepared, Subset(self.samples, places))


@dataclass(frozen=True, eq=False)
class PlanEvaluator:
    """Builds the models of plans and compares them with the float model.

    Attributes:
        answered: the evaluation samples, with the outputs of the float model.
        measured: results so far, by model and measure.
        earlier: number of models tried before, on fewer samples.
    """

    bench: PreparedModel
    statistics: CalibrationStatistics
    answered: ReferenceOutputs
    measured: dict[Hashable, dict[Callable[..., Any], Any]] = field(default_factory=dict)
    built: BuiltModels = field(default_factory=BuiltModels)
    earlier: int = 0

    @property
    def count(self) -> int:
        """The number of models built and run so far."""
        return self.earlier + len(self.measured)

    def process_seconds(self, run: float) -> float:
        """Return the seconds of a process that runs the float model over the samples, at `run` seconds each."""
        return _STARTUP_SECONDS + len(self.answered.samples) * run

    @classmethod
    def of(
        cls, bench: PreparedModel, reference: Path, samples: SampleSource, statistics: CalibrationStatistics
    ) -> PlanEvaluator:
        """Run the float model on the samples and return an evaluator; see `ReferenceOutputs.of`."""
        return cls(bench, statistics, ReferenceOutputs.of(reference, bench.prepared, samples))

    def part(self, places: Sequence[int]) -> PlanEvaluator:
        """Return an evaluator on some of the samples; the float model does not run again."""
        return replace(self, answered=self.answered.part(places), measured={})

    def joined(self, samples: SampleSource) -> PlanEvaluator:
        """Return an evaluator with more samples; the float model runs on these now."""
        return replace(self, answered=self.answered.joined(samples), measured={}, earlier=self.count)

    def sqnr(self, plan: Plan, config: EncodingConfig) -> float:
        """Return the SQNR in decibels that a plan's model is trusted to have on unseen samples.

        The result is minus infinity if the model cannot be built or run.
        """
        with tolerate("a model that was tried"):
            return self.trust(plan, config).sqnr
        return -math.inf

    def trust(self, plan: Plan, config: EncodingConfig) -> SqnrEstimate:
        """Return the SQNR estimate of a plan's model; results are cached."""
        return self._cached(_Trusted(self.answered.files), plan, config)

    def nsr(self, plan: Plan, config: EncodingConfig) -> NDArray[np.float64]:
        """Return the noise-to-signal ratios of a plan's model by sample and output; see `nsr_by_sample`.

        Samples of one file are alike, so they are added up. The spread of the rows shows whether a change is
        significant.
        """
        found = self._cached(nsr_by_sample, plan, config)
        together = group_equal(self.answered.files)
        return np.stack([found[one].sum(0) for one in together]) if together else found

    def begin(self, plan: Plan, config: EncodingConfig) -> None:
        """Build a model that will be evaluated, and run it in the background, unless it is large."""
        if not self.bench.is_large:
            self.built.begin(self._key(plan, config), self.answered.numbers, partial(self._runner, plan, config))

    def _key(self, plan: Plan, config: EncodingConfig) -> Hashable:
        return candidate_key(plan, config, self.statistics)

    def _cached(self, measure: Callable[[Sequence[Pair]], Judgement], plan: Plan, config: EncodingConfig) -> Judgement:
        key = self._key(plan, config)
        known = self.measured.setdefault(key, {})
        if measure not in known:
            given = self.built.answers(key, self.answered.numbers, partial(self._runner, plan, config))
            known[measure] = measure(list(zip(self.answered.expected, given, strict=True)))
        found: Judgement = known[measure]
        return found

    def _runner(self, plan: Plan, config: EncodingConfig) -> Callable[[Sequence[int]], Answers]:
        """Build now, and return what runs the model later."""
        return partial(self._run, plan, self.candidate(plan, config).path)

    def _run(self, plan: Plan, model: Path, numbers: Sequence[int]) -> Answers:
        answered, views = self.answered, self.answered.views
        # Without integer kernels, an optimized session of a large model dequantizes its weights in each run all the
        # same.
        large = self.bench.is_large
        optimize = not large or any(plan.count(mode) for mode in _INTEGERS)
        at_once = not large and len(numbers) > 1
        if not large and _convolves_floats(plan, self.bench.graph):
            view = views.open_decoded(model, at_once=at_once)
        else:
            view = views.open(model, optimize=optimize, mapped=large, at_once=at_once)
        given = (answered.given[answered.numbers.index(number)] for number in numbers)
        found = dict(zip(numbers, view.run_each(given), strict=True))
        if large:
            del view
            return_memory()
        return found

    def size(self, plan: Plan, config: EncodingConfig) -> int:
        """Return the size in bytes of the file of a plan's model."""
        return stored_bytes(self.candidate(plan, config).path)

    def candidate(self, plan: Plan, config: EncodingConfig) -> BuiltModel:
        """Return a plan's model, built now or before; its file stays until others are needed."""
        bench = self.bench

        def build(path: Path) -> BuiltModel:
            write = bench.build_beside if bench.is_large else partial(bench.build, external_data=False)
            graph = write(plan, self.statistics, config, path)
            return BuiltModel(path, quantized_tensors(graph, bench.graph), is_whole=not bench.is_large)

        return self.built.model(self._key(plan, config), bench.prepared.parent, build)


def _convolves_floats(plan: Plan, graph: Graph) -> bool:
    """Return whether convolutions that onnxruntime runs in float hold most weights of a plan's integer nodes.

    onnxruntime convolves quantized values only if the output is quantized too. Float convolutions are up to twice as
    fast with weights dequantized ahead, unlike other integer nodes.
    """
    weights = {True: 0, False: 0}
    for scope in all_graphs(graph):
        for node in scope.nodes:
            decision = plan.by_node.get(node.name)
            if decision is not None and decision.mode in _INTEGERS:
                weights[facts_of(node).convolves] += sum(one.elements for one in decision.weights)
    return weights[True] > weights[False] and not any(one.every_consumer for one in plan.activations)


def candidate_key(plan: Plan, config: EncodingConfig, statistics: CalibrationStatistics) -> Hashable:
    """Return the key of a plan's model among all models of the same prepared model."""
    return plan.effect, config.key, _TheseStatistics(statistics)


def measure_errors(requested: Iterable[tuple[PlanEvaluator, Plan, EncodingConfig]]) -> Iterator[NDArray[np.float64]]:
    """Yield the errors of models in order (`PlanEvaluator.nsr`); each model runs while the next is built."""
    begun: deque[tuple[PlanEvaluator, Plan, EncodingConfig]] = deque()
    for evaluator, plan, config in requested:
        evaluator.begin(plan, config)
        begun.append((evaluator, plan, config))
        if len(begun) > _BUILT_AHEAD:
            yield _nsr_of(begun.popleft())
    yield from map(_nsr_of, begun)


def _nsr_of(requested: tuple[PlanEvaluator, Plan, EncodingConfig]) -> NDArray[np.float64]:
    evaluator, plan, config = requested
    return evaluator.nsr(plan, config)
