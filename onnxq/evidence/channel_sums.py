"""Sums of channels, alone or beside what an observer keeps: exact for any order, so that means are too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError
from onnxq.evidence.observer import Observer
from onnxq.evidence.tensor_statistics import EMPTY, SUM_BITS, TensorStatistics, merged_sums, only_sums

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
        sums = _whole_and_fraction(_checked_sums(array, self.axis, self.name))
        self._sums = merged_sums(self._sums, sums) if len(self._sums) else sums

    def statistics(self) -> TensorStatistics:
        """Return the statistics of all that was added."""
        found = self.observer.statistics()
        return replace(found, sums=self._sums.copy(), axis=self.axis) if found.count else found


@dataclass
class OnlySums:
    """An observer that adds up each channel and keeps nothing else; of what is not finite it keeps no sums.

    Attributes:
        name: the tensor, for errors.
        axis: of the channels.
    """

    name: str
    axis: int
    _count: int = 0
    _sums: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    def add(self, array: NDArray[Any], sample: int | None) -> None:
        """Take in one array.

        Raises:
            DataError: the axis is not there or not as long as before.
        """
        if not array.size:
            return
        sums = _checked_sums(array, self.axis, self.name)
        # A comparison with NaN is false too.
        known = bool((np.abs(sums) <= _LARGEST).all())
        found = _whole_and_fraction(sums) if known else self._sums[:0]
        self._sums = merged_sums(self._sums, found) if self._count else found
        self._count += array.size

    def statistics(self) -> TensorStatistics:
        """Return the statistics of all that was added."""
        return only_sums(self._count, self._sums.copy(), self.axis) if self._count else EMPTY


def _checked_sums(array: NDArray[Any], axis: int, name: str) -> NDArray[np.float64]:
    if not -array.ndim <= axis < array.ndim:
        raise DataError(
            f"Tensor {name!r} has {array.ndim} axes, expected axis {axis} for its channels; observe it whole"
        )
    # What is not finite in the array is not in its sums either.
    with np.errstate(invalid="ignore", over="ignore"):
        return channel_sums(array, axis)


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
