"""The ladder: what a search chooses, and ever simpler models after it, until one keeps up with the float model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.calibrate import calibrate_model, range_methods
from onnxq.pipeline.prepare import Form, PreparedRun, Preparer
from onnxq.pipeline.request import Budget
from onnxq.pipeline.samples import SplitSamples
from onnxq.pipeline.search import SearchedModel, search_for_plan
from onnxq.report.parts import Stopwatch
from onnxq.system.failures import is_fatal, note_failure
from onnxq.system.isolation import earlier_crashes
from onnxq.system.resources import Deadline

_FAILED = "the search for something faster failed"
_SLOWER = "what the search found, and stored weights of the prepared model, were slower than the float model"
MOST_CRASHES = 2
"""Crashes of onnxruntime in earlier processes after which only the last rung is left."""


@dataclass(frozen=True, eq=False)
class Run:
    """What all rungs have in common.

    Attributes:
        preparer: prepares the model in any form.
        samples: those that choose, and those that judge.
        statistics: the user's, of the model as the first rung prepares it; None without any.
        goal: the accuracy to reach.
        budget: what may be spent.
        deadline: of the whole run.
        watch: times the stages.
    """

    preparer: Preparer
    samples: SplitSamples
    statistics: CalibrationStatistics | None
    goal: Goal
    budget: Budget
    deadline: Deadline
    watch: Stopwatch

    def search(self, ready: PreparedRun, *, first: bool) -> SearchedModel:
        """Calibrate a prepared model, and choose and judge its plan."""
        methods, statistics = range_methods(ready, self.budget), self.statistics if first else None
        seen = calibrate_model(ready, self.samples, methods, self.budget, statistics)
        self.watch.lap("calibrate")
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
        form: in which the model is prepared, given that of the first rung and what was chosen before.
    """

    name: str
    most_crashes: int
    is_wanted: Callable[[SearchedModel | None], bool]
    form: Callable[[Form, SearchedModel | None], Form]


_SEARCH = Rung("the search", 0, lambda before: before is None, lambda form, _: form)
# Only after a search that failed: one whose models are merely slow stores weights itself.
_STORED = Rung(
    "storing the weights of the prepared model",
    MOST_CRASHES - 1,
    lambda before: before is None,
    lambda form, _: form.stored(_FAILED),
)
_STORED_AS_GIVEN = Rung(
    "storing the weights of the model as it was given",
    MOST_CRASHES,
    lambda before: before is None or not before.result.keeps_up,
    lambda form, before: form.stored(_FAILED if before is None else _SLOWER).as_given,
)


def climb(run: Run, ready: PreparedRun, *, searched: bool) -> SearchedModel:
    """Return what the first rung chooses that keeps up with the float model, or the last one does.

    What onnxruntime ended an earlier process at is not tried again. A rung that fails leaves what was chosen before;
    only where that is nothing, the error of the last one is raised.

    Args:
        run: what all rungs have in common.
        ready: the model as it was prepared for the first rung.
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
            prepared = ready if first else run.preparer.prepared(rung.form(ready.form, best))
            chosen = run.search(prepared, first=first)
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
