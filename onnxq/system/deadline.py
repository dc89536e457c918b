"""When work has to end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """When work has to end.

    Attributes:
        at: value of the monotonic clock; infinite where work takes as long as it takes.

    >>> Deadline().left, Deadline.within(0).left
    (inf, 0.0)
    """

    at: float = math.inf

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        """Return the one after some seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds that are left, none of them below zero."""
        return max(self.at - time.monotonic(), 0.0)

    def at_most(self, seconds: float) -> Deadline:
        """Return this one, or the one after some seconds from now where that is sooner."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def part(self, share: float, reserved: float = 0.0) -> Deadline:
        """Return the one after a share of what is left beside the seconds that are reserved for what follows."""
        return Deadline.within(share * max(self.left - reserved, 0.0))


NEVER = Deadline()
"""Work takes as long as it takes."""
