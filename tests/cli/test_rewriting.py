"""Commands that rewrite float models compare alike."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from onnxq.cli.options import changes_option, samples_option, tolerance_option


@click.command()
@samples_option
@tolerance_option
@changes_option
def command(**given: object) -> None:
    click.echo(given)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "{'data': None, 'tolerance': 1e-05, 'report': None}"),
        (["--tolerance", "0"], "'tolerance': 0.0"),
        (["--tolerance", "-1"], "-1.0 is not in the range x>=0"),
        (["--tolerance", "nan"], "expected a finite number"),
    ],
)
def test_what_they_are_given(arguments: list[str], told: str) -> None:
    assert told in CliRunner().invoke(command, arguments).output
