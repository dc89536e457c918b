"""The way of train(): that of quantize(), with a step of training before the report."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from onnxq.budget import Budget
from onnxq.data import Data, SamplesLike
from onnxq.deadline import NEVER
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
from onnxq.targets import DEFAULT_TARGET
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
    data, budget = Data.of(data), _for_training(budget)
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


def _for_training(budget: Budget | None) -> Budget:
    """Return a budget without a search, and without the methods whose factors weights that learn would not keep."""
    budget = budget or Budget(accuracy="fast")
    methods = tuple(name for name in budget.tried.methods if name not in _FACTORS)
    return replace(budget, search="off", accuracy=replace(budget.tried, methods=methods))
