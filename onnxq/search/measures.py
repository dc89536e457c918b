"""What a search can ask to be measured."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from onnxq.planning.plan import Plan
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.noises import Noises
from onnxq.search.search import Demotions


class Builds(Protocol):
    """Builds the models of plans and tells how faithful they are."""

    def plan(self, demotions: Demotions) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        ...

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR in decibels that the worst output can be trusted to have."""
        ...


class Measures(Builds, Protocol):
    """Builds the models of plans and measures them."""

    @property
    def is_timed(self) -> bool:
        """Whether times are those of runs, rather than what is to be computed."""
        ...

    @property
    def measured(self) -> int:
        """How many models were built and run so far."""
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
        """Return how many times as fast as the float model the models of plans run, all by turns; NaN if unknown."""
        ...
