"""The models of plans: each is built once, run once on a few samples, and compared with the float model."""

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
from onnxq.planning.plan import Plan
from onnxq.preparing.placing import coded_tensors
from onnxq.runtime.sessions import return_memory
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.publish import stored_bytes

Answers: TypeAlias = Mapping[int, Sequence[Any]]
"""The outputs of a model by the number of the sample."""
Runner: TypeAlias = Callable[[Sequence[int]], Answers]
"""Runs a model on the samples of some numbers."""

# Bytes of files that are kept, and models that are kept whatever their size: one that runs, and the next.
_FILE_BYTES, _NEEDED_MODELS = 1 << 29, 2
# Bytes of outputs that are kept.
_OUTPUT_BYTES = 1 << 26
# No two models of a process are built in the same place.
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class BuiltModel:
    """The model of a plan.

    Attributes:
        path: its file.
        coded: the tensor of the prepared model that nodes around codes stand for, see `coded_tensors`.
        is_whole: whether the file holds all of it, or weights lie in files that others share.
    """

    path: Path
    coded: Mapping[str, str]
    is_whole: bool = True


class BuiltModels:
    """Models that were built and run, so that one that is tried, judged otherwise, profiled and timed is built once.

    What was longest not asked for is removed when there is no room for more.

    Args:
        room: bytes of files that are kept.
        held: bytes of outputs that are kept.
    """

    def __init__(self, room: int = _FILE_BYTES, held: int = _OUTPUT_BYTES) -> None:
        self._room, self._held = room, held
        self._models: OrderedDict[Hashable, BuiltModel] = OrderedDict()
        self._answers: OrderedDict[Hashable, Answers] = OrderedDict()
        self._running: dict[Hashable, Future[Answers]] = {}
        self._background = ThreadPoolExecutor(1)

    def model(self, key: Hashable, folder: Path, build: Callable[[Path], BuiltModel]) -> BuiltModel:
        """Return a model, built now or before; its file stays until two others are asked for.

        Args:
            key: what tells it from other models.
            folder: where it is built.
            build: writes it to a path.
        """
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
        """Copy the file of a model that was built before and is all in one; return whether there is one."""
        known = self._models.get(key)
        if known is None or not known.is_whole:
            return False
        shutil.copyfile(known.path, place)
        return True

    def begin(self, key: Hashable, numbers: Sequence[int], build: Callable[[], Runner]) -> None:
        """Run a model on samples in the background, one model at a time, unless that is done or begun.

        Args:
            key: what tells it from other models.
            numbers: of the samples.
            build: builds it now, in case it is not there.
        """
        if key not in self._running and (lacking := self._lacking(key, numbers)):
            self._running[key] = self._background.submit(build(), lacking)

    def answers(self, key: Hashable, numbers: Sequence[int], build: Callable[[], Runner]) -> list[Sequence[Any]]:
        """Return what a model gives for samples, run now, in the background or before; see `begin`."""
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


# Plans evaluated: their models are built, run on a few samples, and compared with the float model.

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})
# Models of which nobody has asked for the noise while others are built.
_BUILT_AHEAD = 1
# Seconds that a process takes before its first run.
_STARTUP_SECONDS = 0.4

Judgement = TypeVar("Judgement")


@dataclass(frozen=True, eq=False)
class _ThisEvidence:
    """Statistics as part of a key: equal where they are the very same, since to compare all they hold takes longer."""

    evidence: CalibrationStatistics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThisEvidence) and self.evidence is other.evidence

    def __hash__(self) -> int:
        return id(self.evidence)


@dataclass(frozen=True)
class _Trusted:
    """Judges a candidate by samples of these files, see `estimate_sqnr`."""

    files: tuple[str, ...]

    def __call__(self, pairs: Sequence[Pair]) -> SqnrEstimate:
        return estimate_sqnr(pairs, self.files)


@dataclass(frozen=True, eq=False)
class EvaluationSplit:
    """The samples that judge candidates, on which the float model runs once, and the candidates built so far.

    Attributes:
        reference: file of the float model.
        prepared: file of what candidates are built from.
        samples: those among which the ones that judge are, spread over them; see `halves`.
        count: how many judge.
        built: the models of plans.
    """

    reference: Path
    prepared: Path
    samples: SampleSource
    count: int
    built: BuiltModels = field(default_factory=BuiltModels)

    @cached_property
    def answered(self) -> ReferenceOutputs:
        """The samples that judge, with what the float model gives for them."""
        found = self._answered(self.count)
        few = len(found.samples)
        # Where outputs are large, it is fewer.
        return found if few == min(self.count, len(self.samples)) else self._answered(few)

    def _answered(self, count: int) -> ReferenceOutputs:
        places = sorted(chain.from_iterable(halves(self.samples, count)))
        return ReferenceOutputs.of(self.reference, self.prepared, Subset(self.samples, places))


@dataclass(frozen=True, eq=False)
class PlanEvaluator:
    """What is needed to build a plan's model and see how far it is from the float model.

    Attributes:
        bench: builds the models.
        evidence: of the plan's activations.
        answered: the samples that every candidate runs, and what the float model gives for them.
        measured: what was found of models so far, by what judged it.
        built: the models of plans.
        earlier: how many models were tried before, on fewer samples.
    """

    bench: PreparedModel
    evidence: CalibrationStatistics
    answered: ReferenceOutputs
    measured: dict[Hashable, dict[Callable[..., Any], Any]] = field(default_factory=dict)
    built: BuiltModels = field(default_factory=BuiltModels)
    earlier: int = 0

    @property
    def count(self) -> int:
        """How many models were built and run so far."""
        return self.earlier + len(self.measured)

    def process_seconds(self, run: float) -> float:
        """Return how long a process takes to run the float model over the samples, each run so many seconds."""
        return _STARTUP_SECONDS + len(self.answered.samples) * run

    @classmethod
    def of(
        cls, bench: PreparedModel, reference: Path, samples: SampleSource, evidence: CalibrationStatistics
    ) -> PlanEvaluator:
        """Run the float model once on a few samples, to try plans against it; see `ReferenceOutputs.of`."""
        return cls(bench, evidence, ReferenceOutputs.of(reference, bench.prepared, samples))

    def part(self, places: Sequence[int]) -> PlanEvaluator:
        """Return an evaluator on some of the samples, for which the float model does not run again."""
        return replace(self, answered=self.answered.part(places), measured={})

    def joined(self, samples: SampleSource) -> PlanEvaluator:
        """Return an evaluator on more samples, on which the float model runs now."""
        return replace(self, answered=self.answered.joined(samples), measured={}, earlier=self.count)

    def sqnr(self, plan: Plan, recipe: EncodingConfig) -> float:
        """Return the SQNR in decibels that a plan's model can be trusted to have on samples it has not seen.

        A model that cannot be built or run has minus infinity.
        """
        with tolerate("a model that was tried"):
            return self.trust(plan, recipe).sqnr
        return -math.inf

    def trust(self, plan: Plan, recipe: EncodingConfig) -> SqnrEstimate:
        """Judge a plan by its model; what was measured before is remembered."""
        return self._judged(_Trusted(self.answered.files), plan, recipe)

    def noise(self, plan: Plan, recipe: EncodingConfig) -> NDArray[np.float64]:
        """Return what each sample adds to the noise at each output, those of one file together; see `nsr_by_sample`.

        Whether noise became less by more than chance is told by how these differ, and samples of one file are alike.
        """
        found = self._judged(nsr_by_sample, plan, recipe)
        together = group_equal(self.answered.files)
        return np.stack([found[one].sum(0) for one in together]) if together else found

    def begin(self, plan: Plan, recipe: EncodingConfig) -> None:
        """Build a model that is going to be asked about, and run it in the background, where it is not too large."""
        if not self.bench.is_large:
            self.built.begin(self._key(plan, recipe), self.answered.numbers, partial(self._runner, plan, recipe))

    def _key(self, plan: Plan, recipe: EncodingConfig) -> Hashable:
        return candidate_key(plan, recipe, self.evidence)

    def _judged(self, judge: Callable[[Sequence[Pair]], Judgement], plan: Plan, recipe: EncodingConfig) -> Judgement:
        key = self._key(plan, recipe)
        known = self.measured.setdefault(key, {})
        if judge not in known:
            given = self.built.answers(key, self.answered.numbers, partial(self._runner, plan, recipe))
            known[judge] = judge(list(zip(self.answered.expected, given, strict=True)))
        found: Judgement = known[judge]
        return found

    def _runner(self, plan: Plan, recipe: EncodingConfig) -> Callable[[Sequence[int]], Answers]:
        """Build a plan's model and return what runs it on the samples of some numbers."""
        return partial(self._run, plan, self.candidate(plan, recipe).path)

    def _run(self, plan: Plan, model: Path, numbers: Sequence[int]) -> Answers:
        answered, views = self.answered, self.answered.views
        # Without integer kernels an optimised session of a large model decodes its weights in each run all the same.
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

    def size(self, plan: Plan, recipe: EncodingConfig) -> int:
        """Return how many bytes the file of a plan's model has."""
        return stored_bytes(self.candidate(plan, recipe).path)

    def candidate(self, plan: Plan, recipe: EncodingConfig) -> BuiltModel:
        """Return a plan's model, built now or before; its file stays until others are asked for."""
        bench = self.bench

        def build(path: Path) -> BuiltModel:
            write = bench.build_beside if bench.is_large else partial(bench.build, external_data=False)
            graph = write(plan, self.evidence, recipe, path)
            return BuiltModel(path, coded_tensors(graph, bench.graph), is_whole=not bench.is_large)

        return self.built.model(self._key(plan, recipe), bench.prepared.parent, build)


def _convolves_floats(plan: Plan, graph: Graph) -> bool:
    """Whether codes of a plan are hardly multiplied: onnxruntime convolves them only where it gives codes too.

    Its convolutions of floats are up to twice as fast where weights are decoded ahead; other products of codes are not.
    """
    weights = {True: 0, False: 0}
    for scope in all_graphs(graph):
        for node in scope.nodes:
            decision = plan.by_node.get(node.name)
            if decision is not None and decision.mode in _INTEGERS:
                weights[node.op in _CONVOLUTIONS] += sum(one.elements for one in decision.weights)
    return weights[True] > weights[False] and not any(one.every_consumer for one in plan.activations)


def candidate_key(plan: Plan, recipe: EncodingConfig, evidence: CalibrationStatistics) -> Hashable:
    """Return what tells the model that is built of a plan from others that are built of the same prepared model."""
    return plan.effect, recipe.key, _ThisEvidence(evidence)


def measure_errors(asked: Iterable[tuple[PlanEvaluator, Plan, EncodingConfig]]) -> Iterator[NDArray[np.float64]]:
    """Yield the noise of models in order, see `PlanEvaluator.noise`; each runs while the next is built.

    Args:
        asked: by what a model is tried, and what it is built from.
    """
    begun: deque[tuple[PlanEvaluator, Plan, EncodingConfig]] = deque()
    for evaluator, plan, recipe in asked:
        evaluator.begin(plan, recipe)
        begun.append((evaluator, plan, recipe))
        if len(begun) > _BUILT_AHEAD:
            yield _noise_of(begun.popleft())
    yield from map(_noise_of, begun)


def _noise_of(asked: tuple[PlanEvaluator, Plan, EncodingConfig]) -> NDArray[np.float64]:
    evaluator, plan, recipe = asked
    return evaluator.noise(plan, recipe)
