"""Requests: what is to be observed of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering

Option = int | float | str


@total_ordering
@dataclass(frozen=True)
class Request:
    """A statistic that is wanted of a tensor.

    Args:
        tensor: Its name.
        kind: A name of `onnxq.calibration.kinds.KINDS`, or one that an installed package registers.
        axis: Of the channels, for kinds that tell channels apart; negative ones are counted from the end.
        options: Names and values of what the kind lets one choose, by name.

    >>> Request.of("x", "histogram", elements=100)
    Request(tensor='x', kind='histogram', axis=None, options=(('elements', 100),))
    """

    tensor: str
    kind: str
    axis: int | None = None
    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def of(cls, tensor: str, kind: str, axis: int | None = None, **options: Option) -> Request:
        """Return a request with its options in order."""
        return cls(tensor, kind, axis, tuple(sorted(options.items())))

    def option(self, name: str, default: Option) -> Option:
        """Return the value of an option."""
        return dict(self.options).get(name, default)

    def like(self, other: Request) -> bool:
        """Return whether another request is for the same but for its options."""
        return (self.tensor, self.kind, self.axis) == (other.tensor, other.kind, other.axis)

    def __str__(self) -> str:
        along = "" if self.axis is None else f" along axis {self.axis}"
        return f"{self.kind} of {self.tensor!r}{along}"

    def __lt__(self, other: Request) -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[str, str, int, str]:
        # No axis comes before every other, and options of any types can be compared as text.
        return self.tensor, self.kind, -(1 << 30) if self.axis is None else self.axis, repr(self.options)
