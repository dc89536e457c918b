"""A model taken in: given as a file or in memory, with passes of the user's, on the workbench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from onnxq.calibration.calibrate import Notice
from onnxq.calibration.data import Data
from onnxq.config.scheme import Mode
from onnxq.data.dataset import split
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.errors import OutputError, check_type
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.warnings import INSPECTED_SAMPLES, drop_equal_samples, reject_constant_samples
from onnxq.ir import Graph, as_graph
from onnxq.planning.plan import DECODING, Demotion
from onnxq.preparing.named_passes import Step, as_passes
from onnxq.preparing.preparation import check_float_model
from onnxq.preparing.rewriting import apply_to_float
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.steps.budget import Budget
from onnxq.steps.wanted import Wanted
from onnxq.system.publish import check_output, data_file

Model = str | Path | onnx.ModelProto | Any
"""A file, a ModelProto, or a GraphSurgeon graph."""


Opened: TypeAlias = tuple[SampleSource, SampleSource | None]
"""Samples to calibrate by, and to judge by where others were given for that."""


def rewritten(model: Model, prepare: Sequence[Step]) -> Graph:
    """Return a graph of the model after passes of the user's."""
    passes, graph = as_passes(prepare), as_graph(model)
    apply_to_float(graph, passes)
    check_float_model(graph)
    return graph


def opened(graph: Graph, wanted: Wanted, folder: Path, *, measured: bool) -> PreparedModel:
    """Open the workbench of a model after passes of the user's, given whether a search measures time."""
    emit, target = wanted.emit(measured=measured), target_named(wanted.target)
    target = target.keeping_forms if wanted.keeps_forms else target
    given = wanted.replay, wanted.least, wanted.without
    bench = open_prepared_model(graph, wanted.prepared_for, target, folder, emit, *given)
    if not wanted.stored_because:
        return bench
    bench = replace(bench, scheme=wanted.scheme)
    stored = {
        one.node: Demotion(Mode.STORAGE, wanted.stored_because)
        for one in bench.plan({}).decisions
        if one.mode in DECODING and one.weights
    }
    return replace(bench, fixed=stored)


def opened_samples(bench: PreparedModel, data: Data, goal: Goal, notice: Notice) -> Opened:
    """Open the samples to calibrate by, and those to judge by where others were given.

    Args:
        bench: the prepared model.
        data: the samples.
        goal: a metric counts on the order of all samples, as do its labels.
        notice: told what is worth knowing of how chained inputs start.
    """
    in_order = goal.metric is not None
    whole = bench.samples(data.calibration, data, notice, in_order=in_order)
    if data.validation is None:
        return whole, None
    return whole, bench.samples(data.validation, data, notice, in_order=in_order)


def parted(given: Opened, looked: Sequence[Sample], goal: Goal) -> tuple[SampleSource, SampleSource]:
    """Return the samples by which ranges and plans are chosen, and those by which models are judged.

    Args:
        given: all to calibrate by, and those to judge by where others were given.
        looked: some of the former.
        goal: of a metric each sample counts, as it may have a label for each, equal ones too. Of a metric that knows
            samples by themselves all that are kept apart judge, and of a function of the user's all there are.
    """
    whole, others = given
    if (metric := goal.judged_by) is None:
        whole = drop_equal_samples(whole, looked)
        return (
            split(whole)
            if others is None
            else (whole, drop_equal_samples(others, reject_constant_samples(list(evenly(others, INSPECTED_SAMPLES)))))
        )
    return split(whole, len(whole)) if others is None and metric.knows_samples else (whole, others or whole)


def checked_output(output: str | Path | None, model: Model, budget: Budget, data: Data) -> Path | None:
    """Return the file to write, which is neither the model nor what else is read or written.

    Raises:
        OutputError: it cannot be written, or is one of those.
    """
    check_type(output, (str, Path, type(None)), "the output", "a path, or None to write nothing")
    if output is None:
        return None
    output = Path(output)
    check_output(output, Path(model) if isinstance(model, str | Path) else None, data.given)
    own = {output.resolve(), data_file(output).resolve()}
    if budget.costs is not None and Path(budget.costs).resolve() in own:
        raise OutputError(f"node times cannot be kept in the output {output}; give another name")
    return output
