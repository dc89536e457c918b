"""Range methods: pure functions from what calibration saw to the range that codes will cover."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError, SchemeError
from onnxq.evidence.sentinels import without_sentinels
from onnxq.evidence.tensor_statistics import TensorStatistics

_STEPS = 64


class RangeMethod(Protocol):
    """Anything that turns statistics into (low, high); one that needs no histogram says so by ``histogram = False``."""

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high), low <= high, for statistics of at least one element."""
        ...


@dataclass(frozen=True)
class MinMax:
    """The least and the greatest element, mask constants left out."""

    histogram: ClassVar[bool] = False

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (minimum, maximum).

        Raises:
            DataError: No element was seen.
        """
        data = data_of(statistics)
        return data.minimum, data.maximum


@dataclass(frozen=True)
class Percentile:
    """The range that keeps the central `percent` of the elements, half of the rest cut off on either side.

    Elements are taken as evenly spread inside a bin of the histogram.

    Raises:
        SchemeError: `percent` is not above 0 and at most 100.
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise SchemeError(f"Percentile is {self.percent}, expected above 0 and at most 100, such as 99.99")

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or none was counted.
        """
        data = histogram_of(statistics)
        below = np.concatenate([[0], np.cumsum(data.counts)]).astype(np.float64)
        cut = (1 - self.percent / 100) / 2 * below[-1]
        edges = data.edges.clip(data.minimum, data.maximum)
        low = _last_edge(edges, below, cut)
        high = -_last_edge(-edges[::-1], below[-1] - below[::-1], cut)
        return low, max(low, high)


@dataclass(frozen=True)
class MeanSquaredError:
    """The range with which a uniform quantizer of `levels` codes and a code for zero has the least squared error.

    Rounding and clipping errors are weighed over the histogram; each end is searched in 64 steps between zero and the
    extreme, both ends in turn, twice. No range found has a greater error than the one from minimum to maximum.

    Raises:
        SchemeError: `levels` is below 2.
    """

    levels: int = 256

    def __post_init__(self) -> None:
        if self.levels < 2:
            raise SchemeError(f"MSE levels are {self.levels}, expected at least 2, such as 256 for 8 bits")

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or none was counted.
        """
        data = histogram_of(statistics)
        magnitude, centers, weights = _normalized(data)
        low, high = min(data.minimum, 0.0) / magnitude, max(data.maximum, 0.0) / magnitude
        steps = np.arange(_STEPS, 0, -1) / _STEPS
        lows, highs = steps * low, steps * high
        for _ in range(2):
            if high > 0:
                high = float(highs[np.argmin(_errors(np.full(_STEPS, low), highs, centers, weights, self.levels))])
            if low < 0:
                low = float(lows[np.argmin(_errors(lows, np.full(_STEPS, high), centers, weights, self.levels))])
        low, high = max(low * magnitude, data.minimum), min(high * magnitude, data.maximum)
        return low, max(low, high)


@dataclass(frozen=True)
class MovingAverage:
    """Minimum and maximum of each sample, averaged in the order of the samples, however they were run.

    The first sample counts in full, each later one moves the average by `constant` of its distance.

    Raises:
        SchemeError: `constant` is not above 0 and at most 1.
    """

    histogram: ClassVar[bool] = False
    constant: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.constant <= 1:
            raise SchemeError(f"Averaging constant is {self.constant}, expected above 0 and at most 1, such as 0.01")

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or the extremes of the samples were not kept.
        """
        data = data_of(statistics)
        if not len(data.samples):
            raise DataError("The statistics do not tell samples apart, expected their extremes; calibrate again")
        average = data.extremes[0]
        for extremes in data.extremes[1:]:
            average = average + self.constant * (extremes - average)
        low, high = average.clip(data.minimum, data.maximum).tolist()
        return low, high


@dataclass(frozen=True)
class Fixed:
    """The same range whatever was seen.

    Raises:
        SchemeError: The ends are not finite, or in the wrong order.
    """

    histogram: ClassVar[bool] = False
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise SchemeError(f"Fixed range is {self.low} to {self.high}, expected low and high such as -1,1")

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high) as given."""
        return self.low, self.high


def expected_errors(
    statistics: TensorStatistics, lows: NDArray[np.float64], highs: NDArray[np.float64], levels: int
) -> NDArray[np.float64]:
    """Return the mean squared error that a uniform quantizer would have with each range, over the histogram.

    Args:
        statistics: Of at least one element, mask constants left out.
        lows: Low ends, of shape (candidates,).
        highs: High ends, of shape (candidates,).
        levels: Number of codes, one of which stands for zero.

    Returns:
        Errors relative to the square of the greatest magnitude, float64 of shape (candidates,).
    """
    magnitude, centers, weights = _normalized(statistics)
    return _errors(np.minimum(lows, 0) / magnitude, np.maximum(highs, 0) / magnitude, centers, weights, levels)


def data_of(statistics: TensorStatistics) -> TensorStatistics:
    """Return the statistics of what is data and no mask constant.

    Raises:
        DataError: No element was seen.
    """
    data = without_sentinels(statistics)
    if not data.count:
        raise DataError("The tensor had no elements in any sample, expected some; leave it in float or add samples")
    return data


def has_histogram(statistics: TensorStatistics) -> bool:
    """Return whether the elements were counted, and not only the extremes kept."""
    return bool(len((statistics.core or statistics).counts)) or not (statistics.core or statistics).count


def histogram_of(statistics: TensorStatistics) -> TensorStatistics:
    """Return the statistics of what is data and no mask constant, with a histogram.

    Raises:
        DataError: No element was seen, or none was counted.
    """
    data = data_of(statistics)
    if not has_histogram(statistics):
        raise DataError(
            "The statistics hold extremes and no histogram, expected one for this range method; calibrate again for it"
        )
    return data


def _normalized(data: TensorStatistics) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Return the greatest magnitude, and centers in units of it and shares of the bins that are not empty."""
    edges = data.edges.clip(data.minimum, data.maximum)
    filled = data.counts > 0
    # Scaling by the magnitude keeps squares of the largest floats finite.
    magnitude = max(-data.minimum, data.maximum) or 1.0
    centers = ((edges[:-1] / 2 + edges[1:] / 2) / magnitude)[filled]
    return magnitude, centers, data.counts[filled] / data.counts.sum()


def _last_edge(edges: NDArray[np.float64], below: NDArray[np.float64], cut: float) -> float:
    """Return where `cut` elements lie below, interpolated in the last bin that begins at or before it."""
    if cut <= 0:
        return float(edges[0])
    index = min(int(np.searchsorted(below, cut, side="right")) - 1, len(edges) - 2)
    share = min(float((cut - below[index]) / (below[index + 1] - below[index])), 1.0)
    start, end = float(edges[index]), float(edges[index + 1])
    return min(max(start * (1 - share) + end * share, start), end)


def _errors(
    lows: NDArray[np.float64],
    highs: NDArray[np.float64],
    centers: NDArray[np.float64],
    weights: NDArray[np.float64],
    levels: int,
) -> NDArray[np.float64]:
    """Return the mean squared error of each candidate range, float64 of shape (candidates,)."""
    # A range of zero width gives every element the code of zero.
    scales = np.maximum((highs - lows)[:, None] / (levels - 1), np.finfo(np.float64).tiny)
    zeros = np.rint(-lows[:, None] / scales)
    codes = np.clip(np.rint(centers / scales) + zeros, 0, levels - 1)
    deviations = (codes - zeros) * scales - centers
    result: NDArray[np.float64] = np.square(deviations) @ weights
    return result
