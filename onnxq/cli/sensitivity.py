"""The command that says what quantizing each part of a model costs. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import accuracy_option, speed_options
from onnxq.cli.groups import OUTPUT, GroupedCommand, option
from onnxq.cli.options import FILE, WRITING_EXIT_CODES, batch_option, collection_options
from onnxq.cli.wanted import NO_SAMPLES, Asked, data_options, scheme_options

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.steps.budget import Budget


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
