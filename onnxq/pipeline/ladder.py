"""The ladder: what a search chooses, and ever simpler models after it, until one keeps up with the float model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from onnxq.calibration.data import Data
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.calibrate import OpenedSamples, calibrate_model, range_methods
from onnxq.pipeline.prepare import Model, PreparedRun, prepare_model
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.pipeline.search import SearchedModel, search_for_plan
from onnxq.report.parts import Stopwatch
from onnxq.runtime.engines import TargetEngine
from onnxq.system.failures import is_fatal, note_failure
from onnxq.system.isolation import earlier_crashes
from onnxq.system.resources import Deadline

_LOG = logging.getLogger(__name__)
_FAILED = "the search for something faster failed"
_SLOWER = "what the search found, and stored weights of the prepared model, were slower than the float model"
MOST_CRASHES = 2
"""Crashes of onnxruntime in earlier processes after which only the last rung is left."""


@dataclass(frozen=True, eq=False)
class Run:
    """What all rungs have in common.

    Attributes:
        model: as the user gave it.
        output: the file to write; None writes nothing.
        folder: holds a working folder for each rung.
        data: the samples.
        samples: the opened samples.
        goal: the accuracy to reach.
        budget: what may be spent.
        target_engine: runs and times models.
        deadline: of the whole run.
        watch: times the stages.
    """

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

    def prepare(self, request: QuantizationRequest, before: PreparedRun) -> PreparedRun:
        """Prepare the model for another rung."""
        given = self.model, request, self.folder, self.output, self.budget, self.target_engine
        return prepare_model(*given, before.times)

    def search(self, ready: PreparedRun, data: Data) -> SearchedModel:
        """Calibrate a prepared model, and choose and judge its plan."""
        seen = calibrate_model(ready, data, range_methods(ready, self.budget), self.goal, self.budget, self.samples)
        self.watch.lap("calibrate")
        for warning in seen.warnings if data is self.data else ():
            _LOG.warning("%s", warning)
        chosen = search_for_plan(seen, self.goal, self.budget, self.deadline)
        self.watch.end_parts()
        return chosen


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Attributes:
        name: what is left out if it fails.
        most_crashes: crashes of earlier processes after which it is not tried.
        is_wanted: whether it is tried, given what the rungs before it chose, if anything.
        request: what becomes of the model, given the user's request and what was chosen before.
    """

    name: str
    most_crashes: int
    is_wanted: Callable[[SearchedModel | None], bool]
    request: Callable[[QuantizationRequest, SearchedModel | None], QuantizationRequest]


_SEARCH = Rung("the search", 0, lambda before: before is None, lambda request, _: request)
_STORED = Rung(
    "storing the weights of the prepared model",
    MOST_CRASHES - 1,
    lambda before: before is None,
    lambda request, _: request.stored(_FAILED),
)
_STORED_AS_GIVEN = Rung(
    "storing the weights of the model as it was given",
    MOST_CRASHES,
    lambda before: before is None or not before.result.keeps_up,
    lambda request, before: request.stored(_FAILED if before is None else _SLOWER).as_given,
)


def climb(run: Run, request: QuantizationRequest, ready: PreparedRun, *, searched: bool) -> SearchedModel:
    """Return what the first rung chooses that keeps up with the float model, or the last one does.

    What onnxruntime ended an earlier process at is not tried again. A rung that fails leaves what was chosen before;
    only where that is nothing, the error of the last one is raised.

    Args:
        run: what all rungs have in common.
        request: what the user asked for.
        ready: the model prepared for it.
        searched: whether there is a search; without one, a failure is the user's to know.
    """
    best: SearchedModel | None = None
    crashes = len(earlier_crashes())
    rungs = (_SEARCH, _STORED, _STORED_AS_GIVEN) if searched else (_SEARCH,)
    for rung in rungs:
        if (searched and crashes > rung.most_crashes) or not rung.is_wanted(best):
            continue
        try:
            first = rung is _SEARCH
            prepared = ready if first else run.prepare(rung.request(request, best), ready)
            chosen = run.search(prepared, run.data if first else replace(run.data, statistics=None))
        except Exception as error:
            # A model that is slower than float is refused for that, and not for what failed after it.
            is_kept = rung is _STORED_AS_GIVEN and best is not None
            is_last = not searched or (rung is _STORED_AS_GIVEN and best is None)
            is_raised = is_last or isinstance(error, MemoryError) or (is_fatal(error) and not is_kept)
            if is_raised or not note_failure(rung.name, error):
                raise
            continue
        best = chosen.with_search_of(best) if rung is _STORED_AS_GIVEN and best is not None else chosen
    assert best is not None
    return best
