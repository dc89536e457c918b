"""The commands that quantize: quantize and train. Heavy imports wait until one runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import OUTPUT, REPORTS, TRAINING, TYPES, FiniteRange, GroupedCommand, is_given, option
from onnxq.cli.options import (
    BELOW_GOAL,
    EXIT_CODES,
    FILE,
    MODEL,
    NO_SAMPLES,
    Request,
    accuracy_option,
    budget_options,
    cluster_option,
    data_options,
    goal_options,
    plan_option,
    result_latency_option,
    scheme_options,
    threads_option,
    training_data_options,
    training_options,
)
from onnxq.cli.output import Output, output_options, print_start
from onnxq.training.settings import Training, TrainingProgress

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline.quantization import Quantized
    from onnxq.pipeline.request import Budget
    from onnxq.planning.plan import Decision


@click.command(cls=GroupedCommand, short_help="Quantize a model and write it once it is verified.", epilog=EXIT_CODES)
@click.argument("model", type=MODEL)
@data_options
@scheme_options
@plan_option
@option(
    "--train",
    "minutes",
    group=TRAINING,
    advanced=True,
    type=FiniteRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Fine-tune a faster plan that misses the goal, and keep it if it then meets the goal.",
)
@goal_options
@accuracy_option
@budget_options
@output_options("MODEL.PRESET.onnx")
@option("--plan-out", group=REPORTS, advanced=True, type=FILE, help="Write the applied plan as TOML.")
@option(
    "--encodings-out",
    group=REPORTS,
    advanced=True,
    type=FILE,
    help="Write scales and zero points as AIMET's encodings 1.0.0, for QNN.",
)
@option(
    "--no-certificate",
    "uncertified",
    group=OUTPUT,
    advanced=True,
    is_flag=True,
    help="Write no certificate into the model.",
)
@option(
    "--dtypes",
    group=TYPES,
    advanced=True,
    metavar="NAMES",
    help="Write these dtypes beside the model, or the models of a folder for transformers.js: "
    "q8,int8,uint8,q4,q4f16,fp16,bnb4.",
)
@option(
    "--dry-run",
    group=OUTPUT,
    is_flag=True,
    help="Print the first plan, one node per line; with --plan-out, search and write the plan, but no model.",
)
def quantize(
    model: Path,
    output: Output,
    data: Data | None,
    request: Request,
    plan_file: Path | None,
    minutes: float | None,
    goal: Callable[[], Goal],
    budget: Budget,
    plan_out: Path | None,
    encodings_out: Path | None,
    uncertified: bool,
    dtypes: str | None,
    dry_run: bool,
) -> None:
    """Quantize MODEL and write it once it is verified.

    MODEL is a file, or a folder of onnxruntime-genai, transformers.js or Optimum, and so is the output.
    Prints the name of the output on stdout; progress and the closing table go to stderr.
    """
    print_start(model, quiet=output.quiet)
    from onnxq.pipeline import quantization

    if dtypes is not None:
        names = [name.strip() for name in dtypes.split(",")]
        _write_dtypes(model, names, data, request, goal, budget, as_json=output.as_json)
        return
    if plan_file is not None and dry_run:
        raise click.UsageError("--dry-run shows the plan of a scheme, and --plan gives one; leave one out")
    if dry_run and minutes is not None:
        raise click.UsageError("--train trains a model, and --dry-run writes none; leave one out")
    if dry_run and plan_out is None:
        plan = quantization.plan(model, scheme=request.rules, target=request.target, prepare=request.prepare)
        decisions = list(map(_fields, plan.decisions))
        click.echo(json.dumps(decisions, indent=2) if output.as_json else _as_lines(decisions))
        return
    request = request.with_plan(plan_file)
    if data is None and (minutes is not None or not request.is_data_free):
        raise click.UsageError(NO_SAMPLES)
    budget = replace(budget, layers=output.reports.layers, certificate=not (uncertified or dry_run))
    if model.is_dir():
        if dry_run or encodings_out is not None:
            name = "--dry-run" if dry_run else "--encodings-out"
            raise click.UsageError(f"{name} is about one model, and a folder may hold several; give a model")
        from onnxq.pipeline.folders import quantize_folder

        def build(file: Path, samples: Data | None, staged: Path) -> Quantized:
            return run_quantize(file, staged, samples, request, goal(), budget, quiet=output.quiet)

        place = output.file or Path(f"{model.resolve().name}.{request.name}")
        reports = output.of_each(
            lambda: quantize_folder(model, place, data, build, scheme=request.name, goal=goal()), plan_out
        )
        if output.as_json:
            texts = [report.to_json() for report in reports.values()]
            click.echo(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
        else:
            click.echo(place)
        return
    outputs = {"--plan-out": plan_out, "--encodings-out": encodings_out}
    read = (*(data.given if data else ()), plan_file, *request.read)
    file = output.named(f"{model.stem}.{request.name}.onnx", model, outputs, read)

    def run() -> Quantized:
        if data is None or minutes is None:
            place = None if dry_run else file
            done = run_quantize(model, place, data, request, goal(), budget, quiet=output.quiet)
        else:
            done = run_quantize_and_train(model, file, data, request, goal(), budget, minutes, quiet=output.quiet)
        if encodings_out is not None:
            from onnxq.report.encodings import save_encodings

            save_encodings(done.graph, done.report.plan, model, encodings_out)
        return done

    report = output.of(run, plan_out)
    click.echo(report.to_json() if output.as_json else plan_out if dry_run else report.output)


# Parameters that do not go with --dtypes, whose names stand for schemes and files.
_SAID_BY_DTYPES = (
    *("output", "preset", "scheme_file", "exclude", "ranges", "encodings", "passes", "emit", "io", "strip_metadata"),
    *("plan_file", "minutes", "validation", "chain", "metric", "max_drop", "force", "exact", "prefer", "max_size"),
    *("report", "html", "plan_out", "encodings_out", "uncertified", "dry_run"),
)


def _write_dtypes(
    folder: Path,
    dtypes: list[str],
    data: Data | None,
    request: Request,
    goal: Callable[[], Goal],
    budget: Budget,
    *,
    as_json: bool,
) -> None:
    from onnxq.cli import tables
    from onnxq.pipeline.folders import write_web_folder
    from onnxq.system.records import to_plain

    for parameter in click.get_current_context().command.params:
        if parameter.name in _SAID_BY_DTYPES and is_given(parameter.name):
            raise click.UsageError(f"--dtypes goes without {parameter.opts[-1]}; leave one of them out")
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    target = request.target if is_given("target") else "onnxruntime-web"
    decibels = goal().min_sqnr
    written = write_web_folder(
        folder, data.calibration, data, dtypes=dtypes, target=target, goal=decibels, budget=budget
    )
    results = list(written)
    if as_json:
        click.echo(json.dumps(to_plain(results), indent=2, default=str))
    else:
        tables.print_written(str(folder), results)
    if any(result.refused for result in results):
        sys.exit(BELOW_GOAL)


def _as_lines(decisions: list[dict[str, str]]) -> str:
    from onnxq.report.formatting import visible

    return "\n".join("\t".join(map(visible, decision.values())) for decision in decisions)


def _fields(decision: Decision) -> dict[str, str]:
    return {name: str(getattr(decision, name)) for name in ("mode", "op_type", "node", "reason")}


def run_quantize(
    model: Path, output: Path | None, data: Data | None, request: Request, goal: Goal, budget: Budget, *, quiet: bool
) -> Quantized:
    """Run quantize() with progress bars."""
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline import quantization

    with progress_bars(budget.time_limit, quiet=quiet) as progress:
        return quantization.quantize(
            model,
            data,
            output,
            scheme=request.scheme,
            target=request.target,
            prepare=request.prepare,
            goal=goal,
            budget=replace(budget, progress=progress),
        )


def run_quantize_and_train(
    model: Path, output: Path, data: Data, request: Request, goal: Goal, budget: Budget, minutes: float, *, quiet: bool
) -> Quantized:
    """Run quantize_and_train() with progress bars."""
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline.request import QuantizationRequest
    from onnxq.training.pipeline import quantize_and_train
    from onnxq.training.settings import Training

    notes: dict[str, str] = {}
    with progress_bars(notes=notes, quiet=quiet) as progress:
        return quantize_and_train(
            model,
            data,
            output,
            scheme=QuantizationRequest.of(request.scheme, request.target, request.prepare),
            goal=goal,
            budget=replace(budget, progress=progress),
            training=Training(blocks="no", minutes=minutes, on_progress=partial(note_progress, notes)),
        )


@click.command(cls=GroupedCommand, short_help="Quantize a model and train it.", epilog=EXIT_CODES)
@click.argument("model", type=MODEL)
@cluster_option
@training_data_options
@scheme_options
@plan_option
@training_options
@goal_options
@accuracy_option
@result_latency_option
@threads_option
@output_options("MODEL.PRESET.onnx")
def train(
    model: Path,
    output: Output,
    data: Data | None,
    request: Request,
    plan_file: Path | None,
    training: Training,
    goal: Callable[[], Goal],
    accuracy: str,
    latency_seconds: float,
    threads: int | None,
    cluster: str | None,
) -> None:
    """Quantize MODEL by a scheme or plan, train the quantized parts, and write it once it is verified.

    Without labels, it is trained towards the float model's outputs.

    Prints the name of the written file on stdout; progress and the closing table go to stderr.
    """
    print_start(model, quiet=output.quiet)
    from onnxq.pipeline.request import Budget
    from onnxq.training import require_torch

    require_torch()
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    request = request.with_plan(plan_file)
    file = output.named(f"{model.stem}.{request.name}.onnx", model, {}, (*data.given, plan_file))
    budget = Budget("off", accuracy, latency_seconds, threads=threads, cluster=cluster, layers=output.reports.layers)
    report = output.of(lambda: run_train(model, file, data, request, goal(), budget, training, quiet=output.quiet))
    click.echo(report.to_json() if output.as_json else report.output)


def run_train(
    model: Path,
    output: Path,
    data: Data,
    request: Request,
    goal: Goal,
    budget: Budget,
    training: Training,
    *,
    quiet: bool,
) -> Quantized:
    """Run train() with progress bars."""
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline.request import QuantizationRequest
    from onnxq.training.pipeline import train as train_model

    wanted = QuantizationRequest.of(request.scheme, request.target, request.prepare)
    notes: dict[str, str] = {}
    with progress_bars(budget.time_limit, notes, quiet=quiet) as progress:
        budget = replace(budget, progress=progress)
        training = replace(training, on_progress=partial(note_progress, notes))
        return train_model(model, data, output, scheme=wanted, goal=goal, budget=budget, training=training)


def note_progress(notes: dict[str, str], state: TrainingProgress) -> None:
    """Set the note that the progress bar of training shows.

    >>> notes = {}
    >>> note_progress(notes, TrainingProgress(1, 8, loss=0.0123, nsr_by_output=0.01))
    >>> notes
    {'train': 'loss 0.0123, 20.0 dB'}
    """
    from onnxq.numerics.affine import decibels, sqnr_of_ratio

    text = f"loss {state.loss:.3g}, {decibels(sqnr_of_ratio(state.nsr_by_output))}"
    notes["blocks" if state.block else "train"] = text
