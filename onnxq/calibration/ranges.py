"""Range methods: pure functions from what calibration saw to the range that codes will cover."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.sentinels import without_sentinels
from onnxq.calibration.statistics import TensorStatistics
from onnxq.errors import DataError, SchemeError, nearest

_STEPS = 64


class RangeMethod(Protocol):
    """Anything that turns statistics into (low, high)."""

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high), low <= high, for statistics of at least one element."""
        ...


@dataclass(frozen=True)
class MinMax:
    """The least and the greatest element, mask constants left out."""

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (minimum, maximum).

        Raises:
            DataError: No element was seen.
        """
        data = _data(statistics)
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
            DataError: No element was seen.
        """
        data = _data(statistics)
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
            DataError: No element was seen.
        """
        data = _data(statistics)
        edges = data.edges.clip(data.minimum, data.maximum)
        filled = data.counts > 0
        # Scaling by the magnitude keeps squares of the largest floats finite.
        magnitude = max(-data.minimum, data.maximum) or 1.0
        centers = ((edges[:-1] / 2 + edges[1:] / 2) / magnitude)[filled]
        weights = data.counts[filled] / data.counts.sum()
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


RANGES: Mapping[str, type] = MappingProxyType({"minmax": MinMax, "percentile": Percentile, "mse": MeanSquaredError})


def parse_range(text: str) -> RangeMethod:
    """Return the range method for ``minmax``, ``percentile``, ``percentile:99.9``, ``mse`` or ``mse:16``.

    Raises:
        SchemeError: The name is unknown, or its number is not one or not allowed.

    >>> parse_range("percentile:99.9")
    Percentile(percent=99.9)
    """
    name, separator, number = text.strip().partition(":")
    if name not in RANGES:
        raise SchemeError(
            f"Range method {name!r} is unknown, expected one of {', '.join(RANGES)}{nearest(name, RANGES)}"
        )
    method: Callable[..., RangeMethod] = RANGES[name]
    if not separator:
        return method()
    option = next(iter(dataclasses.fields(RANGES[name])), None)
    if option is None:
        raise SchemeError(f"Range method {name!r} takes no number, found {number!r}; write {name!r} alone")
    default = option.default
    try:
        return method(int(number) if isinstance(default, int) else float(number))
    except ValueError as error:
        raise SchemeError(
            f"Range method {text!r} has {number!r} for {option.name}, expected a number as in '{name}:{default}'"
        ) from error


def _data(statistics: TensorStatistics) -> TensorStatistics:
    data = without_sentinels(statistics)
    if not data.count:
        raise DataError("The tensor had no elements in any sample, expected some; leave it in float or add samples")
    return data


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
    scales = (highs - lows)[:, None] / (levels - 1)
    zeros = np.rint(-lows[:, None] / scales)
    codes = np.clip(np.rint(centers / scales) + zeros, 0, levels - 1)
    deviations = (codes - zeros) * scales - centers
    result: NDArray[np.float64] = np.square(deviations) @ weights
    return result
