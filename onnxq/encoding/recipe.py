"""How codes are chosen beyond what a plan says."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from onnxq.evidence.ranges import MinMax, RangeMethod


@dataclass(frozen=True)
class Recipe:
    """How codes are chosen beyond what a plan says.

    Attributes:
        ranges: which range the statistics of a tensor mean.
    """

    ranges: RangeMethod = field(default_factory=MinMax)

    @property
    def key(self) -> Hashable:
        """What tells recipes apart that give other codes."""
        return repr(self.ranges)


USUAL = Recipe()
"""What is taken where nothing else is said."""
