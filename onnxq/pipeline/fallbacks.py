"""Attempts at a model that keeps up with the float model: what a search chooses, and ever simpler ones after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onnxq.calibration.data import Data
from onnxq.errors import note_failure, tolerate
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.calibrate import CalibratedModel, OpenedSamples, calibrate_model, range_methods
from onnxq.pipeline.prepare import Model, PreparedRun, prepare_model
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.pipeline.search import SearchedModel, search_for_plan
from onnxq.report.parts import Stopwatch
from onnxq.runtime.engines import TargetEngine
from onnxq.system.isolation import earlier_crashes
from onnxq.system.resources import Deadline

_LOG = logging.getLogger(__name__)
MOST_CRASHES = 2
"""After the first crash nothing is searched, and after the second the graph stays as it was given."""
_FAILED = "the search for something faster failed"
_SLOWER = "what the search found, and stored weights of the prepared model, were slower than the float model"
_LAST = "storing the weights of the model as it was given"


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
    target_engine: TargetEngine
    deadline: Deadline
    watch: Stopwatch

    def again(self, variant: QuantizationRequest, before: PreparedRun) -> SearchedModel:
        """Prepare, calibrate and search another variant, whose statistics nobody has."""
        ready = prepare_model(
            self.model, variant, self.folder, self.output, self.budget, self.target_engine, before.times
        )
        return self._search(self._calibrate(ready, replace(self.data, statistics=None)))

    def _calibrate(self, ready: PreparedRun, data: Data) -> CalibratedModel:
        seen = calibrate_model(ready, data, range_methods(ready, self.budget), self.goal, self.budget, self.samples)
        self.watch.lap("calibrate")
        return seen

    def _search(self, seen: CalibratedModel) -> SearchedModel:
        found = search_for_plan(seen, self.goal, self.budget, self.deadline)
        self.watch.end_parts()
        return found

    def _searches(self, request: QuantizationRequest, ready: PreparedRun) -> Iterator[SearchedModel]:
        """Yield what is chosen for a prepared model, and with the given operators if others are slower."""
        seen = self._calibrate(ready, self.data)
        for warning in seen.warnings:
            _LOG.warning("%s", warning)
        yield (done := self._search(seen))
        if done.is_slowed_by_variants:
            yield self.again(replace(request, keeps_forms=True), ready)

    def only(self, request: QuantizationRequest, ready: PreparedRun) -> SearchedModel:
        """Return the attempt without a search, with the given operators if others are slower."""
        *_, done = self._searches(request, ready)
        return done

    def first_that_keeps_up(self, request: QuantizationRequest, ready: PreparedRun) -> SearchedModel:
        """Return the first attempt that is not slower than the float model, or else the last.

        1. What a search chooses, with the given operators if others are slower.
        2. Weights compressed on disk, on the prepared graph, if the search fails.
        3. Weights compressed on disk, on the graph as it was given, if all else fails or is slower than float.

        What onnxruntime ended an earlier process at is not tried again.
        """
        done: SearchedModel | None = None
        crashes = len(earlier_crashes())
        if not crashes:
            with tolerate("the search"):
                for found in self._searches(request, ready):
                    # If the next one fails, this one is left.
                    done = found
        if done is None and crashes < MOST_CRASHES:
            with tolerate("storing the weights of the prepared model"):
                done = self.again(request.stored(_FAILED), ready)
        if done is not None and done.result.keeps_up:
            return done
        try:
            last = self.again(request.stored(_FAILED if done is None else _SLOWER).as_given, ready)
        except Exception as error:
            # A model that is slower than float is refused for that.
            if done is None or isinstance(error, MemoryError) or not note_failure(_LAST, error):
                raise
            return done
        return last if done is None else last.with_search_of(done)
