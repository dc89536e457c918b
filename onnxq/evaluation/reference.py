"""The float model as the reference of comparisons: it runs only once on a sample."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from onnxq.calibration.provenance import sample_digest
from onnxq.data.dataset import Subset, evenly_spaced_indices, list_shared_files
from onnxq.data.inputs import Sample, SampleSource
from onnxq.evaluation.comparison import RUN_MEMORY, ComparisonSession, ComparisonSpec
from onnxq.runtime.sessions import Array
from onnxq.system.resources import parallel_map

# Bytes of cached outputs of all float models.
_KEPT_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class SampleOutputs:
    """The outputs of a model for a sample.

    Attributes:
        outputs: the compared tensors, in the order of the spec; read-only.
        seconds: of the run.
        choices: the float model's choices, inputs of other models beside the sample.
        checked: the choices and labels that its scores decide, in the order of the spec.
    """

    outputs: Sequence[Any]
    seconds: float
    choices: Mapping[str, Array] = field(default_factory=dict)
    checked: Sequence[Any] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs and choices."""
        values = (*self.outputs, *self.choices.values(), *self.checked)
        # Sequences and maps are small.
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


class OutputsCache:
    """Outputs of earlier runs; the least recently used ones are dropped first.

    Args:
        held: bytes of outputs that are kept.
    """

    def __init__(self, held: int = _KEPT_BYTES) -> None:
        self._held, self._bytes = held, 0
        self._given: OrderedDict[Hashable, SampleOutputs] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Hashable, give: Callable[[], SampleOutputs]) -> SampleOutputs:
        """Return the outputs of a key, and call `give` for a new key."""
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
# Float models that are open, by `ReferenceModel._key`.
_OPEN: WeakValueDictionary[Hashable, ComparisonSession] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """A float model for comparing, opened at the first run that is not cached.

    Attributes:
        views: the tensors that are compared.
        answers: cache of the outputs.
    """

    model: Path
    views: ComparisonSpec
    answers: OutputsCache = _ANSWERS

    def answer(self, sample: Sample) -> SampleOutputs:
        """Return the outputs for one sample.

        Raises:
            ModelError: The file cannot be loaded.
            DataError: The run fails, or the model has other outputs than the spec.
        """
        return self.answers.find((*self._key, sample_digest(sample)), lambda: self._given(sample))

    def run(self, sample: Sample) -> Sequence[Any]:
        """Return the outputs of `answer`."""
        return self.answer(sample).outputs

    def outputs(self, sample: Sample) -> dict[str, Any]:
        """Return the outputs of `answer` by name."""
        return dict(zip(self.views.names, self.run(sample), strict=True))

    def answer_each(self, samples: Iterable[Sample]) -> Iterator[SampleOutputs]:
        """Yield `answer` for samples, in order; the first run shows how many runs fit into memory at once."""
        samples = iter(samples)
        if not self.views.most:
            yield from map(self.answer, islice(samples, 1))
        if self.views.runs_at_once:
            yield from parallel_map(self.answer, samples, self.views.most)
        else:
            yield from map(self.answer, samples)

    def _given(self, sample: Sample) -> SampleOutputs:
        view = self._view
        start = time.perf_counter()
        values = RUN_MEMORY.learn(self.model, partial(view.run, sample))
        seconds, count = time.perf_counter() - start, len(self.views.names)
        tensors = dict(zip(view.names, values, strict=True))
        choices = {choice.name: tensors[choice.name] for choice in self.views.choices}
        return SampleOutputs(values[:count], seconds, choices, [tensors[name] for name in self.views.checked])

    @cached_property
    def _view(self) -> ComparisonSession:
        view = _OPEN.get(self._key) or self.views.open_float(self.model)
        _OPEN[self._key] = view
        return view

    def keep_open(self) -> ReferenceModel:
        """Keep the session open that another model of the same file may have, and return this model."""
        if self._key in _OPEN:
            _ = self._view
        return self

    @property
    def is_open(self) -> bool:
        """Whether a session of the file is open."""
        return self._key in _OPEN

    @cached_property
    def _key(self) -> tuple[Hashable, ...]:
        """The file's current state, and the compared tensors."""
        state = self.model.stat()
        return (
            self.model.resolve(),
            state.st_size,
            state.st_mtime_ns,
            self.views.names,
            self.views.choices,
            self.views.checked,
            self.views.random,
        )


def run_beside(
    reference: ReferenceModel, candidate: ComparisonSession, samples: Iterable[Sample]
) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Yield the outputs of a float model and of a model made from it for samples, in order; see `parallel_map`.

    Both are followed by `ComparisonSpec.checked`, if the candidate has a deciding part.
    """

    def both(sample: Sample) -> tuple[Sequence[Any], Sequence[Any]]:
        answer = reference.answer(sample)
        outputs = candidate.run({**sample, **answer.choices})
        if candidate.deciding is None:
            return answer.outputs, outputs
        scores = dict(zip(reference.views.names, answer.outputs, strict=True))
        return (*answer.outputs, *answer.checked), (*outputs, *candidate.deciding.run(sample, scores))

    return parallel_map(both, samples, reference.views.most) if candidate.at_once else map(both, samples)


# Samples with the float model's outputs.

# Bytes of the outputs that are held; if outputs are large, fewer samples are used.
_HELD_BYTES = 1 << 27
_FEWEST_SAMPLES = 2


@dataclass(frozen=True, eq=False)
class ReferenceOutputs:
    """Samples with the outputs of the float model.

    Attributes:
        samples: inputs of the float model.
        given: inputs of the other models: the samples, and the float model's choices.
        reference: the float model as the user gave it, and the tensors that are compared.
        expected: the float model's compared tensors, for each sample.
        seconds: of a run of the float model.
        files: of each sample, see `list_shared_files`; empty if each counts by itself.
    """

    samples: tuple[Sample, ...]
    given: tuple[Sample, ...]
    reference: ReferenceModel
    expected: tuple[tuple[Any, ...], ...]
    seconds: float
    files: tuple[str, ...] = ()

    @property
    def views(self) -> ComparisonSpec:
        """Which tensors of models are compared."""
        return self.reference.views

    @classmethod
    def of(cls, reference: Path, prepared: Path, samples: SampleSource) -> ReferenceOutputs:
        """Run the float model once on a few samples, and keep its outputs.

        If the outputs of all samples are too large for memory, it runs on fewer.

        Args:
            reference: file of the float model as the user gave it.
            prepared: file of the model that candidates are built from.
            samples: of the float model's inputs.
        """
        model = ReferenceModel(reference, ComparisonSpec.of(reference, prepared))
        kept = tuple(samples)
        held = sum(model.answer(sample).nbytes for sample in kept[:1])
        places = evenly_spaced_indices(len(kept), max(_HELD_BYTES // max(held, 1), _FEWEST_SAMPLES))
        kept = tuple(kept[place] for place in places)
        answers = list(model.answer_each(kept))
        expected = tuple(tuple(answer.outputs) for answer in answers)
        seconds = sum(answer.seconds for answer in answers) / max(len(kept), 1)
        given = tuple({**sample, **answer.choices} for sample, answer in zip(kept, answers, strict=True))
        return cls(kept, given, model, expected, seconds, list_shared_files(Subset(samples, places)))

    def part(self, places: Sequence[int]) -> ReferenceOutputs:
        """Return some of the samples, without running the float model again."""
        return replace(
            self,
            samples=tuple(self.samples[place] for place in places),
            given=tuple(self.given[place] for place in places),
            expected=tuple(self.expected[place] for place in places),
            files=tuple(self.files[place] for place in places) if self.files else (),
        )
