"""The command that says how well two models agree. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.groups import FIDELITY, OUTPUT, GroupedCommand, option
from onnxq.cli.options import BELOW_FIDELITY, COMPARING_EXIT_CODES, FILE, two_models

if TYPE_CHECKING:
    from onnxq.calibration.data import Data


@click.command(cls=GroupedCommand, short_help="Say how well two models agree on samples.", epilog=COMPARING_EXIT_CODES)
@two_models
@option(
    "--layers",
    "by_layer",
    group=FIDELITY,
    is_flag=True,
    help="Also print noise along the depth: of each layer alone, and of all.",
)
@option(
    "--min-sqnr",
    group=FIDELITY,
    type=float,
    metavar="DECIBELS",
    help="Decibels the worst output must have, else the exit code is 3; for a check in CI.",
)
@option(
    "--report",
    group=FIDELITY,
    type=FILE,
    help="What quantize --report wrote of CANDIDATE: with it --layers tells modes, and compares tensors too whose "
    "channels were divided.",
)
@option("--html", group=OUTPUT, type=FILE, help="Write a page that shows the same.")
def compare(
    reference: Path,
    candidate: Path,
    data: Data,
    engine: str,
    as_json: bool,
    by_layer: bool,
    min_sqnr: float | None,
    report: Path | None,
    html: Path | None,
) -> None:
    """Run two models on the same samples and print how well each output agrees.

    REFERENCE runs on onnxruntime, CANDIDATE on the engine.

    With --layers every float tensor of a name that both have is compared, as CANDIDATE computes them: isolated, where
    what lies between such tensors is fed with those of REFERENCE, and accumulated, as CANDIDATE runs.
    """
    from onnxq.cli import tables
    from onnxq.evaluation.agreement import compare_files
    from onnxq.evaluation.goal import Goal, lack
    from onnxq.evaluation.layers import compare_layers
    from onnxq.report import load_report
    from onnxq.report.page import Comparison
    from onnxq.runtime.engines import DEFAULT_ENGINE, open_engine
    from onnxq.system.publish import check_output

    if html is not None:
        check_output(html, reference)
        check_output(html, candidate, data.given)
    if report is not None and not by_layer:
        raise click.UsageError("--report tells more of --layers; give both or none")
    if by_layer and engine != DEFAULT_ENGINE:
        raise click.UsageError("--layers looks inside CANDIDATE on onnxruntime; leave out --engine")
    plan = load_report(report).plan if report is not None else None
    with open_engine(engine) as runtime:
        # Where both run here, models that draw random numbers draw the same.
        there = None if engine == DEFAULT_ENGINE else runtime
        agreement = compare_files(reference, candidate, data, engine=there)
    found = compare_layers(reference, candidate, data, plan=plan) if by_layer else None
    if html is not None:
        Comparison(reference, candidate, agreement, found).save_html(html)
    if as_json:
        click.echo(json.dumps({**agreement.to_dict(), **(found.to_dict() if found is not None else {})}, indent=2))
    else:
        tables.print_agreement(agreement)
        if found is not None:
            tables.print_layers(found)
    if min_sqnr is not None and (told := lack(agreement, Goal(min_sqnr))):
        click.echo(f"onnxq: {told}", err=True)
        raise SystemExit(BELOW_FIDELITY)
