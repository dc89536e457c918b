"""The command that times two models. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import threads_option
from onnxq.cli.groups import GroupedCommand
from onnxq.cli.options import READING_EXIT_CODES, time_to_spend, two_models

if TYPE_CHECKING:
    from onnxq.calibration.data import Data


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
