"""The way of train(): that of quantize(), with a step of training before the report."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

from onnxq.calibration.data import Data, SamplesLike
from onnxq.config.scheme import Scheme
from onnxq.data.arrays import npy_array
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.pipeline import Quantized, carried_out
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.steps.budget import Budget
from onnxq.steps.opening import Model, checked_output
from onnxq.steps.steps import Evidenced, Prepared, Settled
from onnxq.steps.wanted import Wanted
from onnxq.training import require_torch
from onnxq.training.settings import Training


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
        budget: its accuracy, latency, engine, collection and progress count here; None spends the usual.
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
    from onnxq.training.losses import user_loss
    from onnxq.training.step import trained

    data, budget = Data.of(data), replace(budget or Budget(), search="off", seconds=math.inf)
    goal, training = Goal.of(goal), training or Training()
    # What cannot be read is told before anything takes time.
    if training.labels is not None:
        # There is a label for each row.
        data = replace(data, batch=data.batch or 1)
        npy_array(Path(training.labels))
    if training.loss:
        user_loss(training.loss)
    output = checked_output(output, model, budget, data)
    state = None if output is None else state_folder(output)

    def learned(ready: Prepared, seen: Evidenced, settled: Settled) -> Settled:
        return trained(ready, seen, settled, goal, budget, training, state)

    done = carried_out(model, data, output, _wanted(scheme), goal, budget, learned)
    if state is not None:
        shutil.rmtree(state, ignore_errors=True)
    return done


def state_folder(output: Path) -> Path:
    """Return the folder beside an output that keeps where its training stands.

    >>> state_folder(Path("m.int8.onnx")).name
    'm.int8.onnx.training'
    """
    return output.with_name(f"{output.name}.training")


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

    wanted, data, budget = _wanted(scheme), Data.of(data), Budget.of(budget)
    _check_search(wanted, budget)
    goal, training = Goal.of(goal), training or Training()

    def sped_up(ready: Prepared, seen: Evidenced, settled: Settled) -> Settled:
        return faster(ready, seen, settled, goal, budget, training)

    output = checked_output(output, model, budget, data)
    return carried_out(model, data, output, wanted, goal, budget, sped_up)


def _wanted(scheme: str | Scheme | Plan | Wanted) -> Wanted:
    return scheme if isinstance(scheme, Wanted) else Wanted.of(scheme, DEFAULT_TARGET, ())


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
