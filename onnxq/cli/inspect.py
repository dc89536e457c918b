"""The commands that look inside a model: inspect, sensitivity, report. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import DATA, OUTPUT, GroupedCommand, Option
from onnxq.cli.options import (
    NO_SAMPLES,
    READING_EXIT_CODES,
    WRITING_EXIT_CODES,
    Request,
    accuracy_option,
    budget_options,
    data_options,
    json_option,
    scheme_options,
)
from onnxq.cli.output import print_json, print_start
from onnxq.cli.types import FILE, MODEL, NodeName

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.pipeline.request import Budget


@click.command(
    cls=GroupedCommand, short_help="Show operators, types, sizes and weights of a model.", epilog=READING_EXIT_CODES
)
@click.argument("model", type=FILE)
@click.argument("node", type=NodeName(), required=False)
@Option(DATA, "--report PATH", "Read MODEL's report of quantize, to explain NODE.")
@Option(OUTPUT, "--beside PATH", "Show the operators and size of MODEL and of this model.")
@json_option
def inspect(model: Path, node: str | None, report: Path | None, beside: Path | None, as_json: bool) -> None:
    """Show operators, types and sizes of MODEL, a file or a folder of models, and how it is quantized.

    With --beside, show the number of nodes of each operator in MODEL and in another model, such as the quantized one.

    With NODE of a quantized MODEL and its --report, explain that node: its mode and why, types, ranges, figures,
    neighbours, and kernels.
    """
    from onnxq.cli import tables, terminal
    from onnxq.pipeline.folders import models_of
    from onnxq.pipeline.inspection import inspect_model
    from onnxq.report import explanation, load_report

    if (node is None) != (report is None):
        raise click.UsageError(
            "NODE of a quantized MODEL and --report of quantize go together; give both or none, "
            "or see what quantize --dry-run plans for a float MODEL"
        )
    if beside is not None and node is not None:
        raise click.UsageError("--beside compares models, and NODE names a node of one; leave out one of them")
    if node is not None and report is not None:
        explained = explanation.explain(model, load_report(report), node)
        if as_json:
            click.echo(json.dumps(explained.to_dict(), indent=2))
        else:
            tables.print_explanation(explained)
        return
    if beside is not None:
        pair = [inspect_model(_only_model(place)) for place in (model, beside)]
        if as_json:
            click.echo(json.dumps([inspection.to_dict() for inspection in pair], indent=2))
        else:
            terminal.print_beside(*pair)
        return
    inspections = {name: inspect_model(file) for name, file in models_of(model).items()}
    if as_json:
        print_json({name: inspection.to_dict() for name, inspection in inspections.items()})
        return
    for inspection in inspections.values():
        terminal.print_inspection(inspection)


def _only_model(place: Path) -> Path:
    from onnxq.pipeline.folders import models_of

    files = list(models_of(place).values())
    if len(files) > 1:
        raise click.UsageError(f"--beside compares two models, and {place} holds {len(files)}; name one of them")
    return files[0]


# sensitivity


@click.command(
    cls=GroupedCommand, short_help="Measure the error and time of each tensor and node.", epilog=WRITING_EXIT_CODES
)
@click.argument("model", type=MODEL)
@data_options
@scheme_options
@accuracy_option
@budget_options
@Option(
    OUTPUT,
    "--sort order [graph|error|time|name]",
    "Sort by order in the graph, highest error, longest time or name.",
    default="graph",
)
@Option(OUTPUT, "--top COUNT", "Show this many tensors and nodes.")
@Option(OUTPUT, "-o --output PATH", "Write the JSON to this file too.")
@json_option
@Option(OUTPUT, "-q --quiet", "Show no progress.")
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

    The error is the SQNR of the worst output with everything else in float. Times are measured on this machine.
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
        costs = quantization.sensitivity(
            model, data, scheme=request.rules, target=request.target, prepare=request.prepare, budget=budget
        )
    costs = costs.ordered(order, top)
    text = json.dumps(costs.to_dict(), indent=2)
    if output is not None:
        write_text(output, f"{text}\n", "output")
    if as_json:
        click.echo(text)
    else:
        tables.print_sensitivity(costs)


# report


@click.command(short_help="Show a saved report as a page.", epilog=READING_EXIT_CODES)
@click.argument("saved", metavar="REPORT", type=FILE)
@click.option("-o", "--output", type=FILE, help="Write this page.  [default: REPORT with .html]")
def report(saved: Path, output: Path | None) -> None:
    """Write a saved report of quantize as a page that needs no network.

    Prints the name of the page on stdout.
    """
    from onnxq.report import load_report
    from onnxq.report.page import save_html

    page = output or saved.with_suffix(".html")
    if page.resolve() == saved.resolve():
        raise click.UsageError(f"--output {page} is the report itself; give another name")
    save_html(load_report(saved), page)
    click.echo(page)
