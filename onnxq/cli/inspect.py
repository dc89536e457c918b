"""The commands that look inside a model: inspect, explain, sensitivity, report. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import DATA, OUTPUT, GroupedCommand, NodeName, option
from onnxq.cli.options import (
    EXIT_CODES,
    FILE,
    NO_SAMPLES,
    READING_EXIT_CODES,
    WRITING_EXIT_CODES,
    Request,
    accuracy_option,
    budget_options,
    collection_options,
    data_options,
    goal_options,
    json_option,
    scheme_options,
)
from onnxq.cli.output import print_json, print_start
from onnxq.cli.quantize import run_quantize

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline.request import Budget


@click.command(short_help="Show operators, types, sizes and quantized weights of a model.", epilog=READING_EXIT_CODES)
@click.argument("model", type=FILE)
@json_option
def inspect(model: Path, as_json: bool) -> None:
    """Show operators, types and sizes of MODEL, a file or a folder of models, and how it is quantized."""
    from onnxq.cli import terminal
    from onnxq.pipeline.folders import models_of
    from onnxq.pipeline.inspection import inspect_model

    found = {name: inspect_model(file) for name, file in models_of(model).items()}
    if as_json:
        print_json({name: one.to_dict() for name, one in found.items()})
        return
    for one in found.values():
        terminal.print_inspection(one)


# explain


@click.command(cls=GroupedCommand, short_help="Explain how one node is quantized, and why.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@click.argument("node", type=NodeName())
@option("--report", group=DATA, type=FILE, help="Read the report of quantize for a quantized MODEL.")
@collection_options
@data_options
@scheme_options
@goal_options
@accuracy_option
@budget_options
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print JSON.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show no progress.")
def explain(
    model: Path,
    node: str,
    report: Path | None,
    data: Data | None,
    request: Request,
    goal: Callable[[], Goal],
    budget: Budget,
    as_json: bool,
    quiet: bool,
) -> None:
    """Explain NODE of MODEL: its mode and why, types, ranges, figures, neighbours, and kernels.

    For a quantized MODEL, give its --report. For a float MODEL, this shows what quantize would do with these options.
    It takes as long as quantize. Without --calib it shows the first plan only.
    """
    from onnxq.cli import tables
    from onnxq.ir import load
    from onnxq.pipeline import quantization
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
        found = quantization.explain(model, node, scheme=request.rules, target=request.target, prepare=request.prepare)
    if data is not None:
        # A model that misses the goal is explained too.
        wanted = replace(goal(), force=True)
        with staging(None) as folder:
            path = folder / "quantized.onnx"
            done = run_quantize(model, path, data, request, wanted, budget, quiet=quiet)
            found = explanation.explain(path, done.report, found.node)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        tables.print_explanation(found)


# sensitivity


@click.command(
    cls=GroupedCommand, short_help="Measure the error and time of each tensor and node.", epilog=WRITING_EXIT_CODES
)
@click.argument("model", type=FILE)
@collection_options
@data_options
@scheme_options
@accuracy_option
@budget_options
@option(
    "--sort",
    "order",
    group=OUTPUT,
    type=click.Choice(["graph", "error", "time", "name"]),
    default="graph",
    show_default=True,
    help="Sort by order in the graph, highest error, longest time or name.",
)
@option("--top", group=OUTPUT, type=click.IntRange(min=1), metavar="COUNT", help="Show this many tensors and nodes.")
@option("-o", "--output", group=OUTPUT, type=FILE, help="Write the JSON to this file too.")
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print JSON.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show no progress.")
def sensitivity(
    model: Path,
    data: Data | None,
    request: Request,
    budget: Budget,
    order: str,
    top: int | None,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure the error of quantizing each tensor and weight of MODEL alone, and the time of each node in each mode.

    The error is the SQNR of the worst output with all else in float. Times are of this machine.
    """
    print_start(model, quiet=quiet)
    from onnxq.cli import tables
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline import quantization
    from onnxq.system.publish import check_output, write_text

    if data is None:
        raise click.UsageError(NO_SAMPLES)
    if output is not None:
        check_output(output, model, data.given)
    with progress_bars(quiet=quiet) as progress:
        budget = replace(budget, progress=progress)
        found = quantization.sensitivity(
            model, data, scheme=request.rules, target=request.target, prepare=request.prepare, budget=budget
        )
    found = found.ordered(order, top)
    text = json.dumps(found.to_dict(), indent=2)
    if output is not None:
        write_text(output, f"{text}\n", "output")
    if as_json:
        click.echo(text)
    else:
        tables.print_sensitivity(found)


# report


@click.command(short_help="Show a saved report as a page, figures or colours.", epilog=READING_EXIT_CODES)
@click.argument("saved", metavar="REPORT", type=FILE)
@click.option(
    "-o", "--output", type=FILE, help="Write this page.  [default: REPORT with .html, if no other file is given]"
)
@click.option("--svg", "folder", type=FILE, help="Write the charts as SVG to this folder.")
@click.option(
    "--overlay", type=FILE, help="Write mode, time and SQNR of nodes for Model Explorer, as FILE with .mode and so on."
)
def report(saved: Path, output: Path | None, folder: Path | None, overlay: Path | None) -> None:
    """Show a report of quantize or plan as one page that needs no network.

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
