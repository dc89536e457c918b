"""What the user wants of a model's fidelity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from onnxq.errors import SchemeError, check_type, nearest, take_plain_numbers
from onnxq.evaluation.metrics import Metric, load_metric

MINIMUM_SQNR = 20.0
"""Default fidelity in decibels: the noise at the worst output holds a hundredth of the signal's energy."""

PREFERENCES = ("speed", "size")
"""What a search may look for in plans that are faithful enough, the usual one first."""


@dataclass(frozen=True)
class Goal:
    """How faithful a model has to be to be written.

    Attributes:
        min_sqnr: SQNR in decibels of the worst output; not asked for where there is a metric.
        metric: what tells instead whether the model is good, or a text that load_metric takes, which is read at once.
        max_drop: how much less than the float model's the metric may be.
        force: whether a model that is less faithful is written nevertheless.
        exact: whether a model is refused in which not all weights have the bits that the scheme asks for.
        prefer: what a search takes of plans that are faithful enough: the fastest (``speed``), or the fastest of those
            in which as many weights as can be have 4 bits instead of 8 (``size``).

    Raises:
        SchemeError: the decibels are NaN, the drop is negative or not finite, the metric's text names none, there is no
            such preference, or something is of another type.
        DataError: the labels of the metric cannot be read.

    >>> Goal(30).min_sqnr, Goal.of(25.0)
    (30, Goal(min_sqnr=25.0, metric=None, max_drop=0.0, force=False, exact=False, prefer='speed'))
    """

    min_sqnr: float = MINIMUM_SQNR
    metric: Metric | str | None = None
    max_drop: float = 0.0
    force: bool = False
    exact: bool = False
    prefer: str = PREFERENCES[0]

    def __post_init__(self) -> None:
        take_plain_numbers(self, "min_sqnr", "max_drop")
        check_type(self.min_sqnr, (int, float), "the wanted fidelity", "decibels such as 20")
        check_type(self.metric, (Metric, str, type(None)), "the metric", "a text such as top1:labels.npy, or a Metric")
        check_type(self.max_drop, (int, float), "the drop of the metric", "a number such as 0.01")
        for name in ("force", "exact"):
            check_type(getattr(self, name), bool, name, "True or False")
        check_type(self.prefer, str, "what is preferred", f"one of {', '.join(PREFERENCES)}")
        if self.prefer not in PREFERENCES:
            raise SchemeError(
                f"what is preferred is {self.prefer!r}, expected one of {', '.join(PREFERENCES)}"
                f"{nearest(self.prefer, PREFERENCES)}"
            )
        if math.isnan(self.min_sqnr):
            raise SchemeError("the wanted fidelity is NaN, expected decibels such as 20")
        if not 0 <= self.max_drop < math.inf:
            raise SchemeError(
                f"the drop of the metric is {self.max_drop}, expected a finite number that is not negative"
            )
        # A text that names nothing is told here and not after minutes.
        _ = self.judged_by

    @classmethod
    def of(cls, given: float | Goal) -> Goal:
        """Return a goal as it is; a number stands for decibels."""
        return given if isinstance(given, Goal) else cls(given)

    @property
    def prefers_size(self) -> bool:
        """Whether a small file is worth more than a fast model."""
        return self.prefer == "size"

    @cached_property
    def judged_by(self) -> Metric | None:
        """The metric; None where decibels tell."""
        return load_metric(self.metric) if isinstance(self.metric, str) else self.metric
