"""The last steps: the report is put together, and the verified model published."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import onnx

from onnxq.algorithms.activation_params import corrected_biases
from onnxq.algorithms.encoding_config import attach_encodings
from onnxq.calibration.methods import format_method
from onnxq.certificate.certificate import Certificate, write_certificate
from onnxq.certificate.making import make_certificate, open_floating
from onnxq.config.scheme import InputsOutputs
from onnxq.data.dataset import (
    Subset,
    evenly_spaced_indices,
    group_equal,
    list_shared_files,
    origin_of,
    picked,
    ranges_of,
)
from onnxq.errors import DataError
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.comparison import threads_at_once
from onnxq.evaluation.goal import MINIMUM_SQNR, EvaluationSplit, Goal
from onnxq.evaluation.layers import Layers, compare_layers
from onnxq.evaluation.verification import COMPARED_SAMPLES, Verification
from onnxq.evaluation.warnings import warn_weak_slices
from onnxq.ir import Graph, load, metadata_bytes, read_model
from onnxq.passes.quantize.graph_io import GraphTensor
from onnxq.pipeline.calibrate import CalibratedModel, accuracy_tried
from onnxq.pipeline.integer_io import quantize_inputs_outputs
from onnxq.pipeline.prepare import PreparedRun
from onnxq.pipeline.request import Budget
from onnxq.pipeline.search import SearchedModel
from onnxq.planning.delivery import Delivery, deliveries, left_by_standard
from onnxq.planning.plan import Plan
from onnxq.report import Report
from onnxq.report.parts import (
    Accuracy,
    AppliedPass,
    Encoding,
    Machine,
    ModelFiles,
    Performance,
    Run,
    Samples,
    Search,
    Stopwatch,
    tensor_values,
    weight_channels,
)
from onnxq.runtime.kernels import loaded_kernels
from onnxq.search.kernel_times import kernels_by_node
from onnxq.system.failures import tolerate
from onnxq.system.publish import data_file, publish, stored_bytes
from onnxq.system.records import to_plain


def build_report(settled: SearchedModel, goal: Goal, budget: Budget, watch: Stopwatch) -> Report:
    """Return what was decided and measured, once the model stands in the form in which it is to be written."""
    seen, result = settled.seen, settled.result
    model, candidate, trail, verification = seen.model, result.candidate, result.trail, result.verification
    staged = candidate.path
    # Nothing more is encoded.
    seen.bench.encoding_cache.clear()
    graph, plan = load(staged), _noted(settled, budget)
    split = _evaluated_on(settled, goal, budget)
    looked = bool(budget.layers) and not seen.bench.is_large
    layers: Layers | None = None
    ran, joined = dict[str, str](), tuple[str, ...]()
    if looked:
        with tolerate("the comparison of layers"):
            layers = _layers(seen, staged, plan, budget.layers)
        with tolerate("the check of kernels"):
            ran = _ran(staged, graph, plan)
    tensors: tuple[GraphTensor, ...] = ()
    if seen.bench.scheme.io is InputsOutputs.QUANTIZED:
        tensors = quantize_inputs_outputs(staged, seen.samples.holdout)
        graph = load(staged)
    certificate: Certificate | None = None
    if budget.certificate:
        with tolerate("the certificate"):
            certificate = _certify(seen, staged, plan, graph, verification, split)
    if goal.metric is None and not seen.samples.generated:
        with tolerate("the check for weak slices"):
            joined = warn_weak_slices(verification.agreement.outputs, min(goal.min_sqnr, MINIMUM_SQNR))
    watch.lap("report")
    return Report(
        files=ModelFiles(
            model=model.name,
            output=str(model.output) if model.output is not None else None,
            float_bytes=model.float_bytes,
            bytes=stored_bytes(staged, (data_file(staged),)),
            metadata_bytes=metadata_bytes(graph),
            model_digest=_digest(model.reference),
            output_digest=_digest(staged),
            data=str(data_file(model.output)) if model.output is not None and data_file(staged).exists() else None,
        ),
        plan=plan,
        samples=Samples(
            calibrated=len(seen.samples.fit),
            split=split,
            warnings=(*seen.samples.warnings, *seen.warnings, *settled.warnings, *joined),
            generated=seen.samples.generated,
            images=seen.samples.images,
        ),
        accuracy=Accuracy(
            _without_bounds(verification.agreement) if seen.samples.generated else verification.agreement,
            result.scores,
            on_engines=() if verification.elsewhere is None else (verification.elsewhere,),
            layers=layers,
            wanted=goal.min_sqnr if goal.metric is None and not seen.samples.generated else None,
            max_drop=goal.max_drop,
        ),
        performance=Performance(
            verification.kernels,
            verification.latency,
            trail.regions,
            trail.times,
            model.target_engine.unmeasured,
            ran,
            verification.runs_as_float,
        ),
        search=Search(
            trail.measured,
            trail.sensitivities,
            trail.frontier,
            budget.limit if trail.late else "",
            trail.sizes,
            goal.max_size if isinstance(goal.max_size, int) else None,
            budget.longer if trail.late else "",
        ),
        encoding=Encoding(
            ranges=(format_method(candidate.recipe.config.ranges) or repr(candidate.recipe.config.ranges))
            if model.replay is None
            else model.replay.ranges,
            corrected_biases=corrected_biases(candidate.plan, seen.statistics),
            gains=trail.gains,
            skipped_at_sqnr=trail.skipped_at_sqnr,
            # The bits that a size chose are no lack.
            delivered=_delivered(model, candidate.plan) if goal.exact or not trail.sizes else (),
            left_by_standard=_left_by_standard(model, candidate.plan),
            tensors=tensor_values(plan, candidate.recipe.statistics),
            io=tensors,
            # A large model is not read once more for that.
            weights=() if seen.bench.is_large else weight_channels(plan, seen.bench.graph),
        ),
        run=Run(
            seconds=watch.seconds,
            passes=(
                *(AppliedPass.of(applied, own=True) for applied in model.applied),
                *map(AppliedPass.of, seen.bench.making.applied),
            ),
            stages=watch.stages,
            machine=Machine.this(),
        ),
        certificate=certificate,
    )


def _without_bounds(agreement: Agreement) -> Agreement:
    """Return an agreement that tells nothing of other samples."""
    return replace(agreement, outputs=tuple(replace(output, bound=None) for output in agreement.outputs))


def _certify(
    seen: CalibratedModel,
    staged: Path,
    plan: Plan,
    graph: Graph,
    verification: Verification,
    split: EvaluationSplit,
) -> Certificate:
    """Write a certificate into the staged model, and return it."""
    model = seen.model
    opened = verification.opened
    runs = None
    # The opened model has float inputs and outputs.
    if opened and seen.bench.scheme.io is InputsOutputs.FLOAT:
        floating, view = opened
        runs = floating.outputs if floating.is_open else open_floating(model.reference), view.outputs
    certificate = make_certificate(
        model.reference,
        staged,
        seen.samples.fit,
        verification.agreement,
        split.samples - split.seen,
        graph=graph,
        runs=runs,
        threads=threads_at_once(model.reference) or 0 if runs is not None else 1,
        plan=hashlib.sha256(json.dumps(to_plain(plan), sort_keys=True).encode()).hexdigest(),
        engines=model.target_engine.elsewhere,
    )
    return write_certificate(certificate, staged)


def _layers(seen: CalibratedModel, staged: Path, plan: Plan, samples: int) -> Layers | None:
    """Return the layers of both models beside each other; None where they have no tensor in common."""
    places = evenly_spaced_indices(len(seen.samples.holdout), samples)
    compared = list(picked(seen.samples.holdout, places))
    try:
        layers = compare_layers(seen.model.reference, staged, compared, plan=plan)
    except DataError:
        return None
    return layers.of_samples([origin_of(seen.samples.holdout, place).place for place in places])


def _ran(model: Path, graph: Graph, plan: Plan) -> dict[str, str]:
    """Return the operators of the kernels that onnxruntime makes of the plan's nodes, by node."""
    kernels = kernels_by_node(loaded_kernels(model), graph)
    return {
        name: ", ".join(dict.fromkeys(kernel.op_type for kernel in kernels[name]))
        for name in plan.by_node
        if name in kernels
    }


def _evaluated_on(settled: SearchedModel, goal: Goal, budget: Budget) -> EvaluationSplit:
    """Tell which samples the model was judged by: a metric looks at all of them, and may have chosen by them."""
    seen, trail, holdout = settled.seen, settled.result.trail, settled.seen.samples.holdout
    count = len(holdout)
    places = evenly_spaced_indices(count, count if goal.metric is not None else COMPARED_SAMPLES)
    split = EvaluationSplit.of(picked(holdout, places), seen.statistics.samples, trail.samples, trail.rounds)
    searched = budget.effort is not None and seen.model.replay is None
    if goal.metric is not None and searched and holdout is seen.samples.fit:
        # Also those that set no ranges, as statistics were given: the plan is the first that is good for all of them.
        split = replace(split, seen=split.samples)
    places_read = ranges_of(origin_of(holdout, place).place for place in places)
    files = len(group_equal(list_shared_files(Subset(holdout, places))))
    return replace(split, places=places_read, apart=seen.samples.apart, files=files)


def _delivered(model: PreparedRun, plan: Plan) -> tuple[Delivery, ...]:
    """Return how much of the scheme the plan is; nothing where there was only a plan."""
    bench = model.bench
    return deliveries(plan, bench.graph, bench.scheme, bench.target) if model.replay is None else ()


def _left_by_standard(model: PreparedRun, plan: Plan) -> int:
    """Return how many nodes stay float for want of operators that may not be written; 0 where there was only a plan."""
    bench = model.bench
    written = bench.emit.has_own or model.replay is not None
    return 0 if written else left_by_standard(plan, bench.graph, bench.scheme, bench.target)


def _noted(settled: SearchedModel, budget: Budget) -> Plan:
    """Return the plan with all that it takes to carry it out again."""
    bench, candidate = settled.seen.bench, settled.result.candidate
    thorough = accuracy_tried(settled.seen.model, budget).thorough
    plan = attach_encodings(candidate.plan, candidate.recipe.config, candidate.recipe.statistics)
    return replace(plan, emit=bench.emit, io=bench.scheme.io, preparation=bench.preparation, thorough=thorough)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file; an empty string where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_model(settled: SearchedModel) -> Graph:
    """Put the verified model in its place, and return it."""
    built, output = settled.result.candidate.path, settled.seen.model.output
    if output is None:
        return read_model(onnx.load(built))
    publish(built, output)
    return load(output)
