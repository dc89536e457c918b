"""Sums of channels beside what an observer keeps: exact for any order, so that means are too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.observer import Observer
from onnxq.calibration.statistics import SUM_BITS, TensorStatistics, merged_sums
from onnxq.errors import DataError

# Of one array; so many of these add up within an int64 that nothing real reaches its end.
_LARGEST = 2.0**48


@dataclass
class ChannelSums:
    """An observer that also adds up each channel of its arrays.

    Attributes:
        observer: keeps everything else.
        name: the tensor, for errors.
        axis: of the channels.
    """

    observer: Observer
    name: str
    axis: int
    _sums: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    def add(self, array: NDArray[Any], sample: int | None) -> None:
        """Take in one array.

        Raises:
            DataError: what the observer raises, or the axis is not there or as long as before.
        """
        self.observer.add(array, sample)
        if not array.size:
            return
        if not -array.ndim <= self.axis < array.ndim:
            raise DataError(
                f"Tensor {self.name!r} has {array.ndim} axes, expected axis {self.axis} for its channels; "
                "observe it whole"
            )
        sums = _whole_and_fraction(channel_sums(array, self.axis))
        self._sums = merged_sums(self._sums, sums) if len(self._sums) else sums

    def statistics(self) -> TensorStatistics:
        """Return the statistics of all that was added."""
        found = self.observer.statistics()
        return replace(found, sums=self._sums.copy()) if found.count else found


def channel_sums(array: NDArray[Any], axis: int) -> NDArray[np.float64]:
    """Return the sum of each channel of an array, float64 of shape (channels,).

    >>> channel_sums(np.ones((2, 3, 4), np.float32), 1)
    array([8., 8., 8.])
    """
    axis %= array.ndim
    values = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    wide = values.reshape(math.prod(array.shape[:axis]), array.shape[axis], -1)
    if wide.shape[2] == 1:
        return np.asarray(wide[:, :, 0].sum(0, dtype=np.float64))
    # Several times as fast as sum() along short rows; rounding in float32 is far below what means are used for.
    return np.asarray(np.einsum("bcs->bc", wide).sum(0, dtype=np.float64))


def _whole_and_fraction(sums: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return sums as whole numbers and the rest in units of 2**-40, which add up without rounding."""
    whole = np.floor(np.clip(sums, -_LARGEST, _LARGEST))
    rest = np.clip(sums - whole, 0.0, 1.0)
    return np.stack([whole, np.rint(np.ldexp(rest, SUM_BITS))], 1).astype(np.int64)
