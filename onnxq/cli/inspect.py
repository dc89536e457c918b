"""The command that shows what is in a model. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from onnxq.cli.options import FILE, READING_EXIT_CODES, json_option


@click.command(short_help="Show what is in a model and how it is quantized.", epilog=READING_EXIT_CODES)
@click.argument("model", type=FILE)
@json_option
def inspect(model: Path, as_json: bool) -> None:
    """Show what is in MODEL: operators, types, sizes, and what is quantized and how."""
    from onnxq.cli import terminal
    from onnxq.commands.inspection import inspect_model

    found = inspect_model(model)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        terminal.print_inspection(found)
