"""The range that PyTorch's HistogramObserver finds: the tails are cut off step by step while the error falls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.evidence import TensorEvidence
from onnxq.calibration.ranges import bins_of_data
from onnxq.calibration.squared_error import Grid
from onnxq.errors import SchemeError
from onnxq.numerics.formats import format_named
from onnxq.numerics.spec import Spec

_STEP = 1e-5


@dataclass(frozen=True)
class HistogramSearch:
    """The search of PyTorch's HistogramObserver on the bins of the statistics.

    Codes are the middles of even steps there, none of them zero, so that few codes may clip all but a spike at zero. At
    least 1 in 100,000 elements is cut off, which costs codes of more than 4096 levels more than it gains: they get all.

    Args:
        levels: Number of codes; None takes all of the type's, as PyTorch does even where half of them are used.

    Raises:
        SchemeError: `levels` is below 2.
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None and self.levels < 2:
            raise SchemeError(f"Search levels are {self.levels}, expected at least 2, such as 256 for 8 bits")

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or none was counted.
        """
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
    """Return the range that HistogramObserver finds in its own histogram, in its float32 arithmetic.

    Args:
        histogram: Elements in each of equally wide bins.
        minimum: Lower edge of the first bin.
        maximum: Upper edge of the last bin.
        levels: Number of codes.
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
    taken, given, least = 0, 0, float("inf")
    while lower[taken] < upper[given]:
        left = max(start, min(lefts[taken + 1], end))
        right = min(end, max(rights[given + 1], start))
        if left - start > end - right:
            candidate, taken = (left, end), taken + 1
        else:
            candidate, given = (start, right), given + 1
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
    """Return the squared error of all elements, spread evenly in their bins, when bins `start` to `end` get codes."""
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
