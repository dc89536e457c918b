"""Range methods: pure functions from what calibration saw to the range that codes will cover."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.evidence import TensorEvidence
from onnxq.calibration.histogram import Bins, Histogram
from onnxq.calibration.sample_extremes import SampleExtremes
from onnxq.calibration.sentinels import data_range, sentinels
from onnxq.calibration.value_range import Range
from onnxq.errors import DataError, SchemeError, check_type, convert_numpy_numbers
from onnxq.numerics.spec import Spec


class RangeMethod(Protocol):
    """Anything that turns what is known of a tensor into (low, high), for codes of a spec.

    It reads the statistics of its ``kinds``, ``("range", "histogram")`` where it does not say.
    """

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high), low <= high, for a tensor of which at least one element was seen."""
        ...

    def __hash__(self) -> int:
        """Methods are values; functions and frozen dataclasses have this anyway."""
        ...


@dataclass(frozen=True)
class MinMax:
    """The least and the greatest element, mask constants left out."""

    kinds: ClassVar[tuple[str, ...]] = ("range",)

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (minimum, maximum).

        Raises:
            DataError: No element was seen.
        """
        return ends_of_data(seen)


@dataclass(frozen=True)
class Extremes:
    """The least and the greatest element, those that look like mask constants as well."""

    kinds: ClassVar[tuple[str, ...]] = ("range",)

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (minimum, maximum).

        Raises:
            DataError: No element was seen.
        """
        ends_of_data(seen)
        found = seen.need(Range)
        return found.minimum, found.maximum


@dataclass(frozen=True)
class Percentile:
    """The range that keeps the central `percent` of the counted elements, half of the rest cut off on either side.

    Elements are taken as evenly spread inside a bin of the histogram. Ends beyond all that are counted
    are cut off as well, unless all are kept.

    Raises:
        SchemeError: `percent` is not above 0 and at most 100.
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "percent")
        check_type(self.percent, (int, float), "the percentile", "a number such as 99.99")
        if not 0 < self.percent <= 100:
            raise SchemeError(f"Percentile is {self.percent}, expected above 0 and at most 100, such as 99.99")

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or none was counted.
        """
        return self.within(bins_of_data(seen))

    def within(self, data: Bins) -> tuple[float, float]:
        """Return (low, high) of a histogram that is not empty."""
        below = np.concatenate([[0], np.cumsum(data.counts)]).astype(np.float64)
        cut = (1 - self.percent / 100) / 2 * below[-1]
        edges = data.edges.clip(data.minimum, data.maximum)
        low = _last_edge(edges, below, cut)
        high = -_last_edge(-edges[::-1], below[-1] - below[::-1], cut)
        return low, max(low, high)


@dataclass(frozen=True)
class MovingAverage:
    """Minimum and maximum of each sample, averaged one after the other in the order of the samples' digests.

    The first sample counts in full, each later one moves the average by `constant` of its distance. That order is a
    shuffled one that does not depend on how samples were run or merged. A sample that has nothing but mask constants
    does not count.

    Raises:
        SchemeError: `constant` is not above 0 and at most 1.
    """

    kinds: ClassVar[tuple[str, ...]] = ("range", "sample-extremes")
    constant: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.constant <= 1:
            raise SchemeError(f"Averaging constant is {self.constant}, expected above 0 and at most 1, such as 0.01")

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or the extremes of the samples were not kept.
        """
        minimum, maximum = ends_of_data(seen)
        ends = seen.need(SampleExtremes).ends
        # A sample of which nothing but masks was seen has no ends within the data.
        ends = ends[(ends[:, 1] >= minimum) & (ends[:, 0] <= maximum)].clip(minimum, maximum)
        average = ends[0]
        for extremes in ends[1:]:
            average = average + self.constant * (extremes - average)
        low, high = average.clip(minimum, maximum).tolist()
        return low, high


@dataclass(frozen=True)
class Fixed:
    """The same range whatever was seen.

    Raises:
        SchemeError: The ends are not finite, or in the wrong order.
    """

    kinds: ClassVar[tuple[str, ...]] = ("range",)
    low: float
    high: float

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "low", "high")
        for end in (self.low, self.high):
            check_type(end, (int, float), "an end of a fixed range", "a number")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise SchemeError(f"Fixed range is {self.low} to {self.high}, expected low and high such as -1,1")

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) as given."""
        return self.low, self.high


def ends_of_data(seen: TensorEvidence) -> tuple[float, float]:
    """Return the least and the greatest element that is no mask constant.

    Raises:
        DataError: No element was seen.
    """
    found = seen.need(Range)
    if not found.count:
        raise DataError("The tensor had no elements in any sample, expected some; leave it in float or add samples")
    return data_range(found)


def bins_of_data(seen: TensorEvidence) -> Bins:
    """Return the histogram of what is data and no mask constant.

    Raises:
        DataError: No element was seen, or none was counted.
    """
    ends_of_data(seen)
    histogram = seen.need(Histogram)
    return histogram.below_mask if sentinels(seen.need(Range)) else histogram.whole


def _last_edge(edges: NDArray[np.float64], below: NDArray[np.float64], cut: float) -> float:
    """Return where `cut` elements lie below, interpolated in the last bin that begins at or before it."""
    if cut <= 0:
        return float(edges[0])
    index = min(int(np.searchsorted(below, cut, side="right")) - 1, len(edges) - 2)
    share = min(float((cut - below[index]) / (below[index + 1] - below[index])), 1.0)
    start, end = float(edges[index]), float(edges[index + 1])
    return min(max(start * (1 - share) + end * share, start), end)
