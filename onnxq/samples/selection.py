"""Some of the samples, as a source of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxq.samples.inputs import Sample, SampleSource
from onnxq.samples.stretches import picked


@dataclass(frozen=True)
class Selection:
    """The samples at some places, read anew by each iteration and without the others where that can be.

    Attributes:
        samples: all of them.
        places: rising indices.

    >>> [sample["x"] for sample in Selection([{"x": index} for index in range(5)], [0, 3])]
    [0, 3]
    """

    samples: SampleSource
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Sample]:
        return picked(self.samples, self.places)
