"""Access samples by index, trace each to its origin, and split them into calibration and holdout sets."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np

from onnxq.data.inputs import Sample, SampleSource
from onnxq.errors import DataError

Item = TypeVar("Item")


@runtime_checkable
class RandomAccess(Protocol):
    """An object that returns the item at any index, such as a map-style data set."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def __getitem__(self, place: int) -> Any:
        """Read one item."""
        ...


@runtime_checkable
class IndexedSamples(Protocol):
    """Samples that can be read by index, without reading any others."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __iter__(self) -> Iterator[Sample]:
        """Start again at the first sample."""
        ...

    def read_samples(self, indices: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at rising `indices`, each as it is needed."""
        ...


def reads_by_index(samples: SampleSource) -> bool:
    """Return whether each sample can be read without those before it.

    >>> reads_by_index([]), reads_by_index(iter([]))
    (True, False)
    """
    while isinstance(samples, Subset):
        samples = samples.samples
    return isinstance(samples, IndexedSamples) or _is_plain(samples)


def is_random_access(samples: object) -> TypeGuard[RandomAccess]:
    """Return whether an object offers items by index only; if it can also be iterated, iteration may give other items.

    >>> is_random_access([]), is_random_access(type("Items", (), {"__len__": len, "__getitem__": dict.get})())
    (False, True)
    """
    return isinstance(samples, RandomAccess) and not isinstance(samples, type) and not hasattr(samples, "__iter__")


def picked(items: Iterable[Item], indices: Sequence[int]) -> Iterator[Item]:
    """Yield the items at rising `indices`; if the items have random access, no others are read.

    Raises:
        DataError: There are fewer items.

    >>> list(picked(range(10), [2, 5]))
    [2, 5]
    """
    if isinstance(items, IndexedSamples):
        yield from items.read_samples(indices)
    elif _is_plain(items) or is_random_access(items):
        yield from (items[index] for index in indices)
    else:
        last = -1
        stream = iter(items)
        for index in indices:
            item = list(islice(stream, index - last - 1, index - last))
            if not item:
                raise DataError(f"The samples end before sample {index}, expected it; keep them as they were counted")
            yield item[0]
            last = index


def _is_plain(items: Iterable[Item]) -> TypeGuard[Sequence[Item]]:
    # A subclass of list may override iteration.
    return isinstance(items, Sequence) and type(items) in (list, tuple, range)


def evenly_spaced_indices(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`.

    >>> evenly_spaced_indices(10, 4)
    [0, 3, 6, 9]
    """
    return [int(index) for index in np.linspace(0, count - 1, min(count, most)).round()]


# Origins of samples: index among the given samples, and file.


@dataclass(frozen=True)
class Origin:
    """The origin of a sample.

    Attributes:
        place: its index among the samples that the user gave; files that a limit leaves out are not counted.
        file: the file or folder that holds it; empty for a sample from memory.
    """

    place: int
    file: str = ""


@runtime_checkable
class TraceableSamples(Protocol):
    """Samples whose origins are known, and that may have been given with labels."""

    def origin(self, index: int) -> Origin:
        """Return the origin of a sample; nothing is read."""
        ...

    def labels(self, index: int) -> tuple[int, ...]:
        """Return the class numbers of a sample, one for each of its rows; empty if there are none."""
        ...


def origin_of(samples: SampleSource, index: int) -> Origin:
    """Return the origin of a sample; samples of a list keep the indices of the list.

    >>> origin_of([{}, {}], 1)
    Origin(place=1, file='')
    """
    return samples.origin(index) if isinstance(samples, TraceableSamples) else Origin(index)


def labels_of(samples: SampleSource, index: int) -> tuple[int, ...]:
    """Return the class numbers that were given with a sample, one for each of its rows; empty if there are none.

    >>> labels_of([{}, {}], 1)
    ()
    """
    return samples.labels(index) if isinstance(samples, TraceableSamples) else ()


def ranges_of(places: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return rising indices as pairs of first and last of each gapless run.

    >>> ranges_of([0, 1, 2, 7])
    ((0, 2), (7, 7))
    """
    ranges: list[tuple[int, int]] = []
    for place in places:
        if ranges and ranges[-1][1] == place - 1:
            ranges[-1] = ranges[-1][0], place
        else:
            ranges.append((place, place))
    return tuple(ranges)


# Samples that share a file are alike, so the calibration and holdout sets must not share a file.

# With fewer files, or with a larger share in one file, too few samples would be left for a holdout.
_FEWEST_FILES, _LARGEST = 8, 1 / 4


def group_by_file(samples: SampleSource) -> list[list[int]]:
    """Group the indices of samples that share a file, such as the rows of a stack.

    Each sample is its own group if there are fewer than 8 files, or if one file holds more than a quarter of the
    samples.

    >>> group_by_file([{"x": 0}, {"x": 1}])
    [[0], [1]]
    """
    groups = _together(origin_of(samples, place).file or place for place in range(len(samples)))
    if len(groups) < _FEWEST_FILES or max(map(len, groups)) > _LARGEST * len(samples):
        return [[place] for place in range(len(samples))]
    return groups


def list_shared_files(samples: SampleSource) -> tuple[str, ...]:
    """Return for each sample the file that it shares with other samples; empty text if it shares none.

    Samples of one file are alike, so statistics count them as one. `group_by_file` decides whether files count, on the
    set that the samples were selected from.

    Returns:
        An empty tuple if each sample counts by itself.

    >>> list_shared_files([{"x": 0}, {"x": 1}])
    ()
    """
    files = [origin_of(samples, place).file for place in range(len(samples))]
    shared = {files[group[0]] for group in group_equal(files) if len(group) > 1}
    while isinstance(samples, Subset):
        samples = samples.samples
    if not shared or len(group_by_file(samples)) == len(samples):
        return ()
    return tuple(file if file in shared else "" for file in files)


def group_equal(files: Sequence[str]) -> list[list[int]]:
    """Group the indices of samples that have the same file; samples with an empty file are groups of one.

    >>> group_equal(["a", "", "a", ""])
    [[0, 2], [1], [3]]
    """
    return _together(file or place for place, file in enumerate(files))


def _together(keys: Iterable[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def halves(samples: SampleSource, count: int) -> tuple[list[int], list[int]]:
    """Return the indices of `count` samples in two halves that share no file, spread over all samples.

    If samples share files, the chosen ones come from at most half of the files if that is enough. The other files then
    remain for a holdout that shares no file with them.

    Args:
        samples: all samples.
        count: all samples are taken if there are no more.

    >>> halves([{"x": place} for place in range(10)], 4)
    ([0, 6], [3, 9])
    """
    files = group_by_file(samples)
    if len(files) == len(samples):
        places = evenly_spaced_indices(len(samples), count)
        return places[::2], places[1::2]
    many = min(count, len(files) // 2)
    while many < len(files) and sum(map(len, _evenly(files, many))) < count:
        many += 1
    chosen = _evenly(files, many)
    parts = [sorted(chain.from_iterable(chosen[first::2])) for first in (0, 1)]
    # If one half has too few samples, the other takes more.
    first = min(count - min(count // 2, len(parts[1])), len(parts[0]))
    first_half, second = (
        [part[place] for place in evenly_spaced_indices(len(part), most)]
        for part, most in zip(parts, (first, count - first), strict=True)
    )
    return first_half, second


def _evenly(files: list[list[int]], most: int) -> list[list[int]]:
    return [files[place] for place in evenly_spaced_indices(len(files), most)]


# Subsets, and the split into calibration and holdout sets.

# With fewer samples, there is no holdout.
_FEWEST_SAMPLES = 8
_EACH = 4
# As many samples as the final comparison takes; from at least so many files if files hold several samples.
_MOST_HOLDOUT, _FILES = 64, 8


@dataclass(frozen=True)
class Subset:
    """The samples at some indices. Each iteration reads them again, without the others if the source has random access.

    Attributes:
        samples: all samples.
        places: rising indices.

    >>> [sample["x"] for sample in Subset([{"x": index} for index in range(5)], [0, 3])]
    [0, 3]
    """

    samples: SampleSource
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Sample]:
        return picked(self.samples, self.places)

    def origin(self, index: int) -> Origin:
        """Return the origin of a selected sample."""
        return origin_of(self.samples, self.places[index])

    def labels(self, index: int) -> tuple[int, ...]:
        """Return the class numbers of a selected sample."""
        return labels_of(self.samples, self.places[index])

    def read_samples(self, indices: Sequence[int]) -> Iterator[Sample]:
        """Yield the selected samples at rising `indices`."""
        return picked(self.samples, [self.places[index] for index in indices])


def split(samples: SampleSource, most: int = _MOST_HOLDOUT) -> tuple[SampleSource, SampleSource]:
    """Split samples into a calibration set, which also selects plans, and a holdout set, which evaluates the model.

    Every fourth sample goes to the holdout, at most `most`. With fewer than 8 samples, both sets are all samples. A
    sample that shares a file with the holdout (see `group_by_file`) never goes to the calibration set.

    Args:
        samples: all samples.
        most: maximum size of the holdout.

    >>> select, gate = split([{"x": place} for place in range(8)])
    >>> [sample["x"] for sample in select], [sample["x"] for sample in gate]
    ([1, 2, 3, 4, 5, 6], [0, 7])
    """
    count = len(samples)
    if count < _FEWEST_SAMPLES:
        return samples, samples
    files = group_by_file(samples)
    many = min(len(files) // _EACH, max(most * len(files) // count, _FILES))
    apart = {place for index in evenly_spaced_indices(len(files), many) for place in files[index]}
    near = sorted(apart)
    holdout = [near[place] for place in evenly_spaced_indices(len(near), most)]
    remaining = [place for place in range(count) if place not in apart]
    return Subset(samples, remaining), Subset(samples, holdout)
