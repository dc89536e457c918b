"""What a search can ask to be measured, and how much of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from onnxq.errors import check_name
from onnxq.planning.plan import Plan
from onnxq.searching.kernel_times import NodeTimes
from onnxq.searching.noises import Noises
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

    def noises(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Noises:
        """Measure what the codes of a plan add in noise one by one, or those that some of its nodes alone have."""
        ...

    @property
    def run(self) -> float:
        """Seconds of a run of the float model, the same where node times are known."""
        ...

    @property
    def process(self) -> float:
        """Seconds that a process takes to run the float model over the samples, by which efforts are measured."""
        ...

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node takes; None stands for the float model."""
        ...

    def expresses(self, plan: Plan) -> bool:
        """Whether a model can be built that does what a plan says, whatever opset that needs."""
        ...

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return how many times as fast as the float model the models of plans run, all by turns."""
        ...


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        noise: runs for measuring what codes add in noise: as many as the float model makes in so many times the time in
            which a process runs it over the samples; shared by what nodes can be.
        tried: plans whose models are built to find the fastest that is faithful.
        grown: of these, how many may be tried to let more nodes be integers after all.
        timed: plans of the frontier that are timed beside the float model.
        refinements: how often the profile of the winner corrects the costs.
        seconds: after which nothing more is tried.
        measurements: models that are built and run after which nothing more is tried; unlike seconds they end a search
            where the same one ended before.
    """

    noise: float
    tried: int
    grown: int
    timed: int
    refinements: int
    seconds: float
    measurements: float = math.inf


EFFORTS: Mapping[str, Effort | None] = MappingProxyType(
    {
        "off": None,
        "fast": Effort(noise=1.0, tried=8, grown=4, timed=3, refinements=2, seconds=75.0),
        "full": Effort(noise=80.0, tried=60, grown=200, timed=12, refinements=6, seconds=3_600.0),
    }
)
"""How much each kind of search measures."""


def effort_named(name: str) -> Effort | None:
    """Return the row of EFFORTS called ``name``.

    Raises:
        SchemeError: no such search; the message suggests the nearest one.
    """
    check_name("search", name, EFFORTS)
    return EFFORTS[name]
