"""Stretches: samples of one origin, read by whoever needs them, in this process or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from onnxq.data.inputs import Input, Sample, SampleSource, checked
from onnxq.errors import DataError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stretch:
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

    def split(self, count: int) -> tuple[Stretch, Stretch]:
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

    def stretches(self, indices: Sequence[int]) -> Iterator[Stretch]:
        """Yield the samples with these indices, which rise, in a stretch for each origin."""
        ...


def held(indices: Sequence[int], samples: Sequence[Sample]) -> Stretch:
    """Return samples that are in memory, and known to fit, as a stretch."""
    return Stretch(indices, 0, partial(_read_held, dict(zip(indices, samples, strict=True))))


def stretches(source: SampleSource, indices: Sequence[int]) -> Iterator[Stretch]:
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


def even_places(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` places, evenly spaced.

    >>> even_places(10, 4)
    [0, 3, 6, 9]
    """
    return [int(index) for index in np.linspace(0, count - 1, min(count, most)).round()]


def _read_held(samples: Mapping[int, Sample], positions: Sequence[int]) -> Iterator[Sample]:
    return (samples[position] for position in positions)
