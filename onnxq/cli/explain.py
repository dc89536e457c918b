"""The command that tells everything that is known of one node. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import goal_options, measurements_option, speed_options
from onnxq.cli.groups import DATA, OUTPUT, GroupedCommand, NodeName, option
from onnxq.cli.options import EXIT_CODES, FILE, batch_option, collection_options
from onnxq.cli.quantize import quantized
from onnxq.cli.wanted import Asked, data_options, scheme_options

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.steps.budget import Budget


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
