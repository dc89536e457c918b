"""What a search can ask to be measured, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from onnxq.errors import SchemeError, nearest
from onnxq.planning.plan import Plan
from onnxq.searching.kernel_times import NodeTimes
from onnxq.searching.search import Demotions


class Measures(Protocol):
    """Builds the models of plans and measures them."""

    @property
    def measured(self) -> int:
        """How many models were built and run so far."""
        ...

    def plan(self, demotions: Demotions) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        ...

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR in decibels that the worst output can be trusted to have."""
        ...

    def expected_noise(self, plan: Plan) -> float:
        """Return the noise-to-signal ratio to expect at the worst output: by it plans are compared and not trusted."""
        ...

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node takes; None stands for the float model."""
        ...

    def expresses(self, plan: Plan) -> bool:
        """Whether a model can be built that does what a plan says, whatever opset that needs."""
        ...

    def speed(self, plan: Plan) -> float:
        """Return how many times as fast as the float model it runs."""
        ...


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        noise_seconds: time for measuring the noise of nodes as integers, shared by the modes they can have, and half as
            much for that of stored weights; node by node or, where that is too long, in groups.
        grown: groups of nodes that are tried as static after all.
        timed: plans of the frontier that are timed beside the float model.
        refinements: how often the profile of the winner corrects the costs.
        seconds: after which nothing more is tried.
    """

    noise_seconds: float
    grown: int
    timed: int
    refinements: int
    seconds: float


EFFORTS: Mapping[str, Effort | None] = MappingProxyType(
    {
        "off": None,
        "fast": Effort(noise_seconds=30.0, grown=24, timed=3, refinements=2, seconds=75.0),
        "full": Effort(noise_seconds=2_400.0, grown=400, timed=12, refinements=6, seconds=3_600.0),
    }
)
"""How much each kind of search measures."""


def effort_named(name: str) -> Effort | None:
    """Return the row of EFFORTS called ``name``.

    Raises:
        SchemeError: no such search; the message suggests the nearest one.
    """
    if name not in EFFORTS:
        raise SchemeError(f"search {name!r} is not one of {', '.join(EFFORTS)}{nearest(name, EFFORTS)}")
    return EFFORTS[name]
