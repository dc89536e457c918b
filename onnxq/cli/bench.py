"""The command that times two models. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.options import image_options

if TYPE_CHECKING:
    from onnxq.calibration.images import ImageOptions

_EPILOG = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input."


@click.command(epilog=_EPILOG)
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Samples, as --calib takes them.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an operator.  [default: all cores]")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=10.0, show_default=True, help="Time to spend, loading aside."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use at most this many samples.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@image_options
def bench(
    reference: Path,
    candidate: Path,
    data: Path,
    threads: int | None,
    seconds: float,
    limit: int | None,
    as_json: bool,
    images: ImageOptions | None,
) -> None:
    """Time two models by turns on the same samples and print how much faster CANDIDATE is, with an interval."""
    from onnxq import latency_comparison
    from onnxq.cli import terminal

    found = latency_comparison.bench(
        reference, candidate, data, threads=threads, seconds=seconds, images=images, limit=limit
    )
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        terminal.print_bench(found)
