"""The kind ``channel-ranges``: the exact extremes of each channel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import Arrays, Seen, Statistic, check_channels, restored_from


@dataclass(frozen=True, eq=False)
class ChannelRanges(Statistic):
    """The least and the greatest element of each channel.

    Args:
        ends: float64 of shape (channels, 2); of shape (0, 2) if there was no element.
    """

    kind: ClassVar[str] = "channel-ranges"

    ends: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))

    @classmethod
    def observed(cls, seen: Seen, request: Request) -> ChannelRanges:
        """Return the extremes of the channels of one array.

        Raises:
            DataError: The axis is not there, the dtype is no float type, or an element is NaN or infinite.
        """
        axis = seen.axis(request.axis)
        wide = np.moveaxis(seen.values.reshape(seen.array.shape), axis, 0).reshape(seen.array.shape[axis], -1)
        # What is not finite is told by the extremes of the whole.
        _ = seen.ends
        # Adding 0.0 makes an extreme of -0.0 independent of the order of the elements.
        return cls(np.stack([wide.min(1), wide.max(1)], 1).astype(np.float64) + 0.0)

    @classmethod
    def bytes_kept(cls, request: Request, elements: int, samples: int) -> int:
        """Return about how much memory it takes; see `Statistic.bytes_kept`."""
        # There seldom are more channels than places.
        return 2 * np.dtype(np.float64).itemsize * math.isqrt(elements)

    def merge(self, other: ChannelRanges) -> ChannelRanges:
        """Return the extremes of the elements of both.

        Raises:
            DataError: The numbers of channels differ.
        """
        if not len(self.ends) or not len(other.ends):
            return self if len(self.ends) else other
        check_channels(len(self.ends), len(other.ends))
        lows, highs = np.minimum(self.ends[:, 0], other.ends[:, 0]), np.maximum(self.ends[:, 1], other.ends[:, 1])
        return ChannelRanges(np.stack([lows, highs], 1))

    def arrays(self) -> Arrays:
        """Return the ends."""
        return {"ends": self.ends}

    @classmethod
    def restored(cls, arrays: Arrays) -> ChannelRanges:
        """Return the extremes of which these are the arrays."""
        (ends,) = restored_from(arrays, ("ends",))
        if ends.shape != (len(ends), 2) or not (np.isfinite(ends).all() and (ends[:, 0] <= ends[:, 1]).all()):
            raise ValueError("the extremes of channels are out of order or not finite")
        return cls(ends)

    @property
    def note(self) -> str:
        """How many channels there are."""
        return f"ranges of {len(self.ends)} channels" if len(self.ends) else ""
