"""What calibration saw of one tensor: a commutative monoid, exact for any order, split or number of shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError
from onnxq.evidence.bins import MINIMUM_EXPONENT, add_bins, bin_of, exponent_of

MASK = 8192.0
"""Least magnitude of an attention-mask constant: -1e4 with a score added to it still counts."""

SUM_BITS = 40
"""Sums are whole numbers of 2**-40: added in any order they are the same, which sums of floats are not."""


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """Count, extremes and histogram of the elements of one tensor.

    Args:
        count: Number of elements seen.
        minimum: Exact least element; +inf if none was seen, -inf where only sums were kept.
        maximum: Exact greatest element; -inf if none was seen, +inf where only sums were kept.
        exponent: Bins are ``2**exponent`` wide; a function of `minimum` and `maximum` only, so merging is exact.
        first: Bin ``i`` of `counts` covers ``[(first + i) * 2**exponent, (first + i + 1) * 2**exponent)``.
        counts: Elements per bin, int64 of shape (bins,), at most `BINS` bins; of all elements, or of an even selection
            where `observe` was given a limit. Empty where none was counted.
        core: Statistics of the elements below `MASK` in magnitude if some are not, else None.
        samples: The samples that were observed with an index and held elements, int64 of shape (samples,), rising.
        extremes: Minimum and maximum of each of these, float64 of shape (samples, 2), for what depends on their order.
        channels: Minimum and maximum of each channel, float64 of shape (channels, 2); of shape (0, 2) where they were
            not asked for.
        sums: Sum of each channel, rounded for each array, in whole numbers and 2**-40: int64 of shape (channels, 2);
            of shape (0, 2) where they were not asked for, or an element was not finite.
        axis: Axis of the channels of these sums, as it was asked for, since arrays may differ in rank: the last one is
            -1 whatever its number; None where no sums were asked for, or along different axes.
    """

    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    exponent: int = MINIMUM_EXPONENT
    first: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    core: TensorStatistics | None = None
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    extremes: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))
    channels: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))
    sums: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    axis: int | None = None

    @property
    def has_range(self) -> bool:
        """Whether the extremes are known; of a tensor that nobody quantizes, nothing but sums is kept."""
        return self.minimum != -math.inf

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean of each channel, float64 of shape (channels,); of shape (0,) where there are no sums."""
        if not len(self.sums):
            return np.zeros(0)
        means = (self.sums[:, 0] + np.ldexp(self.sums[:, 1], -SUM_BITS)) / (self.count // len(self.sums))
        return np.clip(means, self.minimum, self.maximum)

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent)

    @property
    def edges(self) -> NDArray[np.float64]:
        """The bin edges, float64 of shape (bins + 1,)."""
        return np.ldexp(np.arange(self.first, self.first + len(self.counts) + 1, dtype=np.float64), self.exponent)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorStatistics)
            and (self.count, self.minimum, self.maximum) == (other.count, other.minimum, other.maximum)
            and (self.exponent, self.first) == (other.exponent, other.first)
            and np.array_equal(self.counts, other.counts)
            and self.core == other.core
            and np.array_equal(self.samples, other.samples)
            and np.array_equal(self.extremes, other.extremes)
            and np.array_equal(self.channels, other.channels)
            and np.array_equal(self.sums, other.sums)
            and self.axis == other.axis
        )

    def __hash__(self) -> int:
        return hash((self.count, self.minimum, self.maximum))


EMPTY = TensorStatistics()
"""The statistics of no elements, the neutral element of `merge`."""


def merge(a: TensorStatistics, b: TensorStatistics) -> TensorStatistics:
    """Return the statistics of the elements of both: bit for bit what one observation of all of them gives.

    Raises:
        DataError: They have extremes of different numbers of channels.
    """
    if not a.count or not b.count:
        return a if a.count else b
    axis = a.axis if a.axis == b.axis else None
    sums = merged_sums(a.sums, b.sums) if axis is not None else a.sums[:0]
    if not (a.has_range and b.has_range):
        return only_sums(a.count + b.count, sums, axis)
    minimum, maximum = min(a.minimum, b.minimum), max(a.maximum, b.maximum)
    exponent = exponent_of(minimum, maximum)
    first = bin_of(minimum, exponent)
    counts = np.zeros(bin_of(maximum, exponent) - first + 1 if len(a.counts) or len(b.counts) else 0, np.int64)
    for part in (a, b):
        if len(part.counts):
            add_bins(counts, part.counts, part.first, exponent - part.exponent, first)
    core = None if a.core is None and b.core is None else merge(_core(a), _core(b))
    samples, extremes = _merged_extremes(a, b)
    channels = merged_channels(a.channels, b.channels)
    return TensorStatistics(
        a.count + b.count, minimum, maximum, exponent, first, counts, core, samples, extremes, channels, sums, axis
    )


def only_sums(count: int, sums: NDArray[np.int64], axis: int | None) -> TensorStatistics:
    """Return the statistics of so many elements of which nothing but sums of channels is known, or not even these."""
    return TensorStatistics(count, -math.inf, math.inf, sums=sums, axis=axis)


def merged_channels(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the extremes of channels that both saw a part of; none where one of them kept none.

    Raises:
        DataError: The numbers of channels differ.
    """
    if not len(a) or not len(b):
        return np.zeros((0, 2))
    _check_channels(a, b)
    return np.stack([np.minimum(a[:, 0], b[:, 0]), np.maximum(a[:, 1], b[:, 1])], 1)


def merged_sums(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of channels that both saw a part of; none where one of them kept none.

    Raises:
        DataError: The numbers of channels differ.
    """
    if not len(a) or not len(b):
        return np.zeros((0, 2), np.int64)
    _check_channels(a, b)
    return a + b


def _check_channels(a: NDArray[Any], b: NDArray[Any]) -> None:
    if len(a) != len(b):
        raise DataError(
            f"A tensor has {len(a)} and {len(b)} channels, expected one number in all samples; observe it whole"
        )


def restored(
    count: int,
    minimum: float,
    maximum: float,
    axis: int | None,
    counts: NDArray[np.int64],
    samples: NDArray[np.int64],
    extremes: NDArray[np.float64],
    channels: NDArray[np.float64],
    sums: NDArray[np.int64],
) -> TensorStatistics:
    """Return the statistics that these numbers were taken from.

    Raises:
        ValueError: The numbers contradict each other.
    """
    if not count:
        return EMPTY
    if len(sums) and (axis is None or count < len(sums)):
        raise ValueError("sums belong to no channels")
    if minimum == -math.inf:
        return only_sums(count, sums, axis)
    found = _statistics(count, minimum, maximum, counts)
    found = replace(found, samples=samples, extremes=extremes, channels=channels, sums=sums, axis=axis)
    last = bin_of(found.maximum, found.exponent)
    wrong = len(counts) != last - found.first + 1 or counts.min() < 0 or not 0 < counts.sum() <= count
    if count < 0 or (len(counts) and wrong):
        raise ValueError("counts contradict the extremes")
    ends = np.concatenate([extremes, channels])
    if (np.diff(samples) <= 0).any() or not (ends[:, 0] <= ends[:, 1]).all():
        raise ValueError("the extremes of samples or channels are out of order")
    return found


def _statistics(count: int, minimum: float, maximum: float, counts: NDArray[np.int64]) -> TensorStatistics:
    exponent = exponent_of(minimum, maximum)
    return TensorStatistics(count, minimum, maximum, exponent, bin_of(minimum, exponent), counts)


def _core(statistics: TensorStatistics) -> TensorStatistics:
    return statistics if statistics.core is None else statistics.core


def _merged_extremes(a: TensorStatistics, b: TensorStatistics) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return samples in order with their extremes; a sample that both saw a part of keeps the wider ones."""
    first, second = (b, a) if len(a.samples) and len(b.samples) and b.samples[0] < a.samples[0] else (a, b)
    samples = np.concatenate([first.samples, second.samples])
    extremes = np.concatenate([first.extremes, second.extremes])
    if not len(first.samples) or not len(second.samples) or first.samples[-1] < second.samples[0]:
        return samples, extremes
    once, places = np.unique(samples, return_inverse=True)
    widest = np.tile([np.inf, -np.inf], (len(once), 1))
    np.minimum.at(widest[:, 0], places, extremes[:, 0])
    np.maximum.at(widest[:, 1], places, extremes[:, 1])
    return once, widest
