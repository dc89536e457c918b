"""The commands that quantize: quantize and train. Heavy imports wait until one runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import OUTPUT, REPORTS, TRAINING, TYPES, GroupedCommand, Option, given_of
from onnxq.cli.options import (
    BELOW_GOAL,
    EXIT_CODES,
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
from onnxq.cli.types import ABOVE_ZERO, MODEL
from onnxq.training.settings import Training, TrainingProgress

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline.quantization import Quantized
    from onnxq.pipeline.request import Budget


@click.command(cls=GroupedCommand, short_help="Quantize a model and write it once it is verified.", epilog=EXIT_CODES)
@click.argument("model", type=MODEL)
@data_options
@scheme_options
@plan_option
@Option(
    TRAINING,
    "--train MINUTES minutes",
    "Fine-tune a faster plan that misses the goal, and keep it if it then meets the goal.",
    advanced=True,
    type=ABOVE_ZERO,
)
@goal_options
@accuracy_option
@budget_options
@output_options("MODEL.PRESET.onnx")
@Option(REPORTS, "--plan-out PATH", "Write the applied plan as TOML.", advanced=True)
@Option(
    REPORTS, "--encodings-out PATH", "Write scales and zero points as AIMET's encodings 1.0.0, for QNN.", advanced=True
)
@Option(OUTPUT, "--no-certificate uncertified", "Write no certificate into the model.", advanced=True)
@Option(
    TYPES,
    "--dtypes NAMES",
    "Write these dtypes beside the model, or the models of a folder for transformers.js: "
    "q8,int8,uint8,q4,q4f16,fp16,bnb4.",
    advanced=True,
)
@Option(
    OUTPUT,
    "--dry-run",
    "Print the first plan, one node per line; with --plan-out, search and write the plan, but no model.",
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
    if dtypes is not None:
        names = [name.strip() for name in dtypes.split(",")]
        _write_dtypes(model, names, data, request, goal, budget, as_json=output.as_json)
        return
    if plan_file is not None and dry_run:
        raise click.UsageError("--dry-run shows the plan of a scheme, and --plan gives one; leave one out")
    if dry_run and minutes is not None:
        raise click.UsageError("--train trains a model, and --dry-run writes none; leave one out")
    if dry_run and plan_out is None:
        _print_plan(model, request, as_json=output.as_json)
        return
    request = request.with_plan(plan_file)
    if data is None and (minutes is not None or not request.is_data_free):
        raise click.UsageError(NO_SAMPLES)
    budget = replace(budget, layers=output.layers, certificate=not (uncertified or dry_run))
    run = partial(_run, request=request, goal=goal, budget=budget, minutes=minutes, quiet=output.quiet)
    if model.is_dir():
        if dry_run or encodings_out is not None:
            name = "--dry-run" if dry_run else "--encodings-out"
            raise click.UsageError(f"{name} is about one model, and a folder may hold several; give a model")
        from onnxq.pipeline.folders import quantize_folder

        place = output.output or Path(f"{model.resolve().name}.{request.name}")
        reports = output.of(
            lambda: quantize_folder(model, place, data, run, scheme=request.name, goal=goal()), plan_out
        )
        texts = [report.to_json() for report in reports.values()] if output.as_json else [str(place)]
        click.echo(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
        return
    outputs = {"--plan-out": plan_out, "--encodings-out": encodings_out}
    read = (*(data.given if data else ()), plan_file, *request.read)
    file = output.named(f"{model.stem}.{request.name}.onnx", model, outputs, read)

    def run_one() -> dict[str, Quantized]:
        done = run(model, data, None if dry_run else file)
        if encodings_out is not None:
            from onnxq.report.encodings import save_encodings

            save_encodings(done.graph, done.report.plan, model, encodings_out)
        return {"": done}

    report = output.of(run_one, plan_out)[""]
    click.echo(report.to_json() if output.as_json else plan_out if dry_run else report.output)


def _print_plan(model: Path, request: Request, *, as_json: bool) -> None:
    from onnxq.pipeline import quantization
    from onnxq.report.formatting import visible

    plan = quantization.plan(model, scheme=request.rules, target=request.target, prepare=request.prepare)
    fields = ("mode", "op_type", "node", "reason")
    rows = [{name: str(getattr(decision, name)) for name in fields} for decision in plan.decisions]
    lines = ("\t".join(map(visible, row.values())) for row in rows)
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines))


# Options that do not go with --dtypes, whose names stand for schemes and files.
_SAID_BY_DTYPES = (
    *("--validation", "--preset", "--scheme", "--exclude", "--range", "--encodings", "--pass", "--emit", "--io"),
    *("--strip-metadata", "--chain", "--plan", "--train", "--metric", "--max-drop", "--force", "--exact", "--prefer"),
    *("--max-size", "--output", "--report", "--html", "--plan-out", "--encodings-out", "--no-certificate", "--dry-run"),
)


def _write_dtypes(
    model: Path,
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

    if contrary := given_of(*_SAID_BY_DTYPES):
        raise click.UsageError(f"--dtypes goes without {contrary[0]}; leave one of them out")
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    target = request.target if given_of("--target") else "onnxruntime-web"
    decibels = goal().min_sqnr
    written = write_web_folder(
        model, data.calibration, data, dtypes=dtypes, target=target, goal=decibels, budget=budget
    )
    results = list(written)
    if as_json:
        click.echo(json.dumps(to_plain(results), indent=2, default=str))
    else:
        tables.print_written(str(model), results)
    if any(result.refused for result in results):
        sys.exit(BELOW_GOAL)


def _run(
    model: Path,
    data: Data | None,
    output: Path | None,
    *,
    request: Request,
    goal: Callable[[], Goal],
    budget: Budget,
    minutes: float | None,
    quiet: bool,
) -> Quantized:
    """Quantize a model with progress bars; with minutes, train a faster plan too."""
    from onnxq.pipeline import quantization

    with _watched(budget, quiet=quiet) as (budget, on_progress):
        if minutes is not None:
            assert data is not None
            from onnxq.training.pipeline import quantize_and_train

            training = Training(blocks="no", minutes=minutes, on_progress=on_progress)
            wanted = request.to_quantize()
            return quantize_and_train(model, data, output, scheme=wanted, goal=goal(), budget=budget, training=training)
        return quantization.quantize(
            model,
            data,
            output,
            scheme=request.scheme,
            target=request.target,
            prepare=request.prepare,
            goal=goal(),
            budget=budget,
        )


@contextmanager
def _watched(budget: Budget, *, quiet: bool) -> Iterator[tuple[Budget, Callable[[TrainingProgress], None]]]:
    """Yield the budget with progress bars, and the callback that shows the progress of training in them."""
    from onnxq.cli.progress_bars import progress_bars

    notes: dict[str, str] = {}
    with progress_bars(budget.time_limit, notes, quiet=quiet) as progress:
        yield replace(budget, progress=progress), partial(note_progress, notes)


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
    from onnxq.training import pipeline, require_torch

    require_torch()
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    request = request.with_plan(plan_file)
    file = output.named(f"{model.stem}.{request.name}.onnx", model, {}, (*data.given, plan_file))
    budget = Budget("off", accuracy, latency_seconds, threads=threads, cluster=cluster, layers=output.layers)

    def run() -> dict[str, Quantized]:
        wanted = request.to_quantize()
        with _watched(budget, quiet=output.quiet) as (watched, on_progress):
            settings = replace(training, on_progress=on_progress)
            done = pipeline.train(model, data, file, scheme=wanted, goal=goal(), budget=watched, training=settings)
        return {"": done}

    report = output.of(run)[""]
    click.echo(report.to_json() if output.as_json else report.output)


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
