"""quantize() as the list of its steps, and functions that end after some of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxq.calibration.data import Data, SamplesLike
from onnxq.calibration.methods import DEFAULT_METHODS
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Scheme
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.ir import Graph
from onnxq.passes.preparing.named_passes import Step
from onnxq.passes.preparing.preparation import check_plan
from onnxq.pipeline.calibrate import calibrate_model, range_methods
from onnxq.pipeline.data_free import generated_data, without_samples
from onnxq.pipeline.ladder import MOST_CRASHES, Run, climb
from onnxq.pipeline.prepare import (
    Form,
    Model,
    Preparer,
    apply_own_passes,
    check_output_path,
    open_prepared,
)
from onnxq.pipeline.report import build_report, publish_model
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.pipeline.samples import SplitSamples
from onnxq.pipeline.search import SearchedModel, open_search
from onnxq.planning.plan import Plan
from onnxq.report import Report, check
from onnxq.report.parts import Stopwatch
from onnxq.runtime.engines import start_engine_for
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.times import MeasuredTimes
from onnxq.system.failures import collect_failures, note_failure
from onnxq.system.isolation import allow_another_try, earlier_crashes, forbid_another_try
from onnxq.system.publish import staging
from onnxq.system.resources import Deadline

if TYPE_CHECKING:
    from onnxq.search.sensitivity_report import Sensitivity

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized model and how it came about.

    Attributes:
        graph: the model; onnxq.save writes it.
        report: decisions and measurements.

    >>> import onnxq
    >>> onnxq.quantize("model.onnx", "data/").report.agreement.worst_sqnr  # doctest: +SKIP
    38.1
    """

    graph: Graph
    report: Report

    def __repr__(self) -> str:
        return f"Quantized({self.report})"

    def _repr_html_(self) -> str:
        """Return what notebooks show: the report."""
        return self.report._repr_html_()


def quantize(
    model: Model,
    data: SamplesLike | Data | None,
    output: str | Path | None = None,
    *,
    scheme: str | Scheme | Plan = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    goal: float | Goal = MINIMUM_SQNR,
    budget: str | Budget = "fast",
) -> Quantized:
    """Quantize a float model, verify it beside the float model, and write it if it meets the goal.

    Args:
        model: file, ModelProto or GraphSurgeon graph.
        data: representative samples: file, folder, dictionaries from input name to array, or Data. None quantizes
            weights alone, by a weight-only scheme; the result must run on generated inputs, and no goal is checked.
        output: file to write; None writes nothing. An existing file is replaced only by a verified one.
        scheme: name of a preset, TOML file, Scheme, or a Plan to apply without a search.
        target: name of a runtime in TARGETS.
        prepare: passes of your own, or their names, that rewrite the float model first.
        goal: SQNR of the worst output in decibels, or a Goal.
        budget: ``fast``, ``full``, ``off``, or a Budget.

    Raises:
        ModelError: the model cannot be read, is quantized already, or has nothing to quantize.
        DataError: the samples do not fit the model or the plan.
        SchemeError: the scheme, target or a pattern is wrong, or an argument has a wrong type or range.
        OutputError: the output cannot be written, or is the file of times.
        PassError: one of your passes fails, changes the names of inputs or outputs, or changes outputs beyond the goal.
        AccuracyError: the result misses the goal, or is neither smaller nor faster; nothing was written.

    >>> quantize("model.onnx", "data/", "model.int8.onnx").report.agreement.worst_sqnr  # doctest: +SKIP
    38.1
    """
    request, budget = QuantizationRequest.of(scheme, target, prepare), Budget.of(budget)
    data = None if data is None else Data.of(data)
    output = check_output_path(output, model, budget, data)
    return run_steps(model, data, output, request, Goal.of(goal), budget)


Trainer = Callable[[SearchedModel], SearchedModel]
"""Trains the chosen model, and leaves the better one in the staged file."""


def run_steps(
    model: Model,
    data: Data | None,
    output: Path | None,
    request: QuantizationRequest,
    goal: Goal,
    budget: Budget,
    trainer: Trainer | None = None,
) -> Quantized:
    """Open, prepare, calibrate, search, verify, report and publish, given what the arguments of quantize() mean.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: representative samples; None generates inputs.
        output: file to write, from `check_output_path`.
        request: what is to become of the model.
        goal: how accurate the result has to be.
        budget: what may be spent.
        trainer: a step of training before the report; None leaves it out.
    """
    request.check(goal)
    if data is None or data.generated:
        goal, budget = without_samples(request, goal, budget)
    budget.check(goal)
    watch, deadline = Stopwatch(), Deadline.within(budget.time_limit)
    budget = replace(budget, progress=watch.following(budget.progress))
    target_engine = start_engine_for(target_named(request.target), budget.engine, budget.threads)
    # A plan, and a scheme without a search, are wanted whatever they gain.
    searched = budget.effort is not None and request.replay is None
    with target_engine, staging(output) as folder, collect_failures() as failures:
        times = MeasuredTimes.opened(budget.times_path)
        preparer = Preparer(model, request, folder, output, budget, target_engine, times)
        ready = preparer.prepared(_form_after_crashes(searched=searched))
        goal = goal.with_bytes(ready.float_bytes)
        data = data or generated_data(ready.reference)
        samples = SplitSamples.of(ready, data, goal)
        for sentence in samples.warnings:
            _LOG.warning("%s", sentence)
        preparer.check_own_passes(ready, samples.fit, goal)
        ready = preparer.checked(ready, samples.fit)
        watch.lap("prepare")
        try:
            run = Run(preparer, samples, data.loaded_statistics, goal, budget, deadline, watch)
            searched_model = climb(run, ready, searched=searched)
            if trainer is not None:
                searched_model = trainer(searched_model)
                watch.lap("train")
        finally:
            times.save()
        report = build_report(searched_model, goal, budget, watch)
        rules = (what for result in searched_model.seen.model.bench.making.applied for _, what in result.changes.failed)
        failed = tuple(dict.fromkeys((*map(str, failures), *rules)))
        report = replace(report, run=replace(report.run, left_out=tuple(ready.left_out.items()), failures=failed))
        for sentence in (*(sentence for sentence in report.warnings if sentence not in samples.warnings), *failed):
            _LOG.warning("%s", sentence)
        check(report, goal, searched=searched, keeps_up=searched_model.result.keeps_up)
        _LOG.info("%s", report.verdict)
        # A crash after this must not put a simpler model in the place of the verified one.
        forbid_another_try()
        return Quantized(publish_model(searched_model), report)


def _form_after_crashes(*, searched: bool) -> Form:
    """Return how the model is prepared after crashes of earlier processes, and allow another process after this one.

    After the first crash nothing is searched, see `climb`. After the second the graph stays as it was given.
    """
    crashes = earlier_crashes()
    for crash in crashes:
        note_failure("what was tried before", crash)
    if searched and len(crashes) < MOST_CRASHES:
        allow_another_try()
        return Form()
    return Form().as_given if crashes else Form()


def calibrate(
    model: Model,
    data: SamplesLike | Data,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    budget: str | Budget = "fast",
) -> CalibrationStatistics:
    """Collect the statistics that quantize() needs, once for any number of calibration methods and goals.

    Args:
        model: file, ModelProto or GraphSurgeon graph.
        data: representative samples, as quantize() takes them.
        scheme: name of a preset, TOML file, or Scheme. If it names no calibration method, the statistics are those of
            all methods that quantize() tries.
        target: name of a runtime in TARGETS.
        prepare: passes of your own, the same as for quantize().
        budget: only its cluster, its progress, and whether it measures time are used.

    Returns:
        Statistics of every activation that the plan quantizes; onnxq.save_statistics writes them to one file.

    Raises:
        ModelError: the model cannot be read, is quantized already, or has nothing to quantize.
        DataError: the samples do not fit the model.
        SchemeError: the scheme, target or a pattern is wrong.

    >>> calibrate("models/gru.onnx", Data("models/data/calib.npz", limit=8))
    CalibrationStatistics(8 samples, 1 tensors: ...)
    """
    request, data, budget = QuantizationRequest.of(scheme, target, prepare), Data.of(data), Budget.of(budget)
    method = request.scheme.range_method
    methods = DEFAULT_METHODS if method is None else (method,)
    graph = apply_own_passes(model, prepare)
    with staging(None) as folder:
        bench = open_prepared(graph, request, folder, measured=budget.measures and request.target == DEFAULT_TARGET)
        samples = bench.samples(data.calibration, data)
        return bench.calibrate(bench.plan({}), samples, budget.progress, budget.cluster, methods)


def sensitivity(
    model: Model,
    data: SamplesLike | Data,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    budget: str | Budget = "fast",
) -> Sensitivity:
    """Measure the quantization error of each tensor and weight alone, and the time of each node in each mode.

    Quantized values are those of quantize(). Times are those of the target's engine. There are none with 0 seconds for
    latency, if the engine does not time nodes, or above 1 GiB of weights, where layers are measured in groups by kind.

    Args:
        model: file, ModelProto or GraphSurgeon graph.
        data: representative samples, as quantize() takes them; the holdout is not used.
        scheme: name of a preset, TOML file, or Scheme.
        target: name of a runtime in TARGETS.
        prepare: passes of your own, see quantize().
        budget: time to measure: ``fast`` one or two minutes, ``full`` up to an hour, or a Budget.

    Returns:
        Tensors and nodes in graph order.

    Raises:
        ModelError: the model cannot be read, is quantized already, or has nothing to quantize.
        DataError: the samples do not fit the model.
        SchemeError: the scheme, target or a pattern is wrong, the search is off, or an argument has a wrong type.
        EngineError: the engine is not installed, or fails.
        PassError: one of your passes fails.

    >>> sensitivity("model.onnx", "data/").sqnr  # doctest: +SKIP
    34.9
    """
    from onnxq.search.sensitivity_report import measure_sensitivity

    wanted, data, budget = QuantizationRequest.of(scheme, target, prepare), Data.of(data), Budget.of(budget)
    if budget.effort is None:
        raise SchemeError("the search is 'off', which measures nothing, expected fast or full; take one of them")
    deadline = Deadline.within(budget.time_limit)
    target_engine = start_engine_for(target_named(wanted.target), budget.engine, budget.threads)
    if target_engine.unmeasured:
        _LOG.warning("no node is timed: %s", target_engine.unmeasured)
    with target_engine, staging(None) as folder:
        times = MeasuredTimes.opened(budget.times_path)
        preparer = Preparer(model, wanted, folder, None, budget, target_engine, times)
        ready = preparer.prepared()
        samples, methods = SplitSamples.of(ready, data, Goal()), range_methods(ready, budget)
        ready = preparer.checked(ready, samples.fit)
        seen = calibrate_model(ready, samples, methods, budget, data.loaded_statistics)
        try:
            return measure_sensitivity(open_search(seen, Goal(), budget, deadline))
        finally:
            times.save()


def plan(
    model: Model,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
) -> Plan:
    """Return the first plan of quantize(), without calibrating or measuring anything.

    Args:
        model: file, ModelProto or GraphSurgeon graph.
        scheme: name of a preset, TOML file, or Scheme.
        target: name of a runtime in TARGETS.
        prepare: passes of your own, see quantize().

    Returns:
        The plan before any node is kept in float for its quantization error.

    Raises:
        ModelError: the model cannot be read, is quantized already, or has nothing to quantize.
        SchemeError: the scheme, target or a pattern is wrong.
        PassError: one of your passes fails, or changes the names of inputs or outputs.

    >>> plan("models/gru.onnx")
    Plan(int8 for onnxruntime-cpu; 11 nodes: 1 static, 2 storage, 8 float)
    """
    wanted = QuantizationRequest.of(scheme, target, prepare)
    graph = apply_own_passes(model, prepare)
    with staging(None) as folder:
        bench = open_prepared(graph, wanted, folder, measured=wanted.target == DEFAULT_TARGET)
        full = bench.plan({})
        check_plan(full, bench.graph)
        return replace(full, emit=bench.emit, preparation=bench.preparation)
