"""The command that says which runtimes run a model. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.groups import DATA, ENGINE, SPEED, GroupedCommand, option
from onnxq.cli.options import (
    FILE,
    READING_EXIT_CODES,
    image_options,
    json_option,
    limit_option,
    time_to_spend,
)

if TYPE_CHECKING:
    from onnxq.data.images import ImageOptions


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
