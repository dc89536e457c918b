"""Measuring plans: their models are built, compared with the float model, profiled and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxq.calibration.inputs import Sample
from onnxq.latency import measure_latency
from onnxq.parameters import RangeMethod
from onnxq.planning.plan import Demotion, Plan
from onnxq.progress import Progress, silent
from onnxq.searching.kernel_times import NodeTimes, profile_kernels, trace_kernels
from onnxq.verify import evenly
from onnxq.workbench import Trials

_TIMED_SAMPLES = 4
_REPEATS = 5


@dataclass(frozen=True, eq=False)
class Laboratory:
    """What the search for the fastest plan measures, with one range method.

    Attributes:
        trials: builds candidates and knows the float model's outputs.
        ranges: which range the statistics of a tensor mean.
        reference: file of the float model.
        seconds: time to spend on timing one candidate beside the float model.
        progress: told of the stage ``search``.
    """

    trials: Trials
    ranges: RangeMethod
    reference: Path
    seconds: float
    progress: Progress = silent

    @property
    def measured(self) -> int:
        """How many models were built and run so far."""
        return len(self.trials.measured)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        """Plan with some nodes taken out of integer arithmetic."""
        return self.trials.bench.plan(demotions)

    def sqnr(self, plan: Plan) -> float:
        """Return the SQNR in decibels that the worst output can be trusted to have."""
        found = self.trials.sqnr(plan, self.ranges)
        # How many there will be is not known, so the bar only counts.
        self.progress("search", self.measured, 0)
        return found

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node takes; None stands for the float model."""
        bench = self.trials.bench
        model = bench.prepared if plan is None else self.trials.candidate(plan, self.ranges)
        kernels = profile_kernels(model, self._samples, bench.prepared.parent, repeats=_REPEATS)
        return trace_kernels(kernels, bench.graph)

    def speed(self, plan: Plan) -> float:
        """Return how many times as fast as the float model a plan's model runs."""
        candidate = self.trials.candidate(plan, self.ranges)
        return measure_latency(self.reference, candidate, self._samples, seconds=self.seconds, rounds=1).speed

    @property
    def _samples(self) -> Sequence[Sample]:
        return tuple(evenly(self.trials.samples, len(self.trials.samples), _TIMED_SAMPLES))
