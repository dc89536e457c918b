"""Help in groups, and options that complete and list what they name."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete

from cli.commands import invoke
from onnxq.cli.groups import ORDER, PRESET, TRAINING
from onnxq.cli.main import cli
from onnxq.presets import PRESETS
from onnxq.targets import TARGETS


@pytest.mark.parametrize("command", ["quantize", "plan", "train"])
def test_the_help_has_its_sections_in_order(command: str) -> None:
    lines = invoke(command, "--help").stdout.splitlines()
    titles = [line.removesuffix(":") for line in lines if line.removesuffix(":") in ORDER]
    assert titles == [title for title in ORDER if title != TRAINING or command != "plan"]


@pytest.mark.parametrize("command", ["quantize", "plan", "train"])
def test_every_option_but_the_help_stands_in_a_group(command: str) -> None:
    found = [one for one in cli.commands[command].params if isinstance(one, click.Option)]  # type: ignore[attr-defined]
    assert {getattr(one, "group", "") for one in found} <= set(ORDER) - {"Other"}


@pytest.mark.parametrize(
    ("option", "names"),
    [("--preset", PRESETS), ("--target", TARGETS), ("--range", ["mse", "auto"]), ("--accuracy", ["bias", "fast"])],
)
def test_options_that_name_things_list_them(option: str, names: list[str]) -> None:
    listed = [line.partition("\t")[0] for line in invoke("quantize", option, "list").stdout.splitlines()]
    assert set(names) <= set(listed)


def test_the_shell_completes_names() -> None:
    completed = ShellComplete(cli, {}, "onnxq", "_ONNXQ").get_completions(["quantize", "--preset"], "int8-b")
    assert [one.value for one in completed] == ["int8-block32"]


def test_a_name_is_looked_up_where_it_is_used() -> None:
    assert PRESET.convert("int9", None, None) == "int9"
