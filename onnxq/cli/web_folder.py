"""The command that fills a folder for transformers.js. Heavy imports wait until it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from onnxq.cli.groups import ONCE
from onnxq.cli.options import BELOW_FIDELITY, EXIT_CODES, FILE

_NAMES = ("q8", "int8", "uint8", "q4", "q4f16", "fp16", "bnb4")


@click.command("web-folder", short_help="Write the dtypes of a folder for transformers.js.", epilog=EXIT_CODES)
@click.argument("folder", type=FILE)
@click.option(
    "--calib",
    type=FILE,
    required=True,
    **ONCE,
    help="Samples; of several sessions, a folder with one for each, called after it, such as encoder_model.npz.",
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(_NAMES), multiple=True, help="Write this dtype. Repeatable.  [default: all]"
)
@click.option("--target", metavar="NAME", default="onnxruntime-web", show_default=True, help="The runtime.")
@click.option(
    "--min-sqnr",
    type=float,
    metavar="DECIBELS",
    default=20.0,
    show_default=True,
    help="Decibels the worst output must have.",
)
@click.option(
    "--search",
    type=click.Choice(("off", "fast", "full")),
    default="fast",
    show_default=True,
    help="How much is tried and measured for each model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def web_folder(
    folder: Path, calib: Path, dtypes: tuple[str, ...], target: str, min_sqnr: float, search: str, as_json: bool
) -> None:
    """Write the models in FOLDER/onnx in the dtypes of transformers.js, under the names that it looks for.

    All sessions of a pipeline are calibrated together: what one makes, the next is given. A dtype whose sessions,
    running one behind the other, are too noisy is refused as a whole, and the others are written.
    """
    from onnxq.cli import tables
    from onnxq.commands.web_folder import DTYPES, write_web_folder
    from onnxq.system.records import to_plain

    chosen = dtypes or tuple(DTYPES)
    found = list(write_web_folder(folder, calib, dtypes=chosen, target=target, goal=min_sqnr, budget=search))
    if as_json:
        click.echo(json.dumps(to_plain(found), indent=2, default=str))
    else:
        tables.print_written(str(folder), found)
    if any(one.refused for one in found):
        sys.exit(BELOW_FIDELITY)
