"""The command that lists presets."""

from __future__ import annotations

import click

from onnxq.cli.options import READING_EXIT_CODES


@click.command(epilog=READING_EXIT_CODES)
def presets() -> None:
    """List the presets of quantize, one a line."""
    from onnxq.config.presets import DESCRIPTIONS

    for name, description in DESCRIPTIONS.items():
        click.echo(f"{name}\t{description}")
