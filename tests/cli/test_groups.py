"""Help in groups, and options that complete and list what they name."""

from __future__ import annotations

import re
from collections import Counter

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from cli.commands import COMMANDS, invoke
from onnxq.calibration.methods import CALIBRATION_METHODS
from onnxq.cli.help import ORDER, OTHER, PRESET, RENAMED, GroupedCommand, GroupedOption
from onnxq.cli.main import cli
from onnxq.config.presets import PRESETS
from onnxq.runtime.targets import TARGETS

GROUPED = [name for name, command in COMMANDS.items() if isinstance(command, GroupedCommand)]


def options_of(command: str) -> list[click.Option]:
    return [one for one in COMMANDS[command].params if isinstance(one, click.Option)]


@pytest.mark.parametrize("command", GROUPED)
def test_the_help_has_its_sections_in_order(command: str) -> None:
    advanced = any(isinstance(one, GroupedOption) and one.is_advanced for one in options_of(command))
    lines = invoke(command, "--help-all" if advanced else "--help").stdout.splitlines()
    titles = [line.removesuffix(":") for line in lines if line.removesuffix(":") in ORDER]
    used = {getattr(one, "group", OTHER) for one in options_of(command)}
    assert titles == [title for title in ORDER if title in used | {OTHER}]
    assert "MODEL" not in [line.strip() for line in lines]


@pytest.mark.parametrize("command", GROUPED)
def test_every_option_but_the_help_stands_in_a_group(command: str) -> None:
    grouped = [one for one in options_of(command) if one.name != "help_all"]
    assert {getattr(one, "group", "") for one in grouped} <= set(ORDER) - {OTHER}


def test_the_first_option_is_what_gives_samples_and_a_preset_of_images_comes_before_what_changes_it() -> None:
    lines = [line.split()[0] for line in invoke("quantize", "--help").stdout.splitlines() if line.startswith("  --")]
    assert lines[0] == "--calib"
    assert next(line for line in lines if line.startswith("--image")) == "--image-preset"


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--preset", PRESETS),
        ("--target", TARGETS),
        ("--range", ["mse", "auto"]),
        ("--accuracy", ["gptq", "fast"]),
    ],
)
def test_options_that_name_things_list_them(option: str, names: list[str]) -> None:
    listed = [line.partition("\t")[0] for line in invoke("quantize", option, "list").stdout.splitlines()]
    assert set(names) <= set(listed)


@pytest.mark.parametrize(
    ("words", "begun", "names"),
    [
        (["quantize", "--preset"], "int8-b", ["int8-block32"]),
        (["calibrate", "--target"], "tens", ["tensorrt"]),
        (["calibrate", "--range"], "perc", ["percentile"]),
        (["quantize", "--accuracy"], "gp", ["gptq"]),
        (["run", "-p"], "FuseBatch", ["FuseBatchNorm"]),
        (["quantize", "--pass"], "FuseBatch", ["FuseBatchNorm"]),
        ([], "port", ["portability"]),
    ],
)
def test_the_shell_completes_names(words: list[str], begun: str, names: list[str]) -> None:
    completed = ShellComplete(cli, {}, "onnxq", "_ONNXQ").get_completions(words, begun)
    assert [one.value for one in completed] == names


def test_a_name_is_looked_up_where_it_is_used() -> None:
    assert PRESET.convert("int9", None, None) == "int9"


def test_the_help_of_ranges_names_them_all() -> None:
    told = next(option.help or "" for option in options_of("quantize") if "--range" in option.opts)
    assert {*re.findall("[a-z]+", told.partition("[default:")[0])} >= {*CALIBRATION_METHODS}


def test_the_help_of_quantize_shows_thirty_options_and_the_rest_when_asked() -> None:
    shown, every = (
        [line for line in invoke("quantize", one).stdout.splitlines() if re.match("  -", line)]
        for one in ("--help", "--help-all")
    )
    assert len(shown) <= 30
    assert len(every) == len(options_of("quantize")) + 1


@pytest.mark.parametrize("command", GROUPED)
def test_a_group_has_at_most_eight_options(command: str) -> None:
    assert max(Counter(getattr(one, "group", OTHER) for one in options_of(command)).values()) <= 8


@pytest.mark.parametrize(
    ("command", "old"),
    [*(("quantize", old) for old in RENAMED), *((name, "--seconds") for name in ("bench", "optimize", "portability"))],
)
def test_an_option_of_earlier_versions_is_refused_with_its_new_name(command: str, old: str) -> None:
    result = CliRunner().invoke(cli, [command, "m.onnx", old, "3"])
    assert result.exit_code == 2
    assert f"{old} is called {RENAMED[old]} now; write {RENAMED[old]}" in result.stderr
