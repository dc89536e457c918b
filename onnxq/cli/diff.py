"""The command that sets two plans or reports beside each other. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from onnxq.cli.options import FILE, READING_EXIT_CODES, json_option


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
