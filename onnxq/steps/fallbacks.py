"""Attempts at a model that keeps up with the float model: what a search chooses, and ever simpler ones after it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from onnxq.calibration.data import Data
from onnxq.errors import note_failure, tolerate
from onnxq.evaluation.goal import Goal
from onnxq.report.parts import Stopwatch
from onnxq.runtime.engine import Engine
from onnxq.steps.calibrate import CalibratedModel, OpenedSamples, calibrate_model, range_methods
from onnxq.steps.prepare import Model, PreparedRun, prepare_model
from onnxq.steps.request import Budget, QuantizationRequest
from onnxq.steps.search import SearchedModel, are_variants_hopeless, are_variants_slower, search_for_plan
from onnxq.system.isolation import earlier_crashes
from onnxq.system.resources import Deadline

_LOG = logging.getLogger(__name__)
MOST_CRASHES = 2
"""After the first crash nothing is searched, and after the second the graph stays as it was given."""
_FAILED = "the search for something faster failed"
_SLOWER = "what the search found, and stored weights of the prepared model, were slower than the float model"
_LAST = "storing the weights of the model as it was given"


@dataclass(frozen=True, eq=False)
class Attempt:
    """A prepared and calibrated model, and what was chosen for it; None if its graph variant is hopeless."""

    ready: PreparedRun
    seen: CalibratedModel
    found: SearchedModel | None

    @property
    def result(self) -> SearchedModel:
        """What was chosen, where something was."""
        assert self.found is not None
        return self.found

    @property
    def keeps_up(self) -> bool:
        """Whether the staged model is not slower than the float model."""
        return self.found is not None and self.found.chosen.keeps_up

    @property
    def is_slowed_by_variants(self) -> bool:
        """Whether operators may stay as they were given, which may be faster."""
        return self.found is None or are_variants_slower(self.ready, self.found)

    def with_search_of(self, other: Attempt) -> Attempt:
        """Return the same with what the search of another attempt measured, none of whose plans was taken."""
        if self.found is None or other.found is None:
            return self
        chosen, searched = self.found.chosen, other.found.chosen.outcome
        outcome = replace(
            chosen.outcome,
            measured=chosen.outcome.measured + searched.measured,
            sensitivities=searched.sensitivities,
            frontier=tuple(replace(point, chosen=False) for point in searched.frontier),
        )
        return replace(self, found=replace(self.found, chosen=replace(chosen, outcome=outcome)))


@dataclass(frozen=True, eq=False)
class Attempts:
    """The steps from calibration to a verified model, once for each graph variant and fallback that is tried."""

    model: Model
    output: Path | None
    folder: Path
    data: Data
    samples: OpenedSamples
    goal: Goal
    budget: Budget
    engine: Engine | None
    deadline: Deadline
    watch: Stopwatch

    def first(self, ready: PreparedRun) -> Attempt:
        """Calibrate and search a prepared model."""
        return self._attempt(ready, self.data, self.budget)

    def again(self, variant: QuantizationRequest, before: PreparedRun) -> Attempt:
        """Prepare, calibrate and search another variant, whose statistics nobody has."""
        ready = prepare_model(self.model, variant, self.folder, self.output, self.budget, self.engine, before.costs)
        return self._attempt(ready, replace(self.data, statistics=None), self.budget.without_statistics())

    def _attempt(self, ready: PreparedRun, data: Data, budget: Budget) -> Attempt:
        goal, deadline = self.goal, self.deadline
        seen = calibrate_model(ready, data, range_methods(ready, budget), goal, budget, self.samples)
        self.watch.lap("calibrate")
        for warning in seen.warnings if data is self.data else ():
            _LOG.warning("%s", warning)
        if are_variants_hopeless(ready, seen, goal, budget, deadline):
            self.watch.lap("try graph variants")
            return Attempt(ready, seen, None)
        found = search_for_plan(ready, seen, goal, budget, deadline)
        self.watch.lap("choose and verify")
        return Attempt(ready, seen, found)

    def only(self, request: QuantizationRequest, ready: PreparedRun) -> Attempt:
        """Return the attempt without a search, with the given operators if others are slower."""
        done = self.first(ready)
        return self.again(replace(request, keeps_forms=True), ready) if done.is_slowed_by_variants else done

    def first_that_keeps_up(self, request: QuantizationRequest, ready: PreparedRun) -> Attempt:
        """Return the first attempt that is not slower than the float model, or else the last.

        1. What a search chooses, with the given operators if others are slower.
        2. Weights compressed on disk, on the prepared graph, if the search fails.
        3. Weights compressed on disk, on the graph as it was given, if all else fails or is slower than float.

        What onnxruntime ended an earlier process at is not tried again.
        """
        done: Attempt | None = None
        crashes = len(earlier_crashes())
        if not crashes:
            with tolerate("the search"):
                done = self.first(ready)
                if done.is_slowed_by_variants:
                    done = self.again(replace(request, keeps_forms=True), ready)
        if done is not None and done.found is None:
            # Its graph variant was hopeless, and preparing another failed.
            done = None
        if done is None and crashes < MOST_CRASHES:
            with tolerate("storing the weights of the prepared model"):
                done = self.again(request.stored(_FAILED), ready)
        if done is not None and done.keeps_up:
            return done
        try:
            last = self.again(request.stored(_FAILED if done is None else _SLOWER).as_given, ready)
        except Exception as error:
            # A model that is slower than float is refused for that.
            if done is None or isinstance(error, MemoryError) or not note_failure(_LAST, error):
                raise
            return done
        return last if done is None else last.with_search_of(done)
