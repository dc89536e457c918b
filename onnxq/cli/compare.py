"""The command that says how well two models agree. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import threads_option
from onnxq.cli.groups import DATA, ENGINE, FIDELITY, OUTPUT, SPEED, GroupedCommand, option
from onnxq.cli.options import (
    BELOW_FIDELITY,
    COMPARING_EXIT_CODES,
    FILE,
    READING_EXIT_CODES,
    image_options,
    json_option,
    limit_option,
    time_to_spend,
    two_models,
)

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
if TYPE_CHECKING:
    from onnxq.calibration.data import Data
if TYPE_CHECKING:
    from onnxq.data.images import ImageOptions


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


# The command that times two models. Heavy imports wait until it runs.


@click.command(
    cls=GroupedCommand, short_help="Say which of two models is faster, and how certainly.", epilog=READING_EXIT_CODES
)
@two_models
@threads_option
@time_to_spend("Time to spend, loading aside.", 10.0)
def bench(
    reference: Path,
    candidate: Path,
    data: Data,
    threads: int | None,
    seconds: float,
    engine: str,
    as_json: bool,
) -> None:
    """Time two models by turns on the same samples and print how much faster CANDIDATE is, with an interval."""
    from onnxq.cli import tables
    from onnxq.evaluation import latency
    from onnxq.runtime.engines import open_engine

    with open_engine(engine) as runtime:
        found = latency.bench(reference, candidate, data, threads=threads, seconds=seconds, engine=runtime)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        tables.print_bench(found)


# The command that says which runtimes run a model. Heavy imports wait until it runs.


@click.command(
    cls=GroupedCommand, short_help="Say which runtimes run a model, and compute the same.", epilog=READING_EXIT_CODES
)
@click.argument("model", type=FILE)
@option("--data", group=DATA, type=FILE, help="Samples, as --calib takes them.  [default: made up]")
@option("--float", "reference", group=DATA, type=FILE, help="The float model, for fidelity and speed on each engine.")
@option(
    "--engine",
    "engines",
    group=SPEED,
    type=ENGINE,
    multiple=True,
    metavar="NAME[:PLACE]",
    help="Such as openvino, onnxruntime-web:FOLDER, python:PATH or ssh:HOST. Repeatable.  [default: all installed]",
)
@time_to_spend("Time to spend on the speed on each engine; 0 leaves it out.")
@limit_option
@json_option
@image_options
def portability(
    model: Path,
    data: Path | None,
    reference: Path | None,
    engines: tuple[str, ...],
    seconds: float,
    limit: int | None,
    as_json: bool,
    images: ImageOptions | None,
) -> None:
    """Run MODEL on every engine and print whether it loads, agrees with onnxruntime here, and how fast it is there.

    Where it does not agree, the first node is named whose output differs.
    """
    from onnxq.cli import tables
    from onnxq.evaluation.portability import portability as ported
    from onnxq.runtime.engines import installed_engines, open_engine

    chosen = map(open_engine, engines) if engines else installed_engines()
    found = ported(model, chosen, data, reference=reference, seconds=seconds, images=images, limit=limit)
    if as_json:
        click.echo(json.dumps([one.to_dict() for one in found], indent=2))
    else:
        tables.print_portability(str(model), found)


# The command that sets two plans or reports beside each other. Heavy imports wait until it runs.


@click.command(short_help="Say where two plans or reports differ.", epilog=READING_EXIT_CODES)
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@json_option
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Say which nodes two plans (TOML) or reports (JSON) treat otherwise, one a line.

    Each line has the node, what FIRST and SECOND make of it, and the reason of SECOND; figures of reports come first.
    """
    from onnxq.planning.plan_file import differences, read_said
    from onnxq.report.formatting import visible

    found = differences(read_said(first), read_said(second))
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    if not found:
        click.echo(f"{first} and {second} treat all nodes alike")
    for one in found:
        fields = (one.name, one.before or "-", one.after or "-", one.reason)
        click.echo("\t".join(visible(field) for field in fields))
