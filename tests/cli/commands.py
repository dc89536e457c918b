"""Running a command of onnxq in this process, and the models and samples that ship with the project."""

from __future__ import annotations

import click
from click.testing import CliRunner, Result
from conftest import MODELS

from onnxq.cli.main import cli

CALIB = MODELS / "data" / "calib.npz"
COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))}


def invoke(*arguments: object) -> Result:
    """Run a command; an error of onnxq is raised, not printed."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
