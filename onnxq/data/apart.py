"""Samples that share a file are alike: what is found on some of them is not judged by others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

from onnxq.data.inputs import SampleSource
from onnxq.data.origins import origin_of
from onnxq.data.stretches import even_places

# Of fewer files, or where one holds so large a part, hardly any can be spared for judging alone.
_FEWEST, _LARGEST = 8, 1 / 4


@runtime_checkable
class SelectedSamples(Protocol):
    """Samples that are some of others."""

    @property
    def samples(self) -> SampleSource:
        """All of them."""
        ...


def by_file(samples: SampleSource) -> list[list[int]]:
    """Return the places of samples, those of one file together, such as the rows of a stack.

    Each stands for itself where it has a file of its own, and where there are fewer than 8 files, or one of these holds
    more than a quarter of all.

    >>> by_file([{"x": 0}, {"x": 1}])
    [[0], [1]]
    """
    found = _together(origin_of(samples, place).file or place for place in range(len(samples)))
    if len(found) < _FEWEST or max(map(len, found)) > _LARGEST * len(samples):
        return [[place] for place in range(len(samples))]
    return found


def shared_files(samples: SampleSource) -> tuple[str, ...]:
    """Return for each sample the file that it shares with others of these, or an empty text where it shares none.

    Samples of one file are alike and count as one in what is told of all others, where files can be told apart so, see
    `by_file`: of selected samples, among all that they were selected from.

    Returns:
        Nothing where each sample counts by itself.

    >>> shared_files([{"x": 0}, {"x": 1}])
    ()
    """
    files = [origin_of(samples, place).file for place in range(len(samples))]
    shared = {files[one[0]] for one in counting_as_one(files) if len(one) > 1}
    while isinstance(samples, SelectedSamples):
        samples = samples.samples
    if not shared or len(by_file(samples)) == len(samples):
        return ()
    return tuple(file if file in shared else "" for file in files)


def counting_as_one(files: Sequence[str]) -> list[list[int]]:
    """Return the places of samples, those of one file together; where it is empty, a sample stands for itself.

    >>> counting_as_one(["a", "", "a", ""])
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
    files = by_file(samples)
    if len(files) == len(samples):
        places = even_places(len(samples), count)
        return places[::2], places[1::2]
    many = min(count, len(files) // 2)
    while many < len(files) and sum(map(len, _evenly(files, many))) < count:
        many += 1
    chosen = _evenly(files, many)
    parts = [sorted(chain.from_iterable(chosen[first::2])) for first in (0, 1)]
    # One half makes up for what the other lacks.
    first = min(count - min(count // 2, len(parts[1])), len(parts[0]))
    one, other = (
        [part[place] for place in even_places(len(part), most)]
        for part, most in zip(parts, (first, count - first), strict=True)
    )
    return one, other


def _evenly(files: list[list[int]], most: int) -> list[list[int]]:
    return [files[place] for place in even_places(len(files), most)]
