"""The commands that quantize, and that only plan it. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import goal_options, measurements_option, speed_options
from onnxq.cli.groups import OUTPUT, TRAINING, WHAT, GroupedCommand, option
from onnxq.cli.options import EXIT_CODES, FILE, FiniteRange, batch_option, collection_options
from onnxq.cli.output import Output, output_options
from onnxq.cli.wanted import NO_SAMPLES, Asked, data_options, scheme_options

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline import Quantized
    from onnxq.planning.plan import Decision, Plan
    from onnxq.steps.budget import Budget


@click.command(cls=GroupedCommand, short_help="Quantize a model and write it when it is verified.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@data_options
@batch_option
@scheme_options
@option(
    "--plan",
    "plan_file",
    group=WHAT,
    type=FILE,
    help="Carry out the plan of this file as it is, instead of a preset, scheme or search.",
)
@option(
    "--train",
    "minutes",
    group=TRAINING,
    type=FiniteRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Train the fastest plan that is just not faithful enough, and take it if it is then.",
)
@goal_options
@speed_options
@measurements_option
@output_options("MODEL.PRESET.onnx")
@option("--plan-out", group=OUTPUT, type=FILE, help="Write the plan that was carried out as TOML.")
@option("--dry-run", group=OUTPUT, is_flag=True, help="Print the plan, one node a line, and write nothing.")
def quantize(
    model: Path,
    output: Output,
    data: Data | None,
    asked: Asked,
    plan_file: Path | None,
    minutes: float | None,
    goal: Callable[[], Goal],
    budget: Budget,
    plan_out: Path | None,
    dry_run: bool,
) -> None:
    """Quantize MODEL and write it when it is verified.

    Prints the name of the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq import pipeline

    if plan_file is not None and dry_run:
        raise click.UsageError("--dry-run shows what a scheme would do, and a --plan says that itself; leave one out")
    if dry_run:
        found = pipeline.plan(model, scheme=asked.rules, target=asked.target, prepare=asked.prepare)
        click.echo(_as_json(found) if output.as_json else _as_lines(found))
        return
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    asked = asked.following(plan_file)
    budget = replace(budget, layers=output.kept.layers)
    others = {"--plan-out": plan_out, "--costs": budget.costs}
    file = output.named(f"{model.stem}.{asked.name}.onnx", model, others, (*data.given, plan_file))

    def run() -> Quantized:
        if minutes is None:
            return quantized(model, file, data, asked, goal(), budget, quiet=output.quiet)
        return with_training(model, file, data, asked, goal(), budget, minutes, quiet=output.quiet)

    report = output.of(run, plan_out)
    click.echo(report.to_json() if output.as_json else report.output)


@click.command(cls=GroupedCommand, short_help="Search for a plan and write it, but no model.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@data_options
@batch_option
@scheme_options
@goal_options
@speed_options
@measurements_option
@output_options("MODEL.plan.toml")
def plan(
    model: Path,
    output: Output,
    data: Data | None,
    asked: Asked,
    goal: Callable[[], Goal],
    budget: Budget,
) -> None:
    """Search for a plan of MODEL, verify what it makes, and write the plan alone.

    onnxq quantize --plan carries it out. Prints the name of the written file on stdout; progress and tables go to
    stderr.
    """
    from onnxq.planning.plan_file import save_plan

    if data is None:
        raise click.UsageError(NO_SAMPLES)
    budget = replace(budget, layers=output.kept.layers)
    file = output.named(f"{model.stem}.plan.toml", model, {"--costs": budget.costs}, data.given)
    report = output.of(lambda: quantized(model, None, data, asked, goal(), budget, quiet=output.quiet))
    save_plan(report.plan, file)
    click.echo(report.to_json() if output.as_json else file)


def _as_lines(found: Plan) -> str:
    from onnxq.report.formatting import visible

    return "\n".join("\t".join(map(visible, _fields(one).values())) for one in found.decisions)


def _as_json(found: Plan) -> str:
    return json.dumps([_fields(one) for one in found.decisions], indent=2)


def _fields(decision: Decision) -> dict[str, str]:
    named = {"mode": str(decision.mode), "op_type": decision.op_type, "node": decision.node}
    return {**named, "reason": decision.reason}


def quantized(
    model: Path, output: Path | None, data: Data, asked: Asked, goal: Goal, budget: Budget, *, quiet: bool
) -> Quantized:
    """Run quantize() with bars that tell of its progress."""
    from onnxq import pipeline
    from onnxq.cli.progress_bars import progress_bars

    with progress_bars(budget.seconds, quiet=quiet) as told:
        return pipeline.quantize(
            model,
            data,
            output,
            scheme=asked.scheme,
            target=asked.target,
            prepare=asked.prepare,
            goal=goal,
            budget=replace(budget, progress=told),
        )


def with_training(
    model: Path, output: Path, data: Data, asked: Asked, goal: Goal, budget: Budget, minutes: float, *, quiet: bool
) -> Quantized:
    """Run quantize_and_train() with bars that tell of its progress."""
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.cli.train import note
    from onnxq.steps.wanted import Wanted
    from onnxq.training.pipeline import quantize_and_train
    from onnxq.training.settings import Training

    notes: dict[str, str] = {}
    with progress_bars(notes=notes, quiet=quiet) as told:
        return quantize_and_train(
            model,
            data,
            output,
            scheme=Wanted.of(asked.scheme, asked.target, asked.prepare),
            goal=goal,
            budget=replace(budget, progress=told),
            training=Training(blocks="no", minutes=minutes, on_progress=partial(note, notes)),
        )
