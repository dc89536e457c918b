"""The ladder: what a search chooses, else stored weights, and last those of the model as it was given."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.calibrate import calibrate_model, range_methods
from onnxq.pipeline.prepare import PreparedRun, Preparer
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
# What is left out if the rung fails, and the most crashes of earlier processes with which it is tried.
_RUNGS = (
    ("the search", 0),
    ("storing the weights of the prepared model", MOST_CRASHES - 1),
    ("storing the weights of the model as it was given", MOST_CRASHES),
)


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


def climb(run: Run, ready: PreparedRun, *, searched: bool) -> SearchedModel:
    """Return what the first rung chooses that keeps up with the float model, or the last one does.

    A rung at which onnxruntime ended an earlier process is not tried again. A rung that fails leaves what was chosen
    before; only where that is nothing, the error of the last one is raised.

    Args:
        run: what all rungs have in common.
        ready: the model as it was prepared for the first rung.
        searched: whether there is a search; without one, a failure is the user's to know.
    """
    best: SearchedModel | None = None
    crashes = len(earlier_crashes())
    rungs = _RUNGS if searched else _RUNGS[:1]
    for number, (name, most_crashes) in enumerate(rungs):
        is_first, is_last = number == 0, number == len(rungs) - 1
        # A search whose models are merely slow has stored weights itself, so only the last rung is left.
        is_wanted = best is None or (is_last and not best.result.keeps_up)
        if (searched and crashes > most_crashes) or not is_wanted:
            continue
        try:
            prepared = ready
            if not is_first:
                form = ready.form.stored(_FAILED if best is None else _SLOWER)
                prepared = run.preparer.prepared(form.as_given if is_last else form)
            chosen = run.search(prepared, first=is_first)
        except Exception as error:
            # A model that is slower than float is refused for that, and not for what failed after it.
            is_raised = best is None and (is_last or is_fatal(error))
            if is_raised or isinstance(error, MemoryError) or not note_failure(name, error):
                raise
            continue
        best = chosen if best is None else chosen.with_search_of(best)
    assert best is not None
    return best
