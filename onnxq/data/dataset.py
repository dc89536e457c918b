"""Sets of samples: some of them by index, where each comes from, and how they are split."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from onnxq.data.inputs import Input, Sample, SampleSource, checked
from onnxq.errors import DataError

Item = TypeVar("Item")


@dataclass(frozen=True)
class SampleSlice:
    """Some samples of one origin, in their order; iterating reads and checks them.

    Attributes:
        indices: of the samples among all samples, rising.
        start: the index of the origin's first sample.
        read: yields the samples of the origin at rising positions.
        inputs: what samples have to fit; empty where they are known to.
        where: the origin, for errors.
        stacked: whether errors say which sample of the origin is meant.
        stored: whether another process that sees the same files can read it.
        places: positions in the origin; empty where the indices tell them.
    """

    indices: Sequence[int]
    start: int
    read: Callable[[Sequence[int]], Iterable[Mapping[str, NDArray[Any]]]]
    inputs: tuple[Input, ...] = ()
    where: str = ""
    stacked: bool = False
    stored: bool = False
    places: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Sample]:
        """Read the samples one after the other.

        Raises:
            DataError: One cannot be read or does not fit, or the origin has become shorter.
        """
        positions, read = self.positions, 0
        for position, sample in zip(positions, self.read(positions), strict=False):
            where = f"{self.where}, sample {position}" if self.stacked else self.where
            yield checked(sample, self.inputs, where) if self.inputs else dict(sample)
            read += 1
        if read < len(positions):
            raise DataError(f"{self.where} lacks sample {positions[read]}, which it had when opened; keep it unchanged")

    @property
    def positions(self) -> Sequence[int]:
        """Where in the origin the samples lie."""
        return self.places or [index - self.start for index in self.indices]

    def split(self, count: int) -> tuple[SampleSlice, SampleSlice]:
        """Return the first so many samples, and the rest, which may be none."""
        return (
            replace(self, indices=self.indices[:count], places=self.places[:count]),
            replace(self, indices=self.indices[count:], places=self.places[count:]),
        )


@runtime_checkable
class RandomAccess(Protocol):
    """What can be asked for the item at any place, such as a map-style data set."""

    def __len__(self) -> int:
        """Return how many items there are."""
        ...

    def __getitem__(self, place: int) -> Any:
        """Read one item."""
        ...


@runtime_checkable
class IndexedSamples(Protocol):
    """Samples that can be asked for by index, of which nothing else is then read."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __iter__(self) -> Iterator[Sample]:
        """Start again at the first sample."""
        ...

    def stretches(self, indices: Sequence[int]) -> Iterator[SampleSlice]:
        """Yield the samples with these indices, which rise, in a stretch for each origin."""
        ...


def held(indices: Sequence[int], samples: Sequence[Sample]) -> SampleSlice:
    """Return samples that are in memory, and known to fit, as a stretch."""
    return SampleSlice(indices, 0, partial(_read_held, dict(zip(indices, samples, strict=True))))


def stretches(source: SampleSource, indices: Sequence[int]) -> Iterator[SampleSlice]:
    """Yield the samples with these indices, which rise, in stretches; a stream is read on the way."""
    if isinstance(source, IndexedSamples):
        yield from source.stretches(indices)
        return
    for index, sample in zip(indices, picked(source, indices), strict=True):
        yield held([index], [sample])


def is_random_access(given: object) -> TypeGuard[RandomAccess]:
    """Return whether items are asked for by place, and in no other way: what can be iterated may then give others.

    >>> is_random_access([]), is_random_access(type("Items", (), {"__len__": len, "__getitem__": dict.get})())
    (False, True)
    """
    return isinstance(given, RandomAccess) and not isinstance(given, type) and not hasattr(given, "__iter__")


def picked(items: Iterable[Item], indices: Sequence[int]) -> Iterator[Item]:
    """Yield the items with these indices, which rise; where it can be asked for them, nothing else is read.

    Raises:
        DataError: There are fewer items than that.

    >>> list(picked(range(10), [2, 5]))
    [2, 5]
    """
    if isinstance(items, IndexedSamples):
        for stretch in items.stretches(indices):
            yield from stretch
    # A subclass may iterate as it likes.
    elif (isinstance(items, Sequence) and type(items) in (list, tuple, range)) or is_random_access(items):
        yield from (items[index] for index in indices)
    else:
        last = -1
        stream = iter(items)
        for index in indices:
            found = list(islice(stream, index - last - 1, index - last))
            if not found:
                raise DataError(f"The samples end before sample {index}, expected it; keep them as they were counted")
            yield found[0]
            last = index


def evenly_spaced_indices(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` places, evenly spaced.

    >>> evenly_spaced_indices(10, 4)
    [0, 3, 6, 9]
    """
    return [int(index) for index in np.linspace(0, count - 1, min(count, most)).round()]


def _read_held(samples: Mapping[int, Sample], positions: Sequence[int]) -> Iterator[Sample]:
    return (samples[position] for position in positions)


# Where samples come from: their numbers among those that were given, and the files that they lie in.


@dataclass(frozen=True)
class Origin:
    """Where a sample comes from.

    Attributes:
        place: its index among the samples that were given; of files that a limit left out, none are counted.
        file: the file or folder that holds it; empty where it came from memory.
    """

    place: int
    file: str = ""


@runtime_checkable
class TraceableSamples(Protocol):
    """Samples that know where each of them comes from."""

    def origin(self, index: int) -> Origin:
        """Return where the sample with an index among these comes from; nothing is read."""
        ...


def origin_of(samples: SampleSource, index: int) -> Origin:
    """Return where the sample with an index comes from; those of a list are as they were given.

    >>> origin_of([{}, {}], 1)
    Origin(place=1, file='')
    """
    return samples.origin(index) if isinstance(samples, TraceableSamples) else Origin(index)


def ranges_of(places: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return rising indices as pairs of the first and the last of those without a gap.

    >>> ranges_of([0, 1, 2, 7])
    ((0, 2), (7, 7))
    """
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place - 1:
            found[-1] = found[-1][0], place
        else:
            found.append((place, place))
    return tuple(found)


# Samples that share a file are alike: what is found on some of them is not judged by others.

# Of fewer files, or where one holds so large a part, hardly any can be spared for judging alone.
_FEWEST_FILES, _LARGEST = 8, 1 / 4


@runtime_checkable
class SelectedSamples(Protocol):
    """Samples that are some of others."""

    @property
    def samples(self) -> SampleSource:
        """All of them."""
        ...


def group_by_file(samples: SampleSource) -> list[list[int]]:
    """Return the places of samples, those of one file together, such as the rows of a stack.

    Each stands for itself where it has a file of its own, and where there are fewer than 8 files, or one of these holds
    more than a quarter of all.

    >>> group_by_file([{"x": 0}, {"x": 1}])
    [[0], [1]]
    """
    found = _together(origin_of(samples, place).file or place for place in range(len(samples)))
    if len(found) < _FEWEST_FILES or max(map(len, found)) > _LARGEST * len(samples):
        return [[place] for place in range(len(samples))]
    return found


def list_shared_files(samples: SampleSource) -> tuple[str, ...]:
    """Return for each sample the file that it shares with others of these, or an empty text where it shares none.

    Samples of one file are alike and count as one in what is told of all others, where files can be told apart so, see
    `group_by_file`: of selected samples, among all that they were selected from.

    Returns:
        Nothing where each sample counts by itself.

    >>> list_shared_files([{"x": 0}, {"x": 1}])
    ()
    """
    files = [origin_of(samples, place).file for place in range(len(samples))]
    shared = {files[one[0]] for one in group_equal(files) if len(one) > 1}
    while isinstance(samples, SelectedSamples):
        samples = samples.samples
    if not shared or len(group_by_file(samples)) == len(samples):
        return ()
    return tuple(file if file in shared else "" for file in files)


def group_equal(files: Sequence[str]) -> list[list[int]]:
    """Return the places of samples, those of one file together; where it is empty, a sample stands for itself.

    >>> group_equal(["a", "", "a", ""])
    [[0, 2], [1], [3]]
    """
    return _together(file or place for place, file in enumerate(files))


def _together(keys: Iterable[Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return list(found.values())


def halves(samples: SampleSource, count: int) -> tuple[list[int], list[int]]:
    """Return the places of so many samples, in two halves that share no file, spread over all.

    Where samples share files, they come of no more than half of these if that is enough, so that others are left which
    share none with them.

    Args:
        samples: all of them.
        count: how many are wanted; all are taken where there are no more.

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
    # One half makes up for what the other lacks.
    first = min(count - min(count // 2, len(parts[1])), len(parts[0]))
    one, other = (
        [part[place] for place in evenly_spaced_indices(len(part), most)]
        for part, most in zip(parts, (first, count - first), strict=True)
    )
    return one, other


def _evenly(files: list[list[int]], most: int) -> list[list[int]]:
    return [files[place] for place in evenly_spaced_indices(len(files), most)]


# Some of the samples as a source of their own, and all of them in two parts: to choose by, and to judge by.

# Of fewer, none can be spared for judging alone.
_FEWEST_SAMPLES = 8
_EACH = 4
# As many as are compared in the end, and of so many files where these hold several.
_MOST_JUDGING, _FILES = 64, 8


@dataclass(frozen=True)
class Subset:
    """The samples at some places, read anew by each iteration and without the others where that can be.

    Attributes:
        samples: all of them.
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
        """Return where a selected sample comes from."""
        return origin_of(self.samples, self.places[index])

    def stretches(self, indices: Sequence[int]) -> Iterator[SampleSlice]:
        """Yield the samples with these indices among the selected ones, which rise, in a stretch for each origin."""
        first = 0
        for stretch in stretches(self.samples, [self.places[index] for index in indices]):
            own = indices[first : first + len(stretch)]
            yield replace(stretch, indices=own, places=stretch.positions)
            first += len(own)


def split(samples: SampleSource, most: int = _MOST_JUDGING) -> tuple[SampleSource, SampleSource]:
    """Return the samples that set ranges and by which plans are chosen, and those by which the model is judged.

    Every fourth judges, 64 at most unless more are wanted; of fewer than 8 samples, none can be spared, and all are for
    both. Samples that share a file with one that judges, as far as files can be told apart so (see `group_by_file`),
    are for neither or judge as well.

    Args:
        samples: all of them.
        most: how many may judge.

    >>> select, gate = split([{"x": place} for place in range(8)])
    >>> [sample["x"] for sample in select], [sample["x"] for sample in gate]
    ([1, 2, 3, 4, 5, 6], [0, 7])
    """
    count = len(samples)
    if count < _FEWEST_SAMPLES:
        return samples, samples
    files = group_by_file(samples)
    many = min(len(files) // _EACH, max(most * len(files) // count, _FILES))
    apart = {place for one in evenly_spaced_indices(len(files), many) for place in files[one]}
    near = sorted(apart)
    judging = [near[place] for place in evenly_spaced_indices(len(near), most)]
    others = [place for place in range(count) if place not in apart]
    return Subset(samples, others), Subset(samples, judging)
