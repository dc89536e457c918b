"""Some of the samples as a source of their own, and all of them in two parts: to choose by, and to judge by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onnxq.data.apart import by_file
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.origins import Origin, origin_of
from onnxq.data.stretches import Stretch, even_places, picked, stretches

# Of fewer, none can be spared for judging alone.
_FEWEST = 8
_EACH = 4
# As many as are compared in the end, and of so many files where these hold several.
_MOST_JUDGING, _FILES = 64, 8


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

    def origin(self, index: int) -> Origin:
        """Return where a selected sample comes from."""
        return origin_of(self.samples, self.places[index])

    def stretches(self, indices: Sequence[int]) -> Iterator[Stretch]:
        """Yield the samples with these indices among the selected ones, which rise, in a stretch for each origin."""
        first = 0
        for stretch in stretches(self.samples, [self.places[index] for index in indices]):
            own = indices[first : first + len(stretch)]
            yield replace(stretch, indices=own, places=stretch.positions)
            first += len(own)


def split(samples: SampleSource, most: int = _MOST_JUDGING) -> tuple[SampleSource, SampleSource]:
    """Return the samples that set ranges and by which plans are chosen, and those by which the model is judged.

    Every fourth judges, 64 at most unless more are wanted; of fewer than 8 samples, none can be spared, and all are for
    both. Samples that share a file with one that judges, as far as files can be told apart so (see `by_file`), are for
    neither or judge as well.

    Args:
        samples: all of them.
        most: how many may judge.

    >>> select, gate = split([{"x": place} for place in range(8)])
    >>> [sample["x"] for sample in select], [sample["x"] for sample in gate]
    ([1, 2, 3, 4, 5, 6], [0, 7])
    """
    count = len(samples)
    if count < _FEWEST:
        return samples, samples
    files = by_file(samples)
    many = min(len(files) // _EACH, max(most * len(files) // count, _FILES))
    apart = {place for one in even_places(len(files), many) for place in files[one]}
    near = sorted(apart)
    judging = [near[place] for place in even_places(len(near), most)]
    others = [place for place in range(count) if place not in apart]
    return Selection(samples, others), Selection(samples, judging)
