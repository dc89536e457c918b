"""Calibration methods: from the statistics of a tensor to the range that its quantized values cover."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import MASK_MAGNITUDE, Range, SampleExtremes
from onnxq.calibration.histogram import BINS, Bins, Histogram
from onnxq.calibration.statistics import TensorStatistics
from onnxq.errors import DataError, SchemeError, check_type, convert_numpy_numbers, did_you_mean
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.spec import QuantSpec
from onnxq.system.plugins import load_registered, registered_names, wrap_plugin_errors

# Large values that fewer than 1 in 4096 elements have are outliers, which are data.
_RARE = 4096
# Relative rounding step of float16.
_ROUNDING = 2.0**-10
# Rare values of this magnitude or more are no outliers.
_NEVER_DATA = 1e30


def attention_mask_values(found: Range) -> tuple[float, ...]:
    """Return the extremes that are attention-mask constants, such as -1e4 or -3.4e38, and not data.

    An extreme is a mask constant if all of these hold:

    - Its magnitude is at least `MASK_MAGNITUDE`.
    - Some elements are below `MASK_MAGNITUDE` in magnitude, and all of these are within `MASK_MAGNITUDE` / 8 of zero.
    - The large elements on one side spread at most twice as far as the small ones, as constants with scores added do.
      Rounding of large float16 numbers is allowed for.
    - At least 1 in 4096 elements is large, or all large extremes are at least 1e30. Rarer elements are outliers.

    A data constant with the same pattern is taken for a mask too. `find_doubtful_masks` reports these tensors.
    """
    far = found.count - found.unmasked_count
    if not far or not found.unmasked_count or max(-found.unmasked_minimum, found.unmasked_maximum) > MASK_MAGNITUDE / 8:
        return ()
    masks = tuple(value for value in (found.minimum, found.maximum) if abs(value) >= MASK_MAGNITUDE)
    if far < found.count / _RARE and min(map(abs, masks)) < _NEVER_DATA:
        return ()
    spread = 2 * (found.unmasked_maximum - found.unmasked_minimum)
    below = found.below - found.minimum if found.minimum <= -MASK_MAGNITUDE else 0.0
    above = found.maximum - found.above if found.maximum >= MASK_MAGNITUDE else 0.0
    narrow = below <= max(spread, -found.minimum * _ROUNDING) and above <= max(spread, found.maximum * _ROUNDING)
    return masks if narrow else ()


def find_doubtful_masks(ranges: Mapping[str, Range]) -> dict[str, float]:
    """Return the largest mask constant of each tensor whose mask constants are all below 1e30 and so may be data."""
    masks = {tensor: attention_mask_values(extremes) for tensor, extremes in ranges.items()}
    largest = {tensor: max(values, key=abs) for tensor, values in masks.items() if values}
    return {tensor: value for tensor, value in largest.items() if abs(value) < _NEVER_DATA}


# Methods that need no search.


class CalibrationMethod(Protocol):
    """A function from the statistics of a tensor to the range (low, high) of its quantized values.

    The attribute ``kinds`` lists the statistics that it reads; the default is ``("range", "histogram")``.
    """

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        """Return (low, high), low <= high, for a tensor with at least one element.

        Raises:
            DataError: The tensor had no elements, or lacks a statistic of `kinds`.
        """
        ...

    def __hash__(self) -> int:
        """Hash the method as a value, as functions and frozen dataclasses do."""
        ...


@dataclass(frozen=True)
class MinMax:
    """The minimum and maximum, without mask constants.

    >>> parse_calibration_method("minmax")
    MinMax()
    """

    kinds: ClassVar[tuple[str, ...]] = ("range",)

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        return ends_of_data(seen)


@dataclass(frozen=True)
class Extremes:
    """The minimum and maximum, with mask constants."""

    kinds: ClassVar[tuple[str, ...]] = ("range",)

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        ends_of_data(seen)
        found = seen.need(Range)
        return found.minimum, found.maximum


@dataclass(frozen=True)
class Percentile:
    """The range of the central `percent` of the elements; each side loses half of the rest.

    Elements are assumed to be spread evenly inside a bin of the histogram.

    Raises:
        SchemeError: `percent` is not above 0 and at most 100.

    >>> parse_calibration_method("percentile:99.9")
    Percentile(percent=99.9)
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "percent")
        check_type(self.percent, (int, float), "the percentile", "a number such as 99.99")
        if not 0 < self.percent <= 100:
            raise SchemeError(f"Percentile is {self.percent}, expected above 0 and at most 100, such as 99.99")

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
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
    """The exponential moving average of the minimum and maximum of each sample.

    The first sample counts in full. Each later sample moves the average by `constant` times its distance. Samples are
    ordered by their digests, so the result does not depend on how they were run or merged. A sample with nothing but
    mask constants does not count.

    Raises:
        SchemeError: `constant` is not above 0 and at most 1.

    >>> parse_calibration_method("average:0.1")
    MovingAverage(constant=0.1)
    """

    kinds: ClassVar[tuple[str, ...]] = ("range", "sample-extremes")
    constant: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.constant <= 1:
            raise SchemeError(f"Averaging constant is {self.constant}, expected above 0 and at most 1, such as 0.01")

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        minimum, maximum = ends_of_data(seen)
        ends = seen.need(SampleExtremes).ends
        # A sample with nothing but mask constants lies outside the range of the data.
        ends = ends[(ends[:, 1] >= minimum) & (ends[:, 0] <= maximum)].clip(minimum, maximum)
        average = ends[0]
        for extremes in ends[1:]:
            average = average + self.constant * (extremes - average)
        low, high = average.clip(minimum, maximum).tolist()
        return low, high


@dataclass(frozen=True)
class Fixed:
    """A given range for every tensor.

    Raises:
        SchemeError: An end is not finite, or `low` is above `high`.

    >>> parse_calibration_method("fixed:-1,1")
    Fixed(low=-1.0, high=1.0)
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

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        return self.low, self.high


def ends_of_data(seen: TensorStatistics) -> tuple[float, float]:
    """Return the minimum and maximum without mask constants.

    Raises:
        DataError: The tensor had no elements.
    """
    extremes = seen.need(Range)
    if not extremes.count:
        raise DataError("The tensor had no elements in any sample, expected some; leave it in float or add samples")
    if attention_mask_values(extremes):
        return extremes.unmasked_minimum, extremes.unmasked_maximum
    return extremes.minimum, extremes.maximum


def bins_of_data(seen: TensorStatistics) -> Bins:
    """Return the histogram without mask constants.

    Raises:
        DataError: The tensor had no elements, or has no histogram.
    """
    ends_of_data(seen)
    histogram = seen.need(Histogram)
    return histogram.below_mask if attention_mask_values(seen.need(Range)) else histogram.whole


def _last_edge(edges: NDArray[np.float64], below: NDArray[np.float64], cut: float) -> float:
    """Return the position with `cut` elements below it, interpolated in the last bin that begins at or before it."""
    if cut <= 0:
        return float(edges[0])
    index = min(int(np.searchsorted(below, cut, side="right")) - 1, len(edges) - 2)
    share = min(float((cut - below[index]) / (below[index + 1] - below[index])), 1.0)
    start, end = float(edges[index]), float(edges[index + 1])
    return min(max(start * (1 - share) + end * share, start), end)


def _check_levels(method: str, levels: int | None, example: int, most: float = math.inf) -> None:
    if levels is not None and not 2 <= levels <= most:
        expected = "at least 2" if most == math.inf else f"2 to {most}"
        raise SchemeError(f"{method} levels are {levels}, expected {expected}, such as {example} for 8 bits")


# The range of least squared error.

_STEPS = 64


@dataclass(frozen=True)
class Grid:
    """The quantized values that a range is divided into.

    Args:
        levels: Number of evenly spaced quantized values.
        symmetric: Whether the range is widened to be symmetric around zero.
        format: The float format, whose values are not evenly spaced; None for integers.
    """

    levels: int
    symmetric: bool = False
    format: QuantDType | None = None

    @classmethod
    def of(cls, spec: QuantSpec, levels: int | None = None) -> Grid:
        """Return the grid of a spec; with `levels`, an asymmetric integer grid of that many values."""
        if levels is not None:
            return cls(levels)
        format = format_named(spec.format)
        steps = int(format.maximum - format.minimum)
        return cls(steps + 1, spec.symmetric, format if format.is_float else None)

    @property
    def is_fine(self) -> bool:
        """Whether quantized values are finer than the bins, so the histogram cannot show the gain of clipping.

        >>> Grid(1 << 16).is_fine, Grid(1 << 8).is_fine
        (True, False)
        """
        return self.format is None and self.levels > BINS

    def rounded(
        self, lows: NDArray[np.float64], highs: NDArray[np.float64], values: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the values quantized and dequantized with each range, float64 of shape (ranges, values).

        Args:
            lows: At most 0, of shape (ranges,).
            highs: At least 0, of shape (ranges,).
            values: Of shape (values,).
        """
        if self.symmetric:
            highs = np.maximum(-lows, highs)
            lows = -highs
        # A range of zero width quantizes every element to zero.
        scales = np.maximum((highs - lows)[:, None] / (self.levels - 1), np.finfo(np.float64).tiny)
        if self.format is not None:
            return np.asarray(self.format.numbers(self.format.round(values / scales)).astype(np.float64) * scales)
        zeros = np.full(scales.shape, self.levels // 2) if self.symmetric else np.rint(-lows[:, None] / scales)
        quantized = np.clip(np.rint(values / scales) + zeros, 0, self.levels - 1)
        return np.asarray((quantized - zeros) * scales)


@dataclass(frozen=True)
class MeanSquaredError:
    """The range of least mean squared error after quantization and dequantization.

    Rounding and clipping errors are summed over the histogram (`ScaledBins.errors`). Each end is searched in 64 steps
    between zero and the extreme, both ends in turn, twice. If the range is symmetric, both ends are searched together.
    The error is at most that of the full range.

    Args:
        levels: Number of evenly spaced quantized values, one of them zero; None takes the number of the spec.

    Raises:
        SchemeError: `levels` is below 2.

    >>> parse_calibration_method("mse")
    MeanSquaredError(levels=None)
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        _check_levels("MSE", self.levels, 256)

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        If the range is symmetric and all data is negative, `high` may be below the maximum: the grid reaches further
        anyway.
        """
        data, grid = bins_of_data(seen), Grid.of(spec, self.levels)
        scaled = ScaledBins.of(data)
        low, high = min(float(scaled.ends[0]), 0.0), max(float(scaled.ends[1]), 0.0)
        steps = np.arange(_STEPS, 0, -1) / _STEPS
        if grid.symmetric:
            ends = steps * max(-low, high)
            end = float(ends[scaled.errors(-ends, ends, grid).argmin()])
            low, high = max(low, -end), min(high, end)
        else:
            lows, highs = steps * low, steps * high
            for _ in range(2):
                if high > 0:
                    high = float(highs[scaled.errors(np.full(_STEPS, low), highs, grid).argmin()])
                if low < 0:
                    low = float(lows[scaled.errors(lows, np.full(_STEPS, high), grid).argmin()])
        low, high = max(low * scaled.magnitude, data.minimum), min(high * scaled.magnitude, data.maximum)
        return low, max(low, high)


@dataclass(frozen=True, eq=False)
class ScaledBins:
    """A histogram in units of the greatest magnitude, so that squares of the largest floats stay finite.

    Args:
        magnitude: The greatest magnitude; 1 if all elements are zero.
        ends: Minimum and maximum, of shape (2,).
        centers: Of the bins that are not empty, of shape (bins,).
        weights: Shares of the elements in these bins, of shape (bins,).
        share: Share of one element.
    """

    magnitude: float
    ends: NDArray[np.float64]
    centers: NDArray[np.float64]
    weights: NDArray[np.float64]
    share: float

    @classmethod
    def of(cls, data: Bins) -> ScaledBins:
        """Scale a histogram of at least one element, without mask constants."""
        edges = data.edges.clip(data.minimum, data.maximum)
        filled = data.counts > 0
        magnitude = max(-data.minimum, data.maximum) or 1.0
        centers = ((edges[:-1] / 2 + edges[1:] / 2) / magnitude)[filled]
        total = data.counts.sum()
        ends = np.array([data.minimum, data.maximum]) / magnitude
        return cls(magnitude, ends, centers, data.counts[filled] / total, float(1 / total))

    def errors(self, lows: NDArray[np.float64], highs: NDArray[np.float64], grid: Grid) -> NDArray[np.float64]:
        """Return the mean squared quantization error with each range, over the histogram.

        If quantized values are finer than bins, one clipped element costs more than clipping gains. The minimum and
        maximum therefore count as one element each, because the evenly spaced elements of the histogram may miss them.

        Args:
            lows: At most 0, in units of the magnitude, of shape (ranges,).
            highs: At least 0, likewise.
            grid: The quantized values.

        Returns:
            Errors in units of the squared magnitude, of shape (ranges,).
        """
        if not grid.is_fine:
            return np.asarray(np.square(grid.rounded(lows, highs, self.centers) - self.centers) @ self.weights)
        if grid.symmetric:
            highs = np.maximum(-lows, highs)
            lows = -highs
        clipped, beyond = (values - values.clip(lows[:, None], highs[:, None]) for values in (self.centers, self.ends))
        # Rounding errors are uniform, with a variance of step**2 / 12.
        rounding = np.square((highs - lows) / (grid.levels - 1)) / 12
        return np.asarray(np.square(clipped) @ self.weights + np.square(beyond).sum(1) * self.share + rounding)


# The range of least Kullback-Leibler divergence between float and quantized values.

_BINS = 2048
_ENTROPY_CANDIDATES = 256


@dataclass(frozen=True)
class Entropy:
    """The clipping magnitude of least Kullback-Leibler divergence between float and quantized magnitudes.

    For each candidate, the histogram of magnitudes is cut there, and its last bin takes all greater magnitudes. The
    candidate is compared with the same histogram coarsened to `levels`. The least divergence wins; of equal ones, the
    widest. A grid of more than 4096 values is finer than the histogram and gets the full range.

    Args:
        levels: Number of levels for magnitudes, 2 to 1024; None takes half of the values of the spec.

    Raises:
        SchemeError: `levels` is not from 2 to 1024.

    >>> parse_calibration_method("entropy:128")
    Entropy(levels=128)
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        _check_levels("Entropy", self.levels, 128, _BINS // 2)

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        data = bins_of_data(seen)
        if self.levels is None and Grid.of(spec).is_fine:
            return data.minimum, data.maximum
        levels = self.levels or _magnitude_levels(format_named(spec.format))
        counts, width, fold = _magnitudes(data)
        # The spike at zero, which has its own quantized value, would dominate the divergence.
        if fold < len(counts):
            counts[:fold] = counts[fold]
        if not counts.any():
            return data.minimum, data.maximum
        sizes = np.unique(np.linspace(levels, len(counts), _ENTROPY_CANDIDATES).astype(int))[::-1]
        limit = float(sizes[_divergences(counts, sizes, levels).argmin()]) * width
        low, high = max(data.minimum, -limit), min(data.maximum, limit)
        # An end beyond the limit on the wrong side of zero keeps its sign.
        return min(low, data.maximum), max(high, data.minimum)


def _magnitude_levels(format: QuantDType) -> int:
    levels = len(format.codebook.numbers) if format.codebook else int(format.maximum - format.minimum) + 1
    return min(max(levels // 2, 2), _BINS // 2)


def _magnitudes(data: Bins) -> tuple[NDArray[np.float64], float, int]:
    """Return counts of magnitudes in at least 2,048 bins from zero, the bin width, and the split of a bin."""
    first = data.first
    last = first + len(data.counts)
    size = max(last, -first)
    # Far from zero the bins would not fit into memory; coarser bins are fine enough for the candidates.
    shift = max(0, math.ceil(math.log2(size / (4 * _BINS))))
    bins = np.arange(first, last)
    counts = np.bincount(np.where(bins < 0, -1 - bins, bins) >> shift, weights=data.counts)
    fold = max(1, math.ceil(_BINS / len(counts)))
    return np.repeat(counts / fold, fold), math.ldexp(1.0, data.exponent + shift) / fold, fold


def _divergences(counts: NDArray[np.float64], sizes: NDArray[np.int64], levels: int) -> NDArray[np.float64]:
    """Return the divergence for each size: the first bins, coarsened, against them with all others in the last.

    Let k be the bins that are kept, and c = k with all others added to the last. Let s be the mean of the filled bins
    of a level. The divergence is the sum over bins of c log(c / s), with c and s each divided by its sum. Running sums
    of k and k log k give it for every size at once. It is infinite if the last bin is empty and greater bins are not.
    """
    own = counts * _logarithms(counts)
    below, filled, ordered = (np.concatenate([[0.0], np.cumsum(values)]) for values in (counts, counts > 0, own))
    starts = np.arange(levels + 1) * sizes[:, None] // levels
    inside, number = np.diff(below[starts]), np.diff(filled[starts])
    shares = _logarithms(inside / np.maximum(number, 1))
    total, kept, last = below[-1], below[sizes], counts[sizes - 1]
    rest = total - kept
    clipped = ordered[sizes - 1] + (last + rest) * _logarithms(last + rest)
    coarse = (inside * shares).sum(1) + rest * shares[:, -1]
    divergences = (clipped - coarse) / total - np.log(total) + _logarithms(kept)
    return np.where((rest > 0) & (last == 0), np.inf, divergences)


def _logarithms(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural logarithms, with 0 for 0, which is only ever multiplied by 0."""
    return np.log(values, out=np.zeros_like(values), where=values > 0)


# The search of PyTorch's HistogramObserver: cut off the tails step by step while the error falls.

_STEP = 1e-5


@dataclass(frozen=True)
class HistogramSearch:
    """The search of PyTorch's HistogramObserver, on the bins of the statistics.

    PyTorch assumes quantized values in the middle of even steps, none of them zero, so few levels may clip all but a
    spike at zero. At least 1 in 100,000 elements is cut off. If there are more than 4096 levels, that costs more than
    it gains, and the full range is taken.

    Args:
        levels: Number of quantized values; None takes all of the format, as PyTorch does even if half are used.

    Raises:
        SchemeError: `levels` is below 2.

    >>> parse_calibration_method("histogram")
    HistogramSearch(levels=None)
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        _check_levels("Search", self.levels, 256)

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        data, levels = bins_of_data(seen), self.levels or 2 ** format_named(spec.format).bits
        if Grid(levels).is_fine:
            return data.minimum, data.maximum
        magnitude = max(-data.minimum, data.maximum) or 1.0
        edges = data.edges / magnitude
        low, high = searched_range(data.counts, edges[0], edges[-1], levels)
        low, high = (min(max(end * magnitude, data.minimum), data.maximum) for end in (low, high))
        return low, high


def searched_range(
    histogram: NDArray[np.int64] | NDArray[np.float32], minimum: float, maximum: float, levels: int
) -> tuple[float, float]:
    """Return the range that HistogramObserver finds in a histogram, in its float32 arithmetic.

    Args:
        histogram: Number of elements in each of equally wide bins.
        minimum: Lower edge of the first bin.
        maximum: Upper edge of the last bin.
        levels: Number of quantized values.
    """
    counts = np.asarray(histogram, np.float32)
    below = np.cumsum(counts)
    total = float(counts.sum())
    steps = int(1 / _STEP) + 2
    # Sums of steps, rounded as the observer rounds them.
    lower = np.concatenate([[0.0], np.full(steps, _STEP)]).cumsum()
    upper = np.concatenate([[1.0], np.full(steps, -_STEP)]).cumsum()
    lefts = np.searchsorted(below, lower * total, side="left").tolist()
    rights = (np.searchsorted(below, upper * total, side="right") - 1).tolist()
    start, end = 0, len(counts) - 1
    taken, steps, least = 0, 0, float("inf")
    while lower[taken] < upper[steps]:
        left = max(start, min(lefts[taken + 1], end))
        right = min(end, max(rights[steps + 1], start))
        if left - start > end - right:
            candidate, taken = (left, end), taken + 1
        else:
            candidate, steps = (start, right), steps + 1
        if candidate == (start, end):
            continue
        error = _error(counts, *candidate, (float(np.float32(maximum) - np.float32(minimum))) / len(counts), levels)
        if error > least:
            break
        least, (start, end) = error, candidate
    width = (np.float32(maximum) - np.float32(minimum)) / np.float32(len(counts))
    return (
        float(np.float32(minimum) + width * np.float32(start)),
        float(np.float32(minimum) + width * np.float32(end + 1)),
    )


def _error(counts: NDArray[np.float32], start: int, end: int, width: float, levels: int) -> float:
    """Return the squared error over all elements, spread evenly in their bins, if bins `start` to `end` are kept."""
    step = np.float32(width * (end - start + 1) / levels)
    if step == 0:
        return 0.0
    half = step / np.float32(2)
    begins = (np.arange(len(counts)) - start).astype(np.float32) * np.float32(width)
    ends = begins + np.float32(width)
    first, last = (np.clip(np.floor(edges / step), 0, levels - 1) for edges in (begins, ends))
    to_center = half**3 - (begins - (first + np.float32(0.5)) * step) ** 3
    whole = (last - first - 1) * (half**3 + half**3)
    from_center = (ends - (last * step + half)) ** 3 + half**3
    density = counts / np.float32(width)
    return float((density * (to_center + whole + from_center) / np.float32(3)).sum())


# Calibration methods by name.

ENTRY_POINTS = "onnxq.ranges"
"""Group of entry points; each names a class or function that returns a `CalibrationMethod`."""

DEFAULT_METHODS: tuple[CalibrationMethod, ...] = (
    MinMax(),
    Percentile(99.999),
    Percentile(99.99),
    MeanSquaredError(),
    Percentile(99.9),
    Entropy(),
)
"""The methods that are tried if the user names none; the first is taken if nothing is measured."""

_KINDS = ("range", "histogram")

CALIBRATION_METHODS: Mapping[str, Callable[..., CalibrationMethod]] = MappingProxyType(
    {
        "minmax": MinMax,
        "extremes": Extremes,
        "average": MovingAverage,
        "percentile": Percentile,
        "entropy": Entropy,
        "mse": MeanSquaredError,
        "histogram": HistogramSearch,
        "fixed": Fixed,
    }
)


def parse_calibration_method(text: str) -> CalibrationMethod:
    """Return the method for ``NAME`` or ``NAME:NUMBERS``, such as ``percentile:99.9`` or ``fixed:-1,1``.

    A name is a key of `CALIBRATION_METHODS` or an entry point of the group ``onnxq.ranges``. The registered object is
    called with the numbers.

    Raises:
        SchemeError: The name is unknown, or the numbers are missing, malformed or out of bounds.

    >>> parse_calibration_method("percentile:99.9")
    Percentile(percent=99.9)
    """
    name, separator, numbers = text.strip().partition(":")
    if name == "auto":
        raise SchemeError(
            f"Calibration method {text!r} was removed; leave it out, and the search chooses among all methods"
        )
    make = CALIBRATION_METHODS.get(name) or load_registered(ENTRY_POINTS, name, "Calibration method")
    if make is None:
        names = [*CALIBRATION_METHODS, *registered_names(ENTRY_POINTS)]
        raise SchemeError(
            f"Calibration method {name!r} is unknown, expected one of {', '.join(names)}{did_you_mean(name, names)}"
        )
    options = _options(make)
    if separator and name in CALIBRATION_METHODS and not options:
        raise SchemeError(f"Calibration method {name!r} takes no number, found {numbers!r}; write {name!r} alone")
    # An optional number with default None is a number of levels.
    whole = bool(options) and (options[0].default is None or isinstance(options[0].default, int))
    try:
        arguments = [int(number) if whole else float(number) for number in numbers.split(",")] if separator else []
        with (
            wrap_plugin_errors(f"Calibration method {text!r}")
            if name not in CALIBRATION_METHODS and not options
            else nullcontext()
        ):
            return make(*arguments)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(option.name for option in options) or "its options"
        raise SchemeError(
            f"Calibration method {text!r} has {numbers!r} for {wanted}, expected {_example(name, options)}"
        ) from error


def find_range(method: CalibrationMethod, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
    """Return the range that a method finds for a tensor.

    Raises:
        DataError: The tensor had no elements.
        SchemeError: The method, which may be a plugin, fails or returns no valid range.
    """

    def what() -> str:
        name = format_method(method) or getattr(method, "__name__", repr(method))
        return f"Calibration method {name!r} for tensor {seen.tensor!r}"

    with wrap_plugin_errors(what):
        low, high = map(float, method(seen, spec))
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"it found {low:g} to {high:g}, expected two finite numbers, the lower first")
    return low, high


def format_method(method: object) -> str:
    """Return the text that `parse_calibration_method` parses to an equal method; empty if the method has no name.

    >>> format_method(Percentile(99.9999999)), format_method(MinMax()), format_method(MeanSquaredError(16))
    ('percentile:99.9999999', 'minmax', 'mse:16')
    """
    for name, make in chain(CALIBRATION_METHODS.items(), _packaged()):
        if type(method) is make:
            arguments = [getattr(method, field.name) for field in _options(make)]
            numbers = ",".join(_number_text(number) for number in arguments if number is not None)
            return f"{name}:{numbers}" if numbers else name
    return ""


def _packaged() -> Iterator[tuple[str, object]]:
    for name in registered_names(ENTRY_POINTS):
        with suppress(SchemeError):
            yield name, load_registered(ENTRY_POINTS, name, "Calibration method")


def _number_text(number: float) -> str:
    return str(int(number)) if float(number).is_integer() and abs(number) < 2**53 else repr(float(number))


def required_kinds(methods: Iterable[object]) -> tuple[str, ...]:
    """Return the kinds of statistics that calibration methods read, each once."""
    return tuple(dict.fromkeys(kind for method in methods for kind in getattr(method, "kinds", _KINDS)))


def _options(make: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(make) if isinstance(make, type) and dataclasses.is_dataclass(make) else ()


def _example(name: str, options: tuple[dataclasses.Field[Any], ...]) -> str:
    if options and options[0].default is None:
        return f"a number as in '{name}:256'"
    if options and options[0].default is not dataclasses.MISSING:
        return f"a number as in '{name}:{options[0].default}'"
    return f"numbers as in '{name}:-1,1'"
