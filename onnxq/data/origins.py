"""Where samples come from: their numbers among those that were given, and the files that they lie in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from onnxq.data.inputs import SampleSource


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
class TracedSamples(Protocol):
    """Samples that know where each of them comes from."""

    def origin(self, index: int) -> Origin:
        """Return where the sample with an index among these comes from; nothing is read."""
        ...


def origin_of(samples: SampleSource, index: int) -> Origin:
    """Return where the sample with an index comes from; those of a list are as they were given.

    >>> origin_of([{}, {}], 1)
    Origin(place=1, file='')
    """
    return samples.origin(index) if isinstance(samples, TracedSamples) else Origin(index)


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
