"""Samples that models are compared on, and what the float model gives for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxq.data.dataset import Selection, even_places, shared_files
from onnxq.data.inputs import Sample, SampleSource
from onnxq.evaluation.reference import Reference
from onnxq.evaluation.views import Views

# Bytes of outputs that are held of each model; of large ones, fewer samples are tried.
_HELD = 1 << 27
_FEWEST_SAMPLES = 2
# No two samples of a process have the same.
_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Answered:
    """Samples with the answers of the float model.

    Attributes:
        samples: what the float model is run on.
        given: what other models are run on: the samples, and what the float model chose.
        reference: the float model as it was given, and by what others are compared with it.
        expected: what is compared of the float model, for each sample.
        seconds: of a run of the float model.
        numbers: of the samples, which no others have.
        files: that samples share, for each sample, see `shared_files`; nothing where each counts by itself.
    """

    samples: tuple[Sample, ...]
    given: tuple[Sample, ...]
    reference: Reference
    expected: tuple[tuple[Any, ...], ...]
    seconds: float
    numbers: tuple[int, ...]
    files: tuple[str, ...] = ()

    @property
    def views(self) -> Views:
        """By what other models are compared with the float model."""
        return self.reference.views

    @classmethod
    def of(cls, reference: Path, prepared: Path, samples: SampleSource) -> Answered:
        """Run the float model once on a few samples, and keep its outputs.

        Where outputs are so large that those of all samples had better not be in memory, it runs on fewer.

        Args:
            reference: file of the float model as it was given.
            prepared: file of what other models are built from.
            samples: of the float model's inputs.
        """
        return cls._by(Reference(reference, Views.of(reference, prepared)), samples)

    @classmethod
    def _by(cls, model: Reference, samples: SampleSource) -> Answered:
        kept = tuple(samples)
        held = sum(model.answer(sample).nbytes for sample in kept[:1])
        places = even_places(len(kept), max(_HELD // max(held, 1), _FEWEST_SAMPLES))
        kept = tuple(kept[place] for place in places)
        answers = list(model.answer_each(kept))
        expected = tuple(tuple(answer.outputs) for answer in answers)
        seconds = sum(answer.seconds for answer in answers) / max(len(kept), 1)
        numbers = tuple(itertools.islice(_NUMBERS, len(kept)))
        given = tuple({**sample, **answer.choices} for sample, answer in zip(kept, answers, strict=True))
        return cls(kept, given, model, expected, seconds, numbers, shared_files(Selection(samples, places)))

    def part(self, places: Sequence[int]) -> Answered:
        """Return some of the samples, for which the float model does not run again."""
        return replace(
            self,
            samples=tuple(self.samples[place] for place in places),
            given=tuple(self.given[place] for place in places),
            expected=tuple(self.expected[place] for place in places),
            numbers=tuple(self.numbers[place] for place in places),
            files=tuple(self.files[place] for place in places) if self.files else (),
        )

    def joined(self, samples: SampleSource) -> Answered:
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
