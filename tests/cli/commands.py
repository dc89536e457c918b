"""Running a command of onnxq in this process, and the models and samples that ship with the project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.testing import CliRunner, Result
from conftest import MODELS

from onnxq.cli.help import with_options
from onnxq.cli.main import cli

CALIB = MODELS / "data" / "calib.npz"
GRU, RESNET = MODELS / "gru.onnx", MODELS / "resnet.onnx"
COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))}
QUICK = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0)
"""Options of a quantization that takes little time."""
AS_IT_IS = (*QUICK, "--search", "off", "--accuracy", "off")
"""Options of a quantization that takes least time."""


def invoke(*arguments: object) -> Result:
    """Run a command; an error of onnxq is raised, not printed."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


def exit_code_of(*arguments: object) -> Result:
    """Run a command that may end with an exit code of its own."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def words_of(text: str) -> str:
    """The words of a text that was printed, without the lines of tables."""
    return " ".join(text.replace("│", " ").split())


def refusal_of(*arguments: object) -> str:
    """The words of stderr of a command that is refused for its options, and prints nothing else."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return words_of(result.stderr)


def command_with(*options: Callable[..., Any]) -> tuple[click.Command, Callable[..., dict[str, Any]]]:
    """A command with some options, and a function that takes arguments and returns what the command receives."""
    received: dict[str, Any] = {}
    command = click.command()(with_options(lambda **values: received.update(values), *options))

    def values(*arguments: object) -> dict[str, Any]:
        received.clear()
        done = CliRunner().invoke(command, [str(argument) for argument in arguments])
        if done.exit_code:
            raise click.UsageError(words_of(done.output))
        return dict(received)

    return command, values
