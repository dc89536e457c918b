"""The kind ``range``: count and exact extremes, with what tells attention-mask constants apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import MASK, Arrays, Seen, Statistic, restored_from

_NOTHING = (math.inf, -math.inf)


@dataclass(frozen=True, eq=False)
class Range(Statistic):
    """Count and extremes of the elements of a tensor, of all and of those below `MASK` in magnitude, the core.

    Args:
        count: Number of elements.
        minimum: The least element; +inf if there was none.
        maximum: The greatest element; -inf if there was none.
        core_count: Number of elements of the core.
        core_minimum: The least element of the core; +inf if there was none.
        core_maximum: The greatest element of the core; -inf if there was none.
        below: The greatest element of at most -`MASK`; -inf if there was none.
        above: The least element of at least `MASK`; +inf if there was none.
    """

    kind: ClassVar[str] = "range"

    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    core_count: int = 0
    core_minimum: float = math.inf
    core_maximum: float = -math.inf
    below: float = -math.inf
    above: float = math.inf

    @classmethod
    def observed(cls, seen: Seen, request: Request) -> Range:
        """Return the range of one array.

        Raises:
            DataError: The dtype is no float type, or an element is NaN or infinite.
        """
        low, high = seen.ends
        if seen.core is seen.values:
            return cls(seen.values.size, low, high, seen.values.size, low, high)
        below = float(np.max(seen.values, initial=-math.inf, where=seen.values <= -MASK))
        above = float(np.min(seen.values, initial=math.inf, where=seen.values >= MASK))
        return cls(seen.values.size, low, high, seen.core.size, *seen.core_ends, below, above)

    @classmethod
    def observer(cls, request: Request) -> RangeObserver:
        """Return what takes in arrays in place."""
        return RangeObserver(request)

    def merge(self, other: Range) -> Range:
        """Return the range of the elements of both."""
        return Range(
            self.count + other.count,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.core_count + other.core_count,
            min(self.core_minimum, other.core_minimum),
            max(self.core_maximum, other.core_maximum),
            max(self.below, other.below),
            min(self.above, other.above),
        )

    def arrays(self) -> Arrays:
        """Return counts of shape (2,) and ends of shape (6,)."""
        ends = (self.minimum, self.maximum, self.core_minimum, self.core_maximum, self.below, self.above)
        return {"counts": np.array([self.count, self.core_count], np.int64), "ends": np.array(ends, np.float64)}

    @classmethod
    def restored(cls, arrays: Arrays) -> Range:
        """Return the range of which these are the arrays."""
        counts, ends = restored_from(arrays, ("counts", "ends"))
        count, core_count = (int(one) for one in counts)
        low, high, core_low, core_high, below, above = (float(end) for end in ends)
        found = cls(count, low, high, core_count, core_low, core_high, below, above)
        ordered = math.isfinite(low) and math.isfinite(high) if count else (low, high) == _NOTHING
        core = low <= core_low <= core_high <= high if core_count else (core_low, core_high) == _NOTHING
        masks = below <= -MASK and above >= MASK
        if not (0 <= core_count <= count and ordered and (low <= high or not count) and core and masks):
            raise ValueError("the ends of a range contradict its counts")
        return found


class RangeObserver:
    """Takes in arrays in place: to make two values of each would take longer than to look at most of them."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._count, self._minimum, self._maximum = 0, math.inf, -math.inf
        self._with_masks = Range()

    def add(self, seen: Seen) -> None:
        """Take in one array.

        Raises:
            DataError: The dtype is no float type, or an element is NaN or infinite.
        """
        low, high = seen.ends
        if seen.core is not seen.values:
            self._with_masks = self._with_masks.merge(Range.observed(seen, self._request))
            return
        self._count += seen.values.size
        self._minimum, self._maximum = min(low, self._minimum), max(high, self._maximum)

    def statistic(self) -> Range:
        """Return the range of all that was added."""
        ends = self._count, self._minimum, self._maximum
        return self._with_masks.merge(Range(*ends, *ends))
