"""The way of train(): that of quantize(), with a step of training before the report."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from onnxq.budget import Budget
from onnxq.data import Data, SamplesLike
from onnxq.deadline import NEVER
from onnxq.engines.table import engine_of
from onnxq.errors import SchemeError
from onnxq.judging.goal import MINIMUM_SQNR, Goal
from onnxq.modelfile.publish import staging
from onnxq.pipeline import Quantized
from onnxq.planning.plan import Plan
from onnxq.report import check_fidelity
from onnxq.report.machine import Stopwatch
from onnxq.reporting import reported
from onnxq.scheme import Scheme
from onnxq.searching.cost_cache import CostCache
from onnxq.steps import Model, checked_output, chosen, evidenced, methods_tried, prepared, published
from onnxq.targets import DEFAULT_TARGET, target_named
from onnxq.training import require_torch
from onnxq.training.settings import Training
from onnxq.wanted import Wanted

_FACTORS: Final = frozenset({"migration", "scaling"})


def train(
    model: Model,
    data: SamplesLike | Data,
    output: str | Path | None = None,
    *,
    scheme: str | Scheme | Plan | Wanted = "int8",
    goal: float | Goal = MINIMUM_SQNR,
    budget: Budget | None = None,
    training: Training | None = None,
) -> Quantized:
    """Quantize a float model as quantize() does, and train what became codes before the result is verified.

    The placement is that of the scheme, or of a plan, and stays. What is learned is kept only where it is better on
    samples that nothing was learned from. A training that was killed is gone on with by the same call.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: samples to learn from, as quantize() takes them; labels are needed for a loss of labels only.
        output: file to write; None writes nothing.
        scheme: a preset's name, a Scheme, a Plan, or Wanted with the target and passes beside one of these.
        goal: the decibels that the worst output must have, or a Goal.
        budget: its accuracy, latency, collection and progress count here; None spends the usual.
        training: what is learned, and how; None trains towards the outputs of the float model.

    Returns:
        The quantized graph and the report, among whose gains is that of the training.

    Raises:
        SchemeError: torch is not installed, or as in quantize().
        ModelError: nothing of the model can learn, or as in quantize().
        FidelityError: the result misses the goal; nothing was written.
        DataError, OutputError, PassError: as in quantize().
    """
    require_torch()
    from onnxq.training.step import trained

    watch = Stopwatch()
    wanted = scheme if isinstance(scheme, Wanted) else Wanted.of(scheme, DEFAULT_TARGET, ())
    data, budget = Data.of(data), replace(_for_training(budget or Budget()), search="off")
    goal = Goal.of(goal).for_samples(data.limit)
    training = Training() if training is None else training
    output = checked_output(output, model, budget)
    state = None if output is None else output.with_name(f"{output.name}.training")
    with staging(output) as folder:
        ready = prepared(model, wanted, folder, output, budget)
        watch.lap("prepare")
        seen = evidenced(ready, data, methods_tried(ready, budget), goal, budget)
        watch.lap("calibrate")
        refined, found = chosen(ready, seen, goal, budget, CostCache.opened(None), NEVER)
        watch.lap("choose and verify")
        found, told = trained(ready, seen, refined, found, goal, budget, training, state)
        seen = replace(seen, doubts=(*seen.doubts, *told))
        watch.lap("train")
        report = reported(ready, seen, refined, found, budget, output, watch)
        check_fidelity(report, goal)
        done = Quantized(published(ready, output), report)
    if state is not None:
        shutil.rmtree(state, ignore_errors=True)
    return done


def quantize_and_train(
    model: Model,
    data: SamplesLike | Data,
    output: str | Path | None = None,
    *,
    scheme: str | Scheme | Wanted = "int8",
    goal: float | Goal = MINIMUM_SQNR,
    budget: str | Budget = "fast",
    training: Training | None = None,
) -> Quantized:
    """Quantize a float model as quantize() does, and take a faster plan where training makes that one faithful.

    The fastest plan that is just not faithful enough is trained, and written in the place of the one that quantize()
    writes if it reaches the goal then and is faster.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: samples, as quantize() takes them.
        output: file to write; None writes nothing.
        scheme: a preset's name, a Scheme, or Wanted with the target and passes beside one of these.
        goal: the decibels that the worst output must have, or a Goal.
        budget: ``fast``, ``full`` or a Budget with a search that measures time.
        training: what is learned, how and for how many minutes.

    Returns:
        The quantized graph and the report, whose doubts say why nothing was gained where that is so.

    Raises:
        SchemeError: torch is not installed, there is a plan or no search, or as in quantize().
        FidelityError: the result misses the goal; nothing was written.
        ModelError, DataError, OutputError, PassError: as in quantize().
    """
    require_torch()
    from onnxq.training.faster import faster

    watch = Stopwatch()
    wanted = scheme if isinstance(scheme, Wanted) else Wanted.of(scheme, DEFAULT_TARGET, ())
    data, budget = Data.of(data), Budget.of(budget)
    _check_search(wanted, budget)
    goal = Goal.of(goal).for_samples(data.limit)
    training = Training() if training is None else training
    output = checked_output(output, model, budget)
    known = CostCache.opened(Path(budget.costs) if budget.costs is not None else None)
    engine, unmeasured = engine_of(target_named(wanted.target), budget.engine)
    with engine or nullcontext(), staging(output) as folder:
        ready = prepared(model, wanted, folder, output, budget, engine)
        watch.lap("prepare")
        seen = evidenced(ready, data, methods_tried(ready, budget), goal, budget)
        watch.lap("calibrate")
        first = chosen(ready, seen, goal, budget, known, NEVER, engine)
        watch.lap("choose and verify")
        best = faster(ready, seen, first, goal, _for_training(budget), training, known, engine)
        seen = replace(seen, doubts=(*seen.doubts, *best.doubts))
        watch.lap("train")
        report = reported(ready, seen, best.refined, best.chosen, budget, output, watch, unmeasured)
        check_fidelity(report, goal)
        return Quantized(published(ready, output), report)


def _check_search(wanted: Wanted, budget: Budget) -> None:
    """Refuse what leaves no faster plan to be found."""
    if wanted.replay is not None:
        raise SchemeError("a plan is carried out as it is, so none is faster; train it with onnxq train --plan")
    if not budget.measures:
        raise SchemeError(
            "training looks for a faster plan, which takes a search and time for latency; leave out search off and 0 "
            "seconds, or train what the scheme says with onnxq train"
        )
    if budget.seconds < math.inf:
        raise SchemeError("training has its own minutes beside a budget in seconds; leave one of both out")


def _for_training(budget: Budget) -> Budget:
    """Return a budget without the methods whose factors weights that learn would not keep."""
    methods = tuple(name for name in budget.tried.methods if name not in _FACTORS)
    return replace(budget, accuracy=replace(budget.tried, methods=methods))
