"""The kind ``channel-means``: sums of channels that are exact for any order, so that means are too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import Arrays, Seen, Statistic, check_channels, restored_from

SUM_BITS = 40
"""Sums are whole numbers of 2**-40: added in any order they are the same, which sums of floats are not."""

# Sums are kept in units of 2**22, of which an int64 counts more than anybody's arrays add up to, and a rest below that.
_UNIT_BITS = 22
_REST_BITS = _UNIT_BITS + SUM_BITS
# Of one array; as many as wait to be rounded add up within an int64.
_LARGEST = 2.0**48
# Sums of channels, of several arrays, that wait to be rounded.
_WAITING = 1 << 11


@dataclass(frozen=True, eq=False)
class ChannelMeans(Statistic):
    """The sum of each channel; of what is not finite, or is too large to be added up exactly, none is kept.

    Args:
        count: Number of elements.
        sums: Sum of each channel, rounded for each array: how many times 2**22, and the rest in units of 2**-40, which
            is below 2**62; int64 of shape (channels, 2), of shape (0, 2) where they are not known.
    """

    kind: ClassVar[str] = "channel-means"

    count: int = 0
    sums: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def rows(self) -> int:
        """How many elements each channel had; 0 where the means are not known."""
        return self.count // len(self.sums) if len(self.sums) else 0

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean of each channel, float64 of shape (channels,); of shape (0,) where they are not known."""
        if not len(self.sums):
            return np.zeros(0)
        units, rest = self.sums.T
        whole, fraction = divmod(rest, 1 << SUM_BITS)
        # Only the last of these additions may round.
        totals = (
            np.ldexp(units.astype(np.float64), _UNIT_BITS) + whole + np.ldexp(fraction.astype(np.float64), -SUM_BITS)
        )
        return np.asarray(totals / self.rows)

    @classmethod
    def observed(cls, seen: Seen, request: Request) -> ChannelMeans:
        """Return the sums of one array.

        Raises:
            DataError: The axis is not there.
        """
        observer = cls.observer(request)
        observer.add(seen)
        return observer.statistic()

    @classmethod
    def observer(cls, request: Request) -> MeansObserver:
        """Return what adds up arrays in place."""
        return MeansObserver(request.axis)

    @classmethod
    def bytes_kept(cls, request: Request, elements: int, samples: int) -> int:
        """Return about how much memory it takes; see `Statistic.bytes_kept`."""
        # There seldom are more channels than places.
        return 2 * np.dtype(np.float64).itemsize * math.isqrt(elements)

    def merge(self, other: ChannelMeans) -> ChannelMeans:
        """Return the sums of the elements of both; not known where one of them does not know.

        Raises:
            DataError: The numbers of channels differ.
        """
        if not self.count or not other.count:
            return self if self.count else other
        if not len(self.sums) or not len(other.sums):
            return ChannelMeans(self.count + other.count)
        check_channels(len(self.sums), len(other.sums))
        return ChannelMeans(self.count + other.count, _carried(self.sums + other.sums, _REST_BITS))

    def arrays(self) -> Arrays:
        """Return the count of shape (1,) and the sums."""
        return {"count": np.array([self.count], np.int64), "sums": self.sums}

    @classmethod
    def restored(cls, arrays: Arrays) -> ChannelMeans:
        """Return the means of which these are the arrays."""
        count, sums = restored_from(arrays, ("count", "sums"))
        whole = int(count[0])
        if sums.shape != (len(sums), 2) or whole < len(sums) or (len(sums) and whole % len(sums)):
            raise ValueError("sums belong to no channels")
        if ((sums[:, 1] < 0) | (sums[:, 1] >> _REST_BITS > 0)).any():
            raise ValueError("sums have a rest that is a whole unit or more")
        return cls(whole, sums)

    @property
    def note(self) -> str:
        """How many channels have a mean."""
        if not self.count:
            return ""
        return f"means of {len(self.sums)} channels" if len(self.sums) else "no mean, which is not finite or too large"


class MeansObserver:
    """Adds up arrays: what their channels sum up to is rounded, and added to the rest, for many arrays at once.

    Args:
        axis: Of the channels.
    """

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self._total, self._count = ChannelMeans(), 0
        self._waiting: list[NDArray[np.float64]] = []

    def add(self, seen: Seen) -> None:
        """Take in one array.

        Raises:
            DataError: The axis is not there, or the number of channels is another one than before.
        """
        # What is not finite in the array is not in its sums either.
        with np.errstate(invalid="ignore", over="ignore"):
            sums = channel_sums(seen.array, seen.axis(self._axis))
        if self._waiting and (len(self._waiting) * len(sums) >= _WAITING or len(sums) != len(self._waiting[0])):
            self._add_up()
        self._waiting.append(sums)
        self._count += seen.array.size

    def statistic(self) -> ChannelMeans:
        """Return the sums of all that was added.

        Raises:
            DataError: The number of channels is another one than before.
        """
        self._add_up()
        return self._total

    def _add_up(self) -> None:
        if not self._waiting:
            return
        sums, count = np.array(self._waiting), self._count
        self._waiting, self._count = [], 0
        # A comparison with NaN is false too.
        known = bool((np.abs(sums) <= _LARGEST).all())
        found = ChannelMeans(count, _units_and_rest(sums)) if known else ChannelMeans(count)
        self._total = self._total.merge(found)


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


def _units_and_rest(sums: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return sums of shape (arrays, channels) in units of 2**22 and of 2**-40, added up exactly."""
    whole = np.floor(sums)
    parts = whole, np.rint(np.ldexp(sums - whole, SUM_BITS))
    whole, fraction = _carried(np.stack([part.astype(np.int64).sum(0) for part in parts], 1), SUM_BITS).T
    units, rest = divmod(whole, 1 << _UNIT_BITS)
    return np.stack([units, (rest << SUM_BITS) + fraction], 1)


def _carried(sums: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Return numbers of two places, of shape (channels, 2), with the second from 0 on and below 2**bits."""
    over = sums[:, 1] >> bits
    return np.stack([sums[:, 0] + over, sums[:, 1] - (over << bits)], 1) if over.any() else sums
