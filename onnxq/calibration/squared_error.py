"""The range of least squared error, for the grid of codes that a spec makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.bins import BINS
from onnxq.calibration.evidence import TensorEvidence
from onnxq.calibration.histogram import Bins
from onnxq.calibration.ranges import bins_of_data
from onnxq.errors import SchemeError
from onnxq.numerics.formats import Format, format_named
from onnxq.numerics.spec import Spec

_STEPS = 64


@dataclass(frozen=True)
class Grid:
    """The codes that data gets from a range, and whether zero is the middle one.

    Args:
        levels: Number of codes, evenly spaced.
        symmetric: Whether the range is widened to be even on both sides of zero.
        format: Of codes that are floating-point numbers, which are not evenly spaced; None for integers.
    """

    levels: int
    symmetric: bool = False
    format: Format | None = None

    @classmethod
    def of(cls, spec: Spec, levels: int | None = None) -> Grid:
        """Return the grid of a spec; with `levels` one of so many codes and a zero point."""
        if levels is not None:
            return cls(levels)
        format = format_named(spec.format)
        steps = int(format.maximum - format.minimum)
        return cls(steps + 1, spec.symmetric, format if format.is_float else None)

    @property
    def is_fine(self) -> bool:
        """Whether codes are finer than the bins of a histogram, which then cannot tell what clipping would gain.

        >>> Grid(1 << 16).is_fine, Grid(1 << 8).is_fine
        (True, False)
        """
        return self.format is None and self.levels > BINS

    def rounded(
        self, lows: NDArray[np.float64], highs: NDArray[np.float64], values: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what values become with each range, float64 of shape (ranges, values).

        Args:
            lows: At most 0, of shape (ranges,).
            highs: At least 0, of shape (ranges,).
            values: Of shape (values,).
        """
        if self.symmetric:
            highs = np.maximum(-lows, highs)
            lows = -highs
        # A range of zero width gives every element the code of zero.
        scales = np.maximum((highs - lows)[:, None] / (self.levels - 1), np.finfo(np.float64).tiny)
        if self.format is not None:
            return np.asarray(self.format.numbers(self.format.round(values / scales)).astype(np.float64) * scales)
        zeros = np.full(scales.shape, self.levels // 2) if self.symmetric else np.rint(-lows[:, None] / scales)
        codes = np.clip(np.rint(values / scales) + zeros, 0, self.levels - 1)
        return np.asarray((codes - zeros) * scales)


@dataclass(frozen=True)
class MeanSquaredError:
    """The range with which data that is rounded to codes has the least squared error.

    Rounding and clipping errors are weighed over the histogram, see `expected_errors`; each end is searched in 64 steps
    between zero and the extreme, both ends in turn, twice; where zero is the middle code, both together. No range found
    has a greater error than the one from minimum to maximum.

    Args:
        levels: Number of codes, evenly spaced and with one for zero; None takes those of the spec.

    Raises:
        SchemeError: `levels` is below 2.
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None and self.levels < 2:
            raise SchemeError(f"MSE levels are {self.levels}, expected at least 2, such as 256 for 8 bits")

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Data that is all negative may end nearer to zero where codes are symmetric, which reach further below it.

        Raises:
            DataError: No element was seen, or none was counted.
        """
        data, grid = bins_of_data(seen), Grid.of(spec, self.levels)
        elements = _Elements.of(data)
        magnitude, (low, high) = elements.magnitude, elements.ends.tolist()
        low, high = min(low, 0.0), max(high, 0.0)
        steps = np.arange(_STEPS, 0, -1) / _STEPS
        if grid.symmetric:
            ends = steps * max(-low, high)
            errors = _errors(-ends, ends, elements, grid)
            end = float(ends[np.argmin(errors)])
            low, high = max(low, -end), min(high, end)
        else:
            lows, highs = steps * low, steps * high
            for _ in range(2):
                if high > 0:
                    errors = _errors(np.full(_STEPS, low), highs, elements, grid)
                    high = float(highs[np.argmin(errors)])
                if low < 0:
                    errors = _errors(lows, np.full(_STEPS, high), elements, grid)
                    low = float(lows[np.argmin(errors)])
        low, high = max(low * magnitude, data.minimum), min(high * magnitude, data.maximum)
        return low, max(low, high)


def expected_errors(
    data: Bins, lows: NDArray[np.float64], highs: NDArray[np.float64], grid: Grid
) -> NDArray[np.float64]:
    """Return the mean squared error of data that is rounded to codes with each range, over the histogram.

    Where codes are finer than bins, a single element that is clipped costs more than clipping gains. The least and the
    greatest one therefore count as one each, which an even selection of the elements need not hold.

    Args:
        data: Of at least one element, mask constants left out.
        lows: Low ends, of shape (candidates,).
        highs: High ends, of shape (candidates,).
        grid: The codes.

    Returns:
        Errors relative to the square of the greatest magnitude, float64 of shape (candidates,).
    """
    elements = _Elements.of(data)
    return _errors(np.minimum(lows, 0) / elements.magnitude, np.maximum(highs, 0) / elements.magnitude, elements, grid)


@dataclass(frozen=True, eq=False)
class _Elements:
    """The elements of a histogram, in units of the greatest magnitude: squares of the largest floats stay finite.

    Args:
        magnitude: The greatest; 1 where all are zero.
        ends: The least and the greatest element, float64 of shape (2,).
        centers: Of the bins that are not empty, float64 of shape (bins,).
        weights: Shares of the elements in these, float64 of shape (bins,).
        share: That of one element.
    """

    magnitude: float
    ends: NDArray[np.float64]
    centers: NDArray[np.float64]
    weights: NDArray[np.float64]
    share: float

    @classmethod
    def of(cls, data: Bins) -> _Elements:
        edges = data.edges.clip(data.minimum, data.maximum)
        filled = data.counts > 0
        magnitude = max(-data.minimum, data.maximum) or 1.0
        centers = ((edges[:-1] / 2 + edges[1:] / 2) / magnitude)[filled]
        total = data.counts.sum()
        ends = np.array([data.minimum, data.maximum]) / magnitude
        return cls(magnitude, ends, centers, data.counts[filled] / total, float(1 / total))


def _errors(
    lows: NDArray[np.float64], highs: NDArray[np.float64], elements: _Elements, grid: Grid
) -> NDArray[np.float64]:
    """Return the mean squared error of each candidate range, float64 of shape (candidates,)."""
    centers, weights = elements.centers, elements.weights
    if grid.is_fine:
        # Elements lie anywhere between two codes.
        highs = np.maximum(-lows, highs) if grid.symmetric else highs
        lows = -highs if grid.symmetric else lows
        clipped, beyond = (one - one.clip(lows[:, None], highs[:, None]) for one in (centers, elements.ends))
        steps = (highs - lows) / (grid.levels - 1)
        return np.asarray(
            np.square(clipped) @ weights + np.square(beyond).sum(1) * elements.share + np.square(steps) / 12
        )
    result: NDArray[np.float64] = np.square(grid.rounded(lows, highs, centers) - centers) @ weights
    return result
