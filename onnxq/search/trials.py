"""Plans tried out: their models built, run on a few samples, and judged beside the float model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.recipe import Recipe
from onnxq.calibration.statistics import Evidence
from onnxq.config.scheme import Mode
from onnxq.data.dataset import Selection, counting_as_one, halves
from onnxq.data.inputs import SampleSource
from onnxq.errors import tolerate
from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.reference import Answered
from onnxq.evaluation.sqnr import Pair, Trust, noise_by_sample, trust
from onnxq.ir import Graph, scopes
from onnxq.planning.plan import Plan
from onnxq.preparing.placing import coded_tensors
from onnxq.runtime.sessions import return_memory
from onnxq.search.candidate_files import Answers, Candidate, Candidates
from onnxq.search.workbench import Workbench
from onnxq.system.publish import stored_bytes

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})
# Models of which nobody has asked for the noise while others are built.
_AHEAD = 1
# Seconds that a process takes before its first run.
_STARTUP = 0.4

Judgement = TypeVar("Judgement")


@dataclass(frozen=True, eq=False)
class _ThisEvidence:
    """Evidence as part of a key: equal where it is the very same, since to compare all it holds takes longer."""

    evidence: Evidence

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThisEvidence) and self.evidence is other.evidence

    def __hash__(self) -> int:
        return id(self.evidence)


@dataclass(frozen=True)
class _Trusted:
    """Judges a candidate by samples of these files, see `trust`."""

    files: tuple[str, ...]

    def __call__(self, pairs: Sequence[Pair]) -> Trust:
        return trust(pairs, self.files)


@dataclass(frozen=True)
class _OfLast:
    """Tells the SQNR of the worst output over the last samples."""

    names: tuple[str, ...]
    count: int

    def __call__(self, pairs: Sequence[Pair]) -> float:
        return agreement_of(self.names, pairs[-self.count :]).worst_sqnr


@dataclass(frozen=True)
class Hard:
    """Samples that a plan was not faithful enough to, though it was trusted to be: the last that others are tried on.

    Attributes:
        names: of the outputs that are compared.
        count: how many they are.
        shift: decibels by which the aim of plans is above the SQNR that is enough on these samples.
        files: of all samples, see `trust`.
    """

    names: tuple[str, ...]
    count: int
    shift: float
    files: tuple[str, ...] = ()

    def __call__(self, pairs: Sequence[Pair]) -> Trust:
        """Judge a candidate: what it is trusted with, and no more than what it has on these samples, shifted."""
        found = trust(pairs, self.files)
        return replace(found, sqnr=min(found.sqnr, _OfLast(self.names, self.count)(pairs) + self.shift))


@dataclass(frozen=True, eq=False)
class Panel:
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
    built: Candidates = field(default_factory=Candidates)

    @cached_property
    def answered(self) -> Answered:
        """The samples that judge, with what the float model gives for them."""
        found = self._answered(self.count)
        few = len(found.samples)
        # Where outputs are large, it is fewer.
        return found if few == min(self.count, len(self.samples)) else self._answered(few)

    def _answered(self, count: int) -> Answered:
        places = sorted(chain.from_iterable(halves(self.samples, count)))
        return Answered.of(self.reference, self.prepared, Selection(self.samples, places))


@dataclass(frozen=True, eq=False)
class Trials:
    """What is needed to build a plan's model and see how far it is from the float model.

    Attributes:
        bench: builds the models.
        evidence: of the plan's activations.
        answered: the samples that every candidate runs, and what the float model gives for them.
        measured: what was found of models so far, by what judged it.
        built: the models of plans.
        earlier: how many models were tried before, on fewer samples.
        hard: samples that plans have to be faithful to besides.
    """

    bench: Workbench
    evidence: Evidence
    answered: Answered
    measured: dict[Hashable, dict[Callable[..., Any], Any]] = field(default_factory=dict)
    built: Candidates = field(default_factory=Candidates)
    earlier: int = 0
    hard: Hard | None = None

    @property
    def count(self) -> int:
        """How many models were built and run so far."""
        return self.earlier + len(self.measured)

    def process_seconds(self, run: float) -> float:
        """Return how long a process takes to run the float model over the samples, each run so many seconds."""
        return _STARTUP + len(self.answered.samples) * run

    @classmethod
    def of(cls, bench: Workbench, reference: Path, samples: SampleSource, evidence: Evidence) -> Trials:
        """Run the float model once on a few samples, so that plans can be tried against it; see `Answered.of`."""
        return cls(bench, evidence, Answered.of(reference, bench.prepared, samples))

    def part(self, places: Sequence[int]) -> Trials:
        """Return trials on some of the samples, for which the float model does not run again."""
        return replace(self, answered=self.answered.part(places), measured={}, hard=None)

    def joined(self, samples: SampleSource) -> Trials:
        """Return trials on more samples, on which the float model runs now."""
        return replace(self, answered=self.answered.joined(samples), measured={}, earlier=self.count, hard=None)

    def sqnr(self, plan: Plan, recipe: Recipe) -> float:
        """Return the SQNR in decibels that a plan's model can be trusted to have on samples it has not seen.

        A model that cannot be built or run has minus infinity.
        """
        with tolerate("a model that was tried"):
            return self.trust(plan, recipe).sqnr
        return -math.inf

    def sqnr_of_last(self, plan: Plan, recipe: Recipe, count: int) -> float:
        """Return the SQNR in decibels that a plan's model has on the last samples, at its worst output."""
        return self._judged(_OfLast(tuple(self.answered.views.names), count), plan, recipe)

    def trust(self, plan: Plan, recipe: Recipe) -> Trust:
        """Judge a plan by its model; what was measured before is remembered.

        It is trusted with less where it is not faithful enough to the hard samples.
        """
        return self._judged(_Trusted(self.answered.files) if self.hard is None else self.hard, plan, recipe)

    def noise(self, plan: Plan, recipe: Recipe) -> NDArray[np.float64]:
        """Return what each sample adds to the noise at each output, those of one file together; see `noise_by_sample`.

        Whether noise became less by more than chance is told by how these differ, and samples of one file are alike.
        """
        found = self._judged(noise_by_sample, plan, recipe)
        together = counting_as_one(self.answered.files)
        return np.stack([found[one].sum(0) for one in together]) if together else found

    def begin(self, plan: Plan, recipe: Recipe) -> None:
        """Build a model that is going to be asked about, and run it in the background, where it is not too large."""
        if not self.bench.is_large:
            self.built.begin(self._key(plan, recipe), self.answered.numbers, partial(self._runner, plan, recipe))

    def _key(self, plan: Plan, recipe: Recipe) -> Hashable:
        return candidate_key(plan, recipe, self.evidence)

    def _judged(self, judge: Callable[[Sequence[Pair]], Judgement], plan: Plan, recipe: Recipe) -> Judgement:
        key = self._key(plan, recipe)
        known = self.measured.setdefault(key, {})
        if judge not in known:
            given = self.built.answers(key, self.answered.numbers, partial(self._runner, plan, recipe))
            known[judge] = judge(list(zip(self.answered.expected, given, strict=True)))
        found: Judgement = known[judge]
        return found

    def _runner(self, plan: Plan, recipe: Recipe) -> Callable[[Sequence[int]], Answers]:
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

    def size(self, plan: Plan, recipe: Recipe) -> int:
        """Return how many bytes the file of a plan's model has."""
        return stored_bytes(self.candidate(plan, recipe).path)

    def candidate(self, plan: Plan, recipe: Recipe) -> Candidate:
        """Return a plan's model, built now or before; its file stays until others are asked for."""
        bench = self.bench

        def build(path: Path) -> Candidate:
            write = bench.build_beside if bench.is_large else partial(bench.build, external_data=False)
            graph = write(plan, self.evidence, recipe, path)
            return Candidate(path, coded_tensors(graph, bench.graph), is_whole=not bench.is_large)

        return self.built.model(self._key(plan, recipe), bench.prepared.parent, build)


def _convolves_floats(plan: Plan, graph: Graph) -> bool:
    """Whether codes of a plan are hardly multiplied: onnxruntime convolves them only where it gives codes too.

    Its convolutions of floats are up to twice as fast where weights are decoded ahead; other products of codes are not.
    """
    weights = {True: 0, False: 0}
    for scope in scopes(graph):
        for node in scope.nodes:
            decision = plan.by_node.get(node.name)
            if decision is not None and decision.mode in _INTEGERS:
                weights[node.op in _CONVOLUTIONS] += sum(one.elements for one in decision.weights)
    return weights[True] > weights[False] and not any(one.every_consumer for one in plan.activations)


def candidate_key(plan: Plan, recipe: Recipe, evidence: Evidence) -> Hashable:
    """Return what tells the model that is built of a plan from others that are built on the same workbench."""
    return plan.effect, recipe.key, _ThisEvidence(evidence)


def noises(asked: Iterable[tuple[Trials, Plan, Recipe]]) -> Iterator[NDArray[np.float64]]:
    """Yield the noise of models in order, see `Trials.noise`; each runs while the next is built.

    Args:
        asked: by what a model is tried, and what it is built from.
    """
    begun: deque[tuple[Trials, Plan, Recipe]] = deque()
    for trials, plan, recipe in asked:
        trials.begin(plan, recipe)
        begun.append((trials, plan, recipe))
        if len(begun) > _AHEAD:
            yield _noise_of(begun.popleft())
    yield from map(_noise_of, begun)


def _noise_of(asked: tuple[Trials, Plan, Recipe]) -> NDArray[np.float64]:
    trials, plan, recipe = asked
    return trials.noise(plan, recipe)
