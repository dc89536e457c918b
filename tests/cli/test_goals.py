from __future__ import annotations

import math
from typing import Any

import click
import pytest
from click.testing import CliRunner

from onnxq.cli.options import accuracy_option, goal_options, search_options
from onnxq.evaluation.goal import Goal
from onnxq.steps.request import Budget


def packed(*arguments: object) -> tuple[Goal, Budget]:
    """The goal and the budget that a command with these options is called with."""
    found: dict[str, Any] = {}

    @click.command()
    @goal_options
    @accuracy_option
    @search_options
    def command(goal: Any, budget: Budget) -> None:
        found.update(goal=goal(), budget=budget)

    def without_collection(**given: Any) -> None:
        command.callback(**given, collection=None)  # type: ignore[misc]

    wrapped = click.Command("command", params=command.params, callback=without_collection)
    done = CliRunner().invoke(wrapped, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found["goal"], found["budget"]


def test_nothing_given_is_what_python_takes_for_nothing_given() -> None:
    assert packed() == (Goal(), Budget())


@pytest.mark.parametrize(
    ("arguments", "goal"),
    [
        (("--min-sqnr", 30), Goal(30.0)),
        (("--force", "--exact"), Goal(force=True, exact=True)),
        (("--prefer", "size"), Goal(prefer="size")),
    ],
)
def test_goals(arguments: tuple[object, ...], goal: Goal) -> None:
    assert packed(*arguments)[0] == goal


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        (("--search", "full", "--accuracy", "gptq"), Budget(search="full", accuracy="gptq")),
        (("--latency-seconds", 0, "--time-limit", 60), Budget(latency_seconds=0.0, time_limit=60.0)),
        (("--engine", "openvino"), Budget(engine="openvino")),
        (("--threads", 2), Budget(threads=2)),
        (("--max-candidates", 9), Budget(max_candidates=9)),
    ],
)
def test_budgets(arguments: tuple[object, ...], budget: Budget) -> None:
    assert packed(*arguments)[1] == budget


def test_the_time_is_not_bounded_by_default() -> None:
    assert packed()[1].time_limit == math.inf


def test_accuracy_alone_can_be_taken_by_a_command() -> None:
    @click.command()
    @accuracy_option
    def command(accuracy: str) -> None:
        click.echo(accuracy)

    assert CliRunner().invoke(command, []).output == "fast\n"
