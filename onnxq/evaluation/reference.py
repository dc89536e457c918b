"""The float model that others are judged beside: it runs once on a sample, whoever asks."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxq.calibration.provenance import sample_digest
from onnxq.data.dataset import Subset, evenly_spaced_indices, list_shared_files
from onnxq.data.inputs import Sample, SampleSource
from onnxq.evaluation.comparison import RUN_MEMORY, ComparisonSession, ComparisonSpec, EngineComparisonSession
from onnxq.ir.protos import is_large
from onnxq.runtime.sessions import Array
from onnxq.system.resources import parallel_map

# Bytes of outputs that are kept of all float models.
_KEPT_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class SampleOutputs:
    """What a model gave for a sample.

    Attributes:
        outputs: what is compared, in the order of the views; nobody may change it.
        seconds: that the run took.
        choices: what the model chose, which other models are given beside the sample.
    """

    outputs: Sequence[Any]
    seconds: float
    choices: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs and choices."""
        return held_bytes((*self.outputs, *self.choices.values()))


class OutputsCache:
    """Answers that were given before; those that were longest not asked for go where there are too many.

    Args:
        held: bytes of outputs that are kept.
    """

    def __init__(self, held: int = _KEPT_BYTES) -> None:
        self._held, self._bytes = held, 0
        self._given: OrderedDict[Hashable, SampleOutputs] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Hashable, give: Callable[[], SampleOutputs]) -> SampleOutputs:
        """Return the answer that a key stands for, given now or before."""
        with self._lock:
            if key in self._given:
                self._given.move_to_end(key)
                return self._given[key]
        answer = give()
        with self._lock:
            before = self._given.pop(key, None)
            self._given[key] = answer
            self._bytes += answer.nbytes - (before.nbytes if before is not None else 0)
            while self._bytes > self._held:
                self._bytes -= self._given.popitem(last=False)[1].nbytes
        return answer


_ANSWERS = OutputsCache()


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """A float model for comparing, which is opened when it is asked for what it has not been asked for before.

    Attributes:
        model: its file.
        views: by what models are compared.
        answers: what float models gave before.
    """

    model: Path
    views: ComparisonSpec
    answers: OutputsCache = _ANSWERS

    def answer(self, sample: Sample) -> SampleOutputs:
        """Return what is compared of one sample.

        Raises:
            ModelError: the file cannot be loaded.
            DataError: the run fails, or the model has other outputs than the views.
        """
        return self.answers.find((*self._key, sample_digest(sample)), lambda: self._given(sample))

    def run(self, sample: Sample) -> Sequence[Any]:
        """Return the outputs of `answer`."""
        return self.answer(sample).outputs

    def answer_each(self, samples: Iterable[Sample]) -> Iterator[SampleOutputs]:
        """Yield what `answer` gives for samples, in order; the first run shows how many there may be at once."""
        samples = iter(samples)
        if not self.views.most:
            yield from map(self.answer, islice(samples, 1))
        if self.at_once and self.views.most != 1:
            yield from parallel_map(self.answer, samples, self.views.most)
        else:
            yield from map(self.answer, samples)

    def _given(self, sample: Sample) -> SampleOutputs:
        view = self._view
        start = time.perf_counter()
        given = RUN_MEMORY.learn(self.model, partial(view.run, sample))
        seconds, count = time.perf_counter() - start, len(self.views.names)
        return SampleOutputs(given[:count], seconds, dict(zip(view.names[count:], given[count:], strict=True)))

    @cached_property
    def at_once(self) -> bool:
        """Whether several samples may run at once, each on one core."""
        return not self.views.random and not is_large(self.model)

    @cached_property
    def _view(self) -> ComparisonSession:
        return self.views.open_float(self.model, at_once=self.at_once)

    @cached_property
    def _key(self) -> tuple[Hashable, ...]:
        """What tells the file as it is now, and what is seen of it."""
        state = self.model.stat()
        return (
            self.model.resolve(),
            state.st_size,
            state.st_mtime_ns,
            self.views.names,
            self.views.choices,
            self.views.random,
        )


def held_bytes(outputs: Iterable[Any]) -> int:
    """Return the bytes of outputs; sequences and maps are small."""
    return sum(output.nbytes for output in outputs if isinstance(output, np.ndarray))


def run_beside(
    one: ReferenceModel, other: ComparisonSession | EngineComparisonSession, samples: Iterable[Sample]
) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Yield what a float model and one made from it give for samples, in order; see `parallel_map`."""

    def both(sample: Sample) -> tuple[Sequence[Any], Sequence[Any]]:
        answer = one.answer(sample)
        return answer.outputs, other.run({**sample, **answer.choices})

    return parallel_map(both, samples, one.views.most) if one.at_once and other.at_once else map(both, samples)


# Samples that models are compared on, and what the float model gives for each.

# Bytes of outputs that are held of each model; of large ones, fewer samples are tried.
_HELD_BYTES = 1 << 27
_FEWEST_SAMPLES = 2
# No two samples of a process have the same.
_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class ReferenceOutputs:
    """Samples with the answers of the float model.

    Attributes:
        samples: what the float model is run on.
        given: what other models are run on: the samples, and what the float model chose.
        reference: the float model as it was given, and by what others are compared with it.
        expected: what is compared of the float model, for each sample.
        seconds: of a run of the float model.
        numbers: of the samples, which no others have.
        files: that samples share, for each sample, see `list_shared_files`; nothing where each counts by itself.
    """

    samples: tuple[Sample, ...]
    given: tuple[Sample, ...]
    reference: ReferenceModel
    expected: tuple[tuple[Any, ...], ...]
    seconds: float
    numbers: tuple[int, ...]
    files: tuple[str, ...] = ()

    @property
    def views(self) -> ComparisonSpec:
        """By what other models are compared with the float model."""
        return self.reference.views

    @classmethod
    def of(cls, reference: Path, prepared: Path, samples: SampleSource) -> ReferenceOutputs:
        """Run the float model once on a few samples, and keep its outputs.

        Where outputs are so large that those of all samples had better not be in memory, it runs on fewer.

        Args:
            reference: file of the float model as it was given.
            prepared: file of what other models are built from.
            samples: of the float model's inputs.
        """
        return cls._by(ReferenceModel(reference, ComparisonSpec.of(reference, prepared)), samples)

    @classmethod
    def _by(cls, model: ReferenceModel, samples: SampleSource) -> ReferenceOutputs:
        kept = tuple(samples)
        held = sum(model.answer(sample).nbytes for sample in kept[:1])
        places = evenly_spaced_indices(len(kept), max(_HELD_BYTES // max(held, 1), _FEWEST_SAMPLES))
        kept = tuple(kept[place] for place in places)
        answers = list(model.answer_each(kept))
        expected = tuple(tuple(answer.outputs) for answer in answers)
        seconds = sum(answer.seconds for answer in answers) / max(len(kept), 1)
        numbers = tuple(itertools.islice(_NUMBERS, len(kept)))
        given = tuple({**sample, **answer.choices} for sample, answer in zip(kept, answers, strict=True))
        return cls(kept, given, model, expected, seconds, numbers, list_shared_files(Subset(samples, places)))

    def part(self, places: Sequence[int]) -> ReferenceOutputs:
        """Return some of the samples, for which the float model does not run again."""
        return replace(
            self,
            samples=tuple(self.samples[place] for place in places),
            given=tuple(self.given[place] for place in places),
            expected=tuple(self.expected[place] for place in places),
            numbers=tuple(self.numbers[place] for place in places),
            files=tuple(self.files[place] for place in places) if self.files else (),
        )

    def joined(self, samples: SampleSource) -> ReferenceOutputs:
        """Return these samples and more behind them, on which the float model runs now."""
        more = self._by(self.reference, samples)
        return replace(
            self,
            samples=self.samples + more.samples,
            given=self.given + more.given,
            expected=self.expected + more.expected,
            numbers=self.numbers + more.numbers,
            files=self._own_files + more._own_files if self.files or more.files else (),
        )

    @property
    def _own_files(self) -> tuple[str, ...]:
        return self.files or ("",) * len(self.samples)
