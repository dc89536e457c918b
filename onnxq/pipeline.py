"""The way through the house: how a float model is prepared, and quantize(), the list of all steps in one place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxq.accuracy.effort import METHODS, Accuracy, accuracy_named
from onnxq.encoding.parameters import corrected_biases
from onnxq.encoding.recipe import Recipe
from onnxq.errors import OutputError
from onnxq.evidence.evidence import Evidence
from onnxq.evidence.range_table import FIRST_RANGES, chosen_methods, parse_range
from onnxq.evidence.ranges import RangeMethod
from onnxq.execution.resume import Collection
from onnxq.graph import Graph
from onnxq.judging.gate import Wish
from onnxq.judging.metrics import Metric
from onnxq.judging.verify import loads_in_onnxruntime
from onnxq.lowering import Emit, emit_named
from onnxq.modelfile import as_graph, load, metadata_bytes, read_model
from onnxq.modelfile.publish import check_output, data_file, publish, staging, stored_bytes
from onnxq.named_passes import Step, as_passes
from onnxq.passes.prepare.strip_metadata import StripMetadata
from onnxq.planning.bodies import refuse_idle_bodies
from onnxq.planning.plan import Plan
from onnxq.preparation import (
    check_numbers,
    check_plan,
    external_bytes,
    reference_file,
    refuse_overwriting,
    refuse_quantized,
)
from onnxq.presets import preset_named
from onnxq.progress import Progress, silent
from onnxq.report import Report, check_fidelity
from onnxq.rewriting import apply_to_float
from onnxq.samples.images import ImageOptions
from onnxq.samples.inputs import Sample
from onnxq.scheme import Scheme
from onnxq.searching.choosing import Chooser
from onnxq.searching.cost_cache import CostCache
from onnxq.searching.measures import effort_named
from onnxq.targets import DEFAULT_TARGET, target_named
from onnxq.workbench import open_workbench

Model = str | Path | onnx.ModelProto | Any
"""A file, a ModelProto, or a GraphSurgeon graph."""

MINIMUM_SQNR = 20.0
"""Default fidelity in decibels: the noise at the worst output holds a hundredth of the signal's energy."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized model and how it came about.

    Attributes:
        graph: the model; onnxq.save writes it.
        report: what was decided and measured.
    """

    graph: Graph
    report: Report


def quantize(
    model: Model,
    calibration: str | Path | Iterable[Sample],
    output: str | Path | None = None,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    ranges: RangeMethod | None = None,
    statistics: Evidence | None = None,
    collection: Collection | None = None,
    costs: str | Path | None = None,
    chain: Mapping[str, str] | None = None,
    min_sqnr: float = MINIMUM_SQNR,
    search: str = "fast",
    accuracy: str | Accuracy = "fast",
    replay: Plan | None = None,
    emit: str = Emit.QDQ,
    metric: Metric | None = None,
    max_drop: float = 0.0,
    force: bool = False,
    limit: int | None = None,
    images: ImageOptions | None = None,
    seconds: float = 2.0,
    strip_metadata: bool = False,
    progress: Progress = silent,
) -> Quantized:
    """Quantize a float model, verify the result against the float model, and write it when it is good enough.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        calibration: representative samples: a file or folder (see open_samples) or dictionaries of arrays by input.
        output: file to write; None writes nothing. An existing file is replaced only by a verified one.
        scheme: a preset's name or a Scheme.
        target: a name of TARGETS.
        prepare: passes of your own, or texts that name them (see pass_named), which rewrite the float model before
            onnxq prepares it. The result is compared with the model as it was given all the same.
        ranges: which range the statistics of a tensor mean; None tries several on the whole model and keeps the best,
            or takes min-max without that accuracy method; a scheme that names a range method has that one.
        statistics: from calibrate() on the same model and scheme; None runs the calibration.
        collection: where samples run, and which earlier statistics are used; None runs all in this process.
        costs: a file of node times; a search reads what it holds of this model and machine and adds what it measures.
        chain: inputs by the output that they take from the sample before, for stateful models.
        min_sqnr: fidelity in decibels that the worst output must have.
        search: ``fast`` or ``full`` measures what each node costs and adds in noise and takes the fastest plan that is
            faithful enough, full with more effort; ``off`` takes the scheme as it is.
        accuracy: what is tried to make codes more faithful, each method kept only where it lowers the noise of the
            whole model: ``fast``, ``full``, ``off``, or names of methods, see `accuracy_named`.
        replay: a plan from an earlier report or file to carry out as it is, instead of scheme, target and search; the
            range method is the plan's own unless ``ranges`` is given.
        emit: a value of Emit: ``qdq``, ``ort``, or ``strict``, whose model is verified in the form that onnxruntime can
            load and then written in pure ONNX types, which it may not.
        metric: what tells whether the model is good, instead of ``min_sqnr``; see load_metric.
        max_drop: how much less than the float model's the metric may be.
        force: whether a model below the wanted fidelity is written nevertheless.
        limit: most samples to use; None uses all.
        images: how image files become arrays.
        seconds: time to spend on comparing latency with the float model; 0 leaves it out.
        strip_metadata: whether what the exporter has written about nodes, tensors and graphs is left out.
        progress: told of each stage.

    Returns:
        The quantized graph and the report.

    Raises:
        ModelError: the model cannot be read, is quantized already, or holds nothing to quantize.
        DataError: the samples do not fit the model, or do not run what the plan to carry out has scales in, or the file
            of node times is none.
        SchemeError: the scheme, target or a pattern is wrong, or a number is out of range.
        OutputError: the output cannot be written, or is the file of node times.
        PassError: one of your passes fails, or changes the names of inputs or outputs.
        FidelityError: the result is below ``min_sqnr`` and ``force`` is not set; nothing was written.
    """
    start = time.perf_counter()
    scheme, runtime = _scheme(scheme), target_named(target)
    if ranges is None and replay is None and scheme.ranges:
        ranges = parse_range(scheme.ranges)
    source = Path(model) if isinstance(model, (str, Path)) else None
    output = Path(output) if output is not None else None
    if output is not None:
        check_output(output, source)
    check_numbers(min_sqnr, max_drop, seconds)
    if (
        costs is not None
        and output is not None
        and Path(costs).resolve() in {output.resolve(), data_file(output).resolve()}
    ):
        raise OutputError(f"node times cannot be kept in the output {output}; give another name")
    known = CostCache.opened(Path(costs) if costs is not None else None)
    graph, own = as_graph(model), as_passes(prepare)
    if output is not None:
        refuse_overwriting(graph, data_file(output))
    with staging(output) as folder:
        reference = reference_file(graph, source, folder)
        external = external_bytes(graph)
        applied = apply_to_float(graph, own)
        refuse_quantized(graph)
        if strip_metadata:
            StripMetadata().apply(graph)
        bench = open_workbench(graph, scheme, runtime, folder, emit_named(emit), replay)
        samples = bench.samples(calibration, images, limit, chain or {}, (collection or Collection()).notice)
        plan = replay or bench.plan({})
        check_plan(plan, bench.graph)
        given = Recipe(ranges) if ranges is not None else Recipe.of_plan(replay) if replay is not None else None
        wanted = _wanted(accuracy, given, replay, large=bench.is_large)
        methods = FIRST_RANGES if "ranges" in wanted.methods else (given or Recipe()).methods
        if statistics is not None:
            bench.check(statistics, plan, methods)
        evidence = statistics or bench.calibrate(plan, samples, progress, collection, methods)
        if replay is None:
            bench = bench.without_idle_bodies(plan, evidence)
            plan = bench.plan({})
        else:
            refuse_idle_bodies(bench.graph, replay, evidence)
        staged = folder / (output.name if output is not None else "model.onnx")
        runnable = replace(bench, emit=Emit.QDQ) if bench.emit is Emit.STRICT else bench
        chooser = Chooser(runnable, reference, samples, evidence, staged, external > 0, seconds, progress, known)
        effort = effort_named(search) if replay is None else None
        wish = Wish(min_sqnr, metric, max_drop)
        try:
            refined = chooser.refined(plan, given or Recipe(), wanted)
            chooser = chooser.with_evidence(refined.evidence)
            if effort is None:
                chosen = chooser.follow(plan, refined.recipe, wish)
            else:
                chosen = chooser.choose(plan, refined.recipe, effort, wish)
        finally:
            known.save()
        outcome, verification = chosen.outcome, chosen.verification
        loads = True
        if bench.emit is Emit.STRICT:
            bench.build(outcome.plan, refined.evidence, chosen.recipe, staged, external_data=external > 0)
            loads = loads_in_onnxruntime(staged)
        report = Report(
            model=str(source) if source else type(model).__name__,
            output=str(output) if output is not None else None,
            float_bytes=stored_bytes(reference) + external,
            bytes=stored_bytes(staged, (data_file(staged),)),
            plan=chosen.recipe.noted_in(outcome.plan),
            ranges=repr(chosen.recipe.ranges),
            range_methods=chosen_methods(chosen.recipe.ranges, plan.calibrated, evidence),
            agreement=verification.agreement,
            kernels=verification.kernels,
            latency=verification.latency,
            sensitivities=outcome.sensitivities,
            measured=outcome.measured,
            frontier=outcome.frontier,
            regions=outcome.regions,
            scores=chosen.scores,
            loads=loads,
            corrected_biases=corrected_biases(outcome.plan, evidence),
            gains=refined.gains,
            passes=(*applied, *bench.applied),
            metadata_bytes=metadata_bytes(load(staged)),
            samples=len(samples),
            seconds=time.perf_counter() - start,
        )
        if not force:
            check_fidelity(report, wish)
        if output is None:
            return Quantized(read_model(onnx.load(staged)), report)
        publish(staged, output)
    return Quantized(load(output), report)


def calibrate(
    model: Model,
    calibration: str | Path | Iterable[Sample],
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    ranges: RangeMethod | None = None,
    collection: Collection | None = None,
    chain: Mapping[str, str] | None = None,
    limit: int | None = None,
    images: ImageOptions | None = None,
    progress: Progress = silent,
) -> Evidence:
    """Collect the statistics that quantize() needs, once, to try range methods or fidelities without running again.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        calibration: representative samples, as quantize() takes them.
        scheme: a preset's name or a Scheme.
        target: a name of TARGETS.
        prepare: passes of your own, the same as quantize() is given.
        ranges: the range method whose statistics are kept; None keeps those of the ones that quantize() tries.
        collection: where samples run, which earlier statistics are used, and what is kept meanwhile.
        chain: inputs by the output that they take from the sample before, for stateful models.
        limit: most samples to use; None uses all.
        images: how image files become arrays.
        progress: told of the stage.

    Returns:
        Statistics of every activation that the plan quantizes; onnxq.save_statistics writes them to one file.
    """
    scheme, runtime = _scheme(scheme), target_named(target)
    methods = FIRST_RANGES if ranges is None else (ranges,)
    graph = _rewritten(model, prepare)
    with staging(None) as folder:
        bench = open_workbench(graph, scheme, runtime, folder)
        samples = bench.samples(calibration, images, limit, chain or {}, (collection or Collection()).notice)
        return bench.calibrate(bench.plan({}), samples, progress, collection or Collection(), methods)


def plan(
    model: Model,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    emit: str = Emit.QDQ,
) -> Plan:
    """Say what quantize() would try first, without calibrating or measuring anything.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        scheme: a preset's name or a Scheme.
        target: a name of TARGETS.
        prepare: passes of your own, see quantize().
        emit: a value of Emit, see quantize().

    Returns:
        The plan before any node is left in float for its noise.
    """
    scheme, runtime = _scheme(scheme), target_named(target)
    with staging(None) as folder:
        graph = _rewritten(model, prepare)
        bench = open_workbench(graph, scheme, runtime, folder, emit_named(emit))
        found = bench.plan({})
        check_plan(found, bench.graph)
    return found


def _rewritten(model: Model, prepare: Sequence[Step]) -> Graph:
    """Return a graph of the model after passes of the user's."""
    graph = as_graph(model)
    apply_to_float(graph, as_passes(prepare))
    refuse_quantized(graph)
    return graph


def _wanted(accuracy: str | Accuracy, given: Recipe | None, replay: Plan | None, *, large: bool) -> Accuracy:
    """Return what is tried for accuracy: no other ranges than given ones, and what a plan that is carried out says."""
    wanted = accuracy_named(accuracy) if isinstance(accuracy, str) else accuracy
    methods = wanted.methods if replay is None else replay.accuracy
    # The others build a model of many bytes too often.
    affordable = ("ranges",) if large else METHODS
    return replace(
        wanted, methods=tuple(name for name in methods if name in affordable and (name != "ranges" or given is None))
    )


def _scheme(scheme: str | Scheme) -> Scheme:
    return preset_named(scheme) if isinstance(scheme, str) else scheme
