"""The commands that quantize, and that only plan it. Heavy imports wait until one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import goal_options, speed_options
from onnxq.cli.groups import OUTPUT, WHAT, GroupedCommand, option
from onnxq.cli.kept import Kept, kept_options, with_command
from onnxq.cli.options import EXIT_CODES, FILE, collection_options, image_options
from onnxq.cli.wanted import NO_SAMPLES, SAID_BY_PLANS, Asked, data_options, is_given, scheme_options

if TYPE_CHECKING:
    from onnxq.budget import Budget
    from onnxq.data import Data
    from onnxq.judging.goal import Goal
    from onnxq.pipeline import Quantized
    from onnxq.report import Report

# Names may hold the characters that separate fields and lines.
_ONE_FIELD = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})


@click.command(cls=GroupedCommand, short_help="Quantize a model and write it when it is verified.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@image_options
@data_options
@scheme_options
@option(
    "--plan",
    "plan_file",
    group=WHAT,
    type=FILE,
    help="Carry out the plan of this file as it is, instead of a preset, scheme or search.",
)
@goal_options
@speed_options
@option(
    "-o",
    "--output",
    group=OUTPUT,
    type=FILE,
    help="File to write.  [default: MODEL.PRESET.onnx in the current folder]",
)
@kept_options
@option("--plan-out", group=OUTPUT, type=FILE, help="Write the plan that was carried out as TOML.")
@option("--dry-run", group=OUTPUT, is_flag=True, help="Print the plan, one node a line, and write nothing.")
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print the report as JSON instead of the written file.")
@option("-v", "--verbose", group=OUTPUT, is_flag=True, help="Show all reasons, plans and regions.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show neither progress nor tables.")
def quantize(
    model: Path,
    output: Path | None,
    data: Data | None,
    asked: Asked,
    plan_file: Path | None,
    goal: Callable[[], Goal],
    budget: Budget,
    kept: Kept,
    plan_out: Path | None,
    dry_run: bool,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Quantize MODEL and write it when it is verified.

    Prints the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq import pipeline
    from onnxq.planning.plan_file import load_plan
    from onnxq.report import FidelityError

    if plan_file is not None and any(map(is_given, SAID_BY_PLANS)):
        raise click.UsageError(
            "--plan says what happens to every node; leave out --preset, --scheme, --exclude, --range, --target, "
            "--search, --accuracy, --emit and --strict-types"
        )
    if plan_file is not None and dry_run:
        raise click.UsageError("--dry-run shows what a scheme would do, and a --plan says that itself; leave one out")
    if verbose and quiet:
        raise click.UsageError("--verbose shows more and --quiet less; leave one of them out")
    if dry_run:
        for decision in pipeline.plan(model, scheme=asked.rules, target=asked.target, prepare=asked.prepare).decisions:
            fields = (decision.mode, decision.op_type, decision.node, decision.reason)
            click.echo("\t".join(field.translate(_ONE_FIELD) for field in fields))
        return
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    if plan_file is not None:
        asked = replace(asked, scheme=load_plan(plan_file))
    output = output or Path(f"{model.stem}.{default_name(asked)}.onnx")
    check_files(model, output, {**kept.files, "--plan-out": plan_out, "--costs": budget.costs})
    try:
        done = quantized(model, output, data, asked, goal(), budget, quiet=quiet)
    except FidelityError as refused:
        refused.report = with_command(refused.report)
        keep(refused.report, kept, plan_out)
        raise
    report = with_command(done.report)
    keep(report, kept, plan_out)
    show(report, quiet=quiet, verbose=verbose)
    click.echo(report.to_json() if as_json else report.output)


@click.command(cls=GroupedCommand, short_help="Search for a plan and write it, but no model.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@image_options
@data_options
@scheme_options
@goal_options
@speed_options
@option(
    "-o", "--output", group=OUTPUT, type=FILE, help="File to write.  [default: MODEL.plan.toml in the current folder]"
)
@kept_options
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print the report as JSON instead of the written file.")
@option("-v", "--verbose", group=OUTPUT, is_flag=True, help="Show all reasons, plans and regions.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show neither progress nor tables.")
def plan(
    model: Path,
    output: Path | None,
    data: Data | None,
    asked: Asked,
    goal: Callable[[], Goal],
    budget: Budget,
    kept: Kept,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Search for a plan of MODEL, verify what it makes, and write the plan alone.

    onnxq quantize --plan carries it out. Prints the written file on stdout; progress and tables go to stderr.
    """
    from onnxq.report import FidelityError

    if data is None:
        raise click.UsageError(NO_SAMPLES)
    output = output or Path(f"{model.stem}.plan.toml")
    check_files(model, output, {**kept.files, "--costs": budget.costs})
    try:
        done = quantized(model, None, data, asked, goal(), budget, quiet=quiet)
    except FidelityError as refused:
        refused.report = with_command(refused.report)
        keep(refused.report, kept, None)
        raise
    report = with_command(done.report)
    keep(report, kept, output)
    show(report, quiet=quiet, verbose=verbose)
    click.echo(report.to_json() if as_json else output)


def default_name(asked: Asked) -> str:
    """Return how outputs are called after what was asked for."""
    from onnxq.scheme import Scheme

    return asked.scheme.name if isinstance(asked.scheme, Scheme) else asked.scheme.scheme


def check_files(model: Path, output: Path, others: dict[str, Path | str | None]) -> None:
    """Refuse files of one name before anything runs.

    Raises:
        UsageError: two options name one file.
        OutputError: a file cannot be written.
    """
    from onnxq.modelfile.publish import check_output, data_file

    written = {output.resolve(): "the output", data_file(output).resolve(): "the data of the output"}
    for name, path in others.items():
        if path is None:
            continue
        check_output(Path(path), model)
        other = written.setdefault(Path(path).resolve(), name)
        if other.startswith("-") and other != name:
            raise click.UsageError(f"{other} and {name} are both {path}; give one of them another name")
        if other != name:
            raise click.UsageError(f"{name} {path} is {other} itself; give another name")


def quantized(
    model: Path, output: Path | None, data: Data, asked: Asked, goal: Goal, budget: Budget, *, quiet: bool
) -> Quantized:
    """Run quantize() with bars that tell of its progress."""
    from onnxq import pipeline, progress
    from onnxq.cli.progress_bars import progress_bars

    with progress_bars(budget.seconds) as told:
        return pipeline.quantize(
            model,
            data,
            output,
            scheme=asked.scheme,
            target=asked.target,
            prepare=asked.prepare,
            goal=goal,
            budget=replace(budget, progress=progress.silent if quiet else told),
        )


def keep(report: Report, kept: Kept, plan_out: Path | None) -> None:
    """Write what was asked to be kept of a quantization, most of all of one that was refused."""
    from onnxq.planning.plan_file import save_plan

    kept.write(report)
    if plan_out is not None:
        save_plan(report.plan, plan_out)


def show(found: Report, *, quiet: bool, verbose: bool) -> None:
    """Print the closing table, unless nobody wants it."""
    from onnxq.cli import terminal

    if not quiet:
        terminal.print_report(found, every=verbose)
