"""The kind ``histogram``: counts in bins that widen with the range, of all elements and of the unmasked ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Accumulator, Arrays, Option, Request, TensorSample, restored_from

BINS = 4096
"""Most bins of a histogram."""
MINIMUM_EXPONENT = -1074
"""Exponent of the finest bins: the spacing of the smallest float64 numbers."""

# Integers below this are exact in float32, and so are differences of values within the bins of one histogram.
_EXACT_FLOAT32 = 1 << 23


def bins_of(values: NDArray[Any], exponent: int, first: int) -> NDArray[np.signedinteger]:
    """Return the bin of each value, counted from bin `first`."""
    # Multiplying a float32 by a power of two from 1 to 2**126 only changes its exponent, so nothing is rounded.
    if values.dtype == np.float32 and -126 <= exponent <= 0 and abs(first) < _EXACT_FLOAT32:
        scaled = values * np.float32(math.ldexp(1.0, -exponent))
        np.floor(scaled, out=scaled)
        scaled -= np.float32(first)
        # SIMD instructions convert floats to 32-bit integers, which hold any such bin.
        return scaled.astype(np.int32)
    wide = values.astype(np.float64)
    bins = np.floor(np.ldexp(wide, -exponent)).astype(np.intp)
    # A negative denormal may become -0.0 and lose its sign.
    bins[(bins == 0) & (wide < 0)] = -1
    return bins - first


def bin_of(value: float, exponent: int) -> int:
    """Return the bin of a value, counted from zero."""
    index = math.floor(math.ldexp(value, -exponent))
    return -1 if index == 0 and value < 0 else index


def exponent_of(minimum: float, maximum: float) -> int:
    """Return the least exponent at which `BINS` bins cover the range and bin numbers are exact in float64."""
    magnitude = max(-minimum, maximum)
    if magnitude == 0:
        return MINIMUM_EXPONENT
    finest = math.frexp(magnitude)[1] - 53
    # Halving large extremes keeps their difference finite; halving tiny ones would lose it.
    halving = -1 if magnitude > 1 else 0
    spread = math.frexp(math.ldexp(maximum, halving) - math.ldexp(minimum, halving))[1] - halving
    exponent = max(MINIMUM_EXPONENT, finest, spread - BINS.bit_length() if maximum > minimum else finest)
    while bin_of(maximum, exponent) - bin_of(minimum, exponent) >= BINS:
        exponent += 1
    return exponent


def add_bins(counts: NDArray[np.int64], added: NDArray[np.int64], added_first: int, coarser: int, first: int) -> None:
    """Add a histogram to one whose bins are ``2**coarser`` times as wide; exact, since bins nest.

    Args:
        counts: The wider histogram, changed in place; its first bin is `first`.
        added: The other histogram; its first bin is `added_first`.
        added_first: In bins of `added`.
        coarser: At least 0.
        first: In bins of `counts`.
    """
    if coarser == 0:
        counts[added_first - first : added_first - first + len(added)] += added
        return
    # Numpy shifts by at most 63, which leaves only the sign.
    coarser = min(coarser, 63)
    low, high = added_first >> coarser, (added_first + len(added) - 1) >> coarser
    starts = np.zeros(high - low + 1, np.intp)
    starts[1:] = (np.arange(low + 1, high + 1) << coarser) - added_first
    counts[low - first : high - first + 1] += np.add.reduceat(added, starts)


HISTOGRAM_ELEMENTS = 1 << 13
"""Elements counted per array: all elements of a convolutional network would take several times its inference."""

_BLOCK = 1 << 16
# Elements of small arrays wait up to this number; they take no more memory than the bins.
_WAITING = 1 << 13


@dataclass(frozen=True, eq=False)
class Bins:
    """Counts in equally wide bins, whose width depends on the extremes only.

    Args:
        minimum: Exact minimum; +inf if there was no element.
        maximum: Exact maximum; -inf if there was no element.
        counts: Elements per bin, int64 of shape (bins,), at most `BINS` bins; empty if there was no element.
    """

    minimum: float = math.inf
    maximum: float = -math.inf
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def exponent(self) -> int:
        """Bins are ``2**exponent`` wide, as fine as their number allows."""
        return exponent_of(self.minimum, self.maximum) if len(self.counts) else MINIMUM_EXPONENT

    @cached_property
    def first(self) -> int:
        """Bin ``i`` of `counts` covers ``[(first + i) * 2**exponent, (first + i + 1) * 2**exponent)``."""
        return bin_of(self.minimum, self.exponent) if len(self.counts) else 0

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent)

    @property
    def edges(self) -> NDArray[np.float64]:
        """The bin edges, float64 of shape (bins + 1,)."""
        first = self.first
        return np.ldexp(np.arange(first, first + len(self.counts) + 1, dtype=np.float64), self.exponent)

    @classmethod
    def counted(cls, minimum: float, maximum: float, values: NDArray[Any]) -> Bins:
        """Return the bins of elements with these extremes, of which some values are counted."""
        exponent = exponent_of(minimum, maximum)
        first = bin_of(minimum, exponent)
        counts = np.zeros(bin_of(maximum, exponent) - first + 1, np.int64)
        for start in range(0, values.size, _BLOCK):
            counts += np.bincount(bins_of(values[start : start + _BLOCK], exponent, first), minlength=len(counts))
        return cls(minimum, maximum, counts)

    def merge(self, other: Bins) -> Bins:
        """Return the bins of the elements of both, bit-identical to counting all of them at once."""
        if not len(self.counts) or not len(other.counts):
            return self if len(self.counts) else other
        minimum, maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        exponent = exponent_of(minimum, maximum)
        first = bin_of(minimum, exponent)
        counts = np.zeros(bin_of(maximum, exponent) - first + 1, np.int64)
        for part in (self, other):
            add_bins(counts, part.counts, part.first, exponent - part.exponent, first)
        return Bins(minimum, maximum, counts)

    def check(self) -> None:
        """Check that the counts fit the extremes.

        Raises:
            ValueError: They do not.
        """
        if not len(self.counts):
            return
        exponent = exponent_of(self.minimum, self.maximum)
        size = bin_of(self.maximum, exponent) - bin_of(self.minimum, exponent) + 1
        if len(self.counts) != size or self.counts.min() < 0 or self.counts.sum() <= 0:
            raise ValueError("counts contradict the extremes")


@dataclass(frozen=True, eq=False)
class Histogram(Accumulator):
    """The histogram of a tensor's elements, or of evenly spaced ones.

    The option ``elements`` is the number of evenly spaced elements that are counted of a larger array; 0 counts all.

    Args:
        whole: Bins of all elements.
        unmasked: Bins of the elements below `MASK_MAGNITUDE` in magnitude; None if all elements are.
    """

    kind: ClassVar[str] = "histogram"
    options: ClassVar[tuple[tuple[str, Option], ...]] = (("elements", HISTOGRAM_ELEMENTS),)

    whole: Bins = field(default_factory=Bins)
    unmasked: Bins | None = None

    @classmethod
    def observed(cls, seen: TensorSample, request: Request) -> Histogram:
        observer = cls.observer(request)
        observer.add(seen)
        return observer.statistic()

    @classmethod
    def observer(cls, request: Request) -> HistogramObserver:
        return HistogramObserver(int(request.option("elements", 0)) or None)

    def merge(self, other: Histogram) -> Histogram:
        unmasked = None if self.unmasked is None and other.unmasked is None else self.below_mask.merge(other.below_mask)
        return Histogram(self.whole.merge(other.whole), unmasked)

    @property
    def below_mask(self) -> Bins:
        """Bins of the elements below `MASK_MAGNITUDE` in magnitude."""
        return self.whole if self.unmasked is None else self.unmasked

    def arrays(self) -> Arrays:
        parts = [self.whole] if self.unmasked is None else [self.whole, self.unmasked]
        return {
            "ends": np.array([[part.minimum, part.maximum] for part in parts], np.float64),
            "sizes": np.array([len(part.counts) for part in parts], np.int64),
            "counts": np.concatenate([part.counts for part in parts]),
        }

    @classmethod
    def restored(cls, arrays: Arrays) -> Histogram:
        ends, sizes, counts = restored_from(arrays, ("ends", "sizes", "counts"))
        if len(sizes) not in (1, 2) or ends.shape != (len(sizes), 2) or sizes.sum() != len(counts):
            raise ValueError("the parts of a histogram do not fit")
        pieces = np.split(counts, np.cumsum(sizes)[:-1])
        parts = [Bins(float(low), float(high), piece) for (low, high), piece in zip(ends, pieces, strict=True)]
        for part in parts:
            part.check()
        return cls(*parts)


class HistogramObserver:
    """Counts the elements of arrays, bit-identical to merging the arrays' histograms.

    Args:
        elements: Number of evenly spaced elements to count of a larger array; None counts all.
    """

    def __init__(self, elements: int | None) -> None:
        self._elements = elements
        self._whole = _Counter(Bins())
        self._unmasked: _Counter | None = None

    def add(self, seen: TensorSample) -> None:
        chosen = self._chosen(seen, seen.values)
        is_unmasked = seen.unmasked is seen.values
        if not is_unmasked and self._unmasked is None:
            # All earlier elements were unmasked.
            self._unmasked = _Counter(self._whole.bins())
        self._whole.take(seen.ends, chosen)
        if self._unmasked is not None and seen.unmasked.size:
            self._unmasked.take(seen.unmasked_ends, chosen if is_unmasked else self._chosen(seen, seen.unmasked))

    def statistic(self) -> Histogram:
        return Histogram(self._whole.bins(), None if self._unmasked is None else self._unmasked.bins())

    def _chosen(self, seen: TensorSample, values: NDArray[Any]) -> NDArray[Any]:
        return values[seen.selection(values.size, self._elements)]


class _Counter:
    """Bins, and elements that wait to be counted: counting a few takes as long as counting some thousands."""

    def __init__(self, bins: Bins) -> None:
        self._bins = bins
        self._minimum, self._maximum = bins.minimum, bins.maximum
        self._waiting: list[NDArray[Any]] = []
        self._room = _WAITING

    def take(self, ends: tuple[float, float], chosen: NDArray[Any]) -> None:
        """Add elements with these extremes, of which the chosen ones are counted."""
        self._minimum, self._maximum = min(ends[0], self._minimum), max(ends[1], self._maximum)
        self._room -= chosen.size
        # Those that wait are copied: a view would keep the whole array in memory.
        self._waiting.append(chosen if self._room <= 0 else chosen.copy())
        if self._room <= 0:
            self.bins()

    def bins(self) -> Bins:
        """Count the elements that wait, and return the bins of all."""
        if self._waiting:
            values = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
            self._bins = self._bins.merge(Bins.counted(self._minimum, self._maximum, values))
            self._waiting, self._room = [], _WAITING
        return self._bins
