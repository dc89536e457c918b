"""The command that shows what is in a model. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import accuracy_option, goal_options, measurements_option, speed_options
from onnxq.cli.groups import DATA, OUTPUT, GroupedCommand, NodeName, option
from onnxq.cli.options import (
    EXIT_CODES,
    FILE,
    READING_EXIT_CODES,
    WRITING_EXIT_CODES,
    batch_option,
    collection_options,
    json_option,
)
from onnxq.cli.quantize import quantized
from onnxq.cli.wanted import NO_SAMPLES, Asked, data_options, scheme_options

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.steps.request import Budget


@click.command(short_help="Show what is in a model and how it is quantized.", epilog=READING_EXIT_CODES)
@click.argument("model", type=FILE)
@json_option
def inspect(model: Path, as_json: bool) -> None:
    """Show what is in MODEL: operators, types, sizes, and what is quantized and how."""
    from onnxq.cli import terminal
    from onnxq.commands.inspection import inspect_model

    found = inspect_model(model)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        terminal.print_inspection(found)


# The command that tells everything that is known of one node. Heavy imports wait until it runs.


@click.command(cls=GroupedCommand, short_help="Tell what became of one node, and why.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@click.argument("node", type=NodeName())
@option("--report", group=DATA, type=FILE, help="What quantize --report wrote of MODEL, which is quantized.")
@collection_options
@data_options
@batch_option
@scheme_options
@goal_options
@speed_options
@measurements_option
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print JSON.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show no progress.")
def explain(
    model: Path,
    node: str,
    report: Path | None,
    data: Data | None,
    asked: Asked,
    goal: Callable[[], Goal],
    budget: Budget,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tell what became of NODE of MODEL: its mode and why, formats, ranges, figures, neighbours, and kernels.

    Of a quantized MODEL, from its --report. Of a float one, what quantize would do with these options, which takes as
    long as quantize; without --calib only what it would try first.
    """
    from onnxq import pipeline
    from onnxq.cli import tables
    from onnxq.ir import load
    from onnxq.planning.plan import METADATA_KEY
    from onnxq.report import explanation, load_report
    from onnxq.system.publish import staging

    if report is not None and data is not None:
        raise click.UsageError("--report is of a quantized model and --calib for a float one; leave one of them out")
    if report is None and METADATA_KEY in load(model).metadata:
        raise click.UsageError(f"{model} is quantized; give --report with what quantize --report wrote of it")
    if report is not None:
        found = explanation.explain(model, load_report(report), node)
    else:
        found = pipeline.explain(model, node, scheme=asked.rules, target=asked.target, prepare=asked.prepare)
    if data is not None:
        # The answer is wanted however noisy the model is.
        wanted = replace(goal(), force=True)
        with staging(None) as folder:
            path = folder / "quantized.onnx"
            done = quantized(model, path, data, asked, wanted, budget, quiet=quiet)
            found = explanation.explain(path, done.report, found.node)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        tables.print_explanation(found)


# The command that says what quantizing each part of a model costs. Heavy imports wait until it runs.


@click.command(
    cls=GroupedCommand, short_help="Say what quantizing each tensor and node costs.", epilog=WRITING_EXIT_CODES
)
@click.argument("model", type=FILE)
@collection_options
@data_options
@batch_option
@scheme_options
@accuracy_option
@speed_options
@option(
    "--sort",
    "order",
    group=OUTPUT,
    type=click.Choice(["graph", "noise", "time", "name"]),
    default="graph",
    show_default=True,
    help="As they are computed, or the noisiest, the slowest or the alphabet first.",
)
@option("--top", group=OUTPUT, type=click.IntRange(min=1), metavar="COUNT", help="Show this many tensors and nodes.")
@option("-o", "--output", group=OUTPUT, type=FILE, help="Write the JSON to this file too.")
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print JSON.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show no progress.")
def sensitivity(
    model: Path,
    data: Data | None,
    asked: Asked,
    budget: Budget,
    order: str,
    top: int | None,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what quantizing each tensor and weight of MODEL alone adds in noise, and what each node takes in each way.

    Noise is the SQNR of the worst output with all else in float. Times are of this machine.
    """
    from onnxq import pipeline
    from onnxq.cli import tables
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.system.publish import check_output, write_text

    if data is None:
        raise click.UsageError(NO_SAMPLES)
    if output is not None:
        check_output(output, model, data.given)
    with progress_bars(quiet=quiet) as told:
        budget = replace(budget, progress=told)
        found = pipeline.sensitivity(
            model, data, scheme=asked.rules, target=asked.target, prepare=asked.prepare, budget=budget
        )
    found = found.ordered(order, top)
    text = json.dumps(found.to_dict(), indent=2)
    if output is not None:
        write_text(output, f"{text}\n", "output")
    if as_json:
        click.echo(text)
    else:
        tables.print_sensitivity(found)


# The command that shows a saved report. Heavy imports wait until it runs.


@click.command(short_help="Show a saved report as a page, figures or colours.", epilog=READING_EXIT_CODES)
@click.argument("saved", metavar="REPORT", type=FILE)
@click.option(
    "-o", "--output", type=FILE, help="Page to write.  [default: REPORT with .html, unless other files are asked for]"
)
@click.option("--svg", "folder", type=FILE, help="Write the charts as SVG to this folder.")
@click.option(
    "--overlay", type=FILE, help="Write mode, time and SQNR of nodes for Model Explorer, as FILE with .mode and so on."
)
def report(saved: Path, output: Path | None, folder: Path | None, overlay: Path | None) -> None:
    """Show what quantize or plan kept with --report, as one page that needs no network.

    Prints the names of the written files on stdout.
    """
    from onnxq.report import load_report
    from onnxq.report.exports import save_figures, save_overlays
    from onnxq.report.page import save_html

    found = load_report(saved)
    if output is None and folder is None and overlay is None:
        output = saved.with_suffix(".html")
    if output is not None:
        if output.resolve() == saved.resolve():
            raise click.UsageError(f"--output {output} is the report itself; give another name")
        save_html(found, output)
        click.echo(output)
    written = save_figures(found, folder) if folder is not None else ()
    for file in (*written, *(save_overlays(found, overlay) if overlay is not None else ())):
        click.echo(file)
