"""The command that says how well two models agree. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.options import READING_EXIT_CODES, image_options, two_models

if TYPE_CHECKING:
    from onnxq.samples.images import ImageOptions


@click.command(short_help="Say how well two models agree on samples.", epilog=READING_EXIT_CODES)
@two_models
@image_options
def compare(
    reference: Path,
    candidate: Path,
    data: Path,
    limit: int | None,
    engine: str,
    as_json: bool,
    images: ImageOptions | None,
) -> None:
    """Run two models on the same samples and print how well each output agrees.

    REFERENCE runs on onnxruntime, CANDIDATE on the engine.
    """
    from onnxq.cli import tables
    from onnxq.engines.table import DEFAULT_ENGINE, open_engine
    from onnxq.judging.agreement import compare_files

    with open_engine(engine) as runtime:
        # Where both run here, models that draw random numbers draw the same.
        there = None if engine == DEFAULT_ENGINE else runtime
        agreement = compare_files(reference, candidate, data, images=images, limit=limit, engine=there)
    if as_json:
        click.echo(json.dumps(agreement.to_dict(), indent=2))
    else:
        tables.print_agreement(agreement)
