"""Options become the values that quantize() takes, in groups that complete and list names."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from conftest import MODELS

from cli.commands import COMMANDS
from cli.commands import invoke as invoke_of_groups
from onnxq.calibration.methods import CALIBRATION_METHODS
from onnxq.cli.help import ORDER, OTHER, PRESET, REMOVED, GroupedCommand, GroupedOption
from onnxq.cli.main import cli
from onnxq.cli.options import (
    accuracy_option,
    budget_options,
    chain_option,
    chosen_scheme,
    cluster_option,
    data_options,
    goal_options,
    image_options,
    scheme_options,
    two_models,
)
from onnxq.config.presets import PRESETS
from onnxq.data.images import IMAGE_PRESETS, ImageOptions
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.runtime.targets import TARGETS

TAKEN: list[dict[str, Any]] = []


@click.command()
@cluster_option
@image_options
@chain_option
def command(**given: Any) -> None:
    TAKEN.append(given)


def invoke(*arguments: str) -> Result:
    TAKEN.clear()
    return CliRunner().invoke(command, arguments)


def test_nothing_is_taken_when_nothing_is_given() -> None:
    assert invoke().exit_code == 0
    assert [{"images": ImageOptions(), "cluster": None, "chain": ()}] == TAKEN


def test_images_have_the_defaults_that_help_shows() -> None:
    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    plain = ImageOptions()
    assert (plain.mean, plain.std, plain.scale) == ((0.0,), (1.0,), 1 / 255)
    for default in ("0", "1", "1/255", plain.channels, plain.fit):
        assert f"[default: {default}]" in shown


def test_every_image_option_of_the_command_line_is_a_field() -> None:
    options = {name for option in command.params if (name := option.name or "").startswith("image_")}
    assert options - {"image_preset"} == {f"image_{field.name}" for field in dataclasses.fields(ImageOptions)}


def test_image_options_become_one_value() -> None:
    invoke("--image-size", "32X48", "--image-mean", "0.5,0.25,0", "--image-fit", "crop")
    assert TAKEN[0]["images"] == ImageOptions(size=(32, 48), mean=(0.5, 0.25, 0), fit="crop")
    invoke("--image-fit", "crop", "--image-resize", "256", "--image-layout", "NHWC", "--image-scale", "1/128")
    assert TAKEN[0]["images"] == ImageOptions(fit="crop", resize=256, layout="NHWC", scale=1 / 128)


def test_chains_are_taken_as_they_are_said() -> None:
    invoke("--chain", "hN=h", "--chain", "cN=c", "--cluster", "tcp://a:1")
    assert (TAKEN[0]["chain"], TAKEN[0]["cluster"]) == (("hN=h", "cN=c"), "tcp://a:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", "32"], "expected HEIGHTxWIDTH such as 224x224, found '32'"),
        (["--image-scale", "1/0"], "expected a number such as 1/255 or 0.5, found '1/0'"),
        (["--image-mean", "a,b"], "expected numbers separated by commas, found 'a,b'"),
    ],
)
def test_a_wrong_value_is_told_why(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_preset_of_images_is_one_that_there_is_and_other_options_go_before() -> None:
    (option,) = (option for option in command.params if option.name == "image_preset")
    assert list(option.type.choices) == list(IMAGE_PRESETS)  # type: ignore[attr-defined]
    invoke("--image-preset", "imagenet", "--image-resize", "384")
    assert TAKEN[0]["images"] == dataclasses.replace(IMAGE_PRESETS["imagenet"], resize=384)


def test_two_models_take_samples_as_quantize_does() -> None:
    found: dict[str, Any] = {}

    @click.command()
    @two_models
    def both(**given: Any) -> None:
        found.update(given)

    options = ("--limit", "3", "--chain", "new=old", "--source", "audio:rate=8000", "--image-preset", "imagenet")
    done = CliRunner().invoke(both, ["a.onnx", "b.onnx", "--data", "d", *options])
    assert done.exit_code == 0, done.output
    data = found["data"]
    assert (str(data.calibration), data.limit, data.chained, data.source) == ("d", 3, {"new": "old"}, options[5])
    assert data.images == IMAGE_PRESETS["imagenet"]


def packed(*arguments: object) -> dict[str, Any]:
    """What a command with all of these options is called with."""
    found: dict[str, Any] = {}

    @click.command()
    @data_options
    @scheme_options
    @goal_options
    @accuracy_option
    @budget_options
    def command(**given: Any) -> None:
        found.update(given)

    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if done.exit_code:
        raise click.UsageError(done.output)
    return found


def test_what_is_left_out_has_its_usual_value() -> None:
    found = packed()
    assert found["data"] is None
    assert found["goal"]() == Goal()
    assert (found["request"].rules.name, found["request"].target, found["request"].prepare) == (
        "int8",
        "onnxruntime-cpu",
        (),
    )
    assert (found["budget"].search, found["budget"].accuracy, found["budget"].latency_seconds) == ("fast", "fast", 2.0)


def test_what_is_given_is_in_the_values() -> None:
    found = packed(
        *("--calib", "c", "--validation", "v", "--limit", 3, "--chain", "stateN=state", "--image-size", "8x8"),
        *("--source", "audio:rate=8000"),
        *("--preset", "int4-block32", "--range", "mse", "--emit", "ort", "--strip-metadata", "-p", "NameNodes"),
        *(
            "--min-sqnr",
            12,
            "--force",
            "--exact",
            "--search",
            "off",
            "--latency-seconds",
            0,
            "--no-cache",
        ),
    )
    data, scheme, budget = found["data"], found["request"].rules, found["budget"]
    assert (data.calibration, data.validation, data.limit) == (Path("c"), Path("v"), 3)
    assert (data.chained, data.images.size, data.source) == ({"stateN": "state"}, (8, 8), "audio:rate=8000")
    assert (scheme.name, scheme.ranges, scheme.emit) == ("int4-block32", "mse", "ort")
    assert found["request"].prepare == ("NameNodes", "StripMetadata")
    assert found["goal"]() == Goal(12, force=True, exact=True)
    assert (budget.search, budget.latency_seconds, budget.cache) == ("off", 0.0, False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--max-drop", 1), "--max-drop is about a --metric"),
        (("--metric", "top1:l.npy", "--min-sqnr", 9), "--metric replaces --min-sqnr"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(click.UsageError, match=sentence):
        packed(*arguments)


def test_a_scheme_is_a_preset_or_a_file() -> None:
    assert chosen_scheme(None, None).name == "int8"
    with pytest.raises(SchemeError, match="did you mean 'int8'"):
        chosen_scheme("int9", None)


GROUPED = [name for name, command in COMMANDS.items() if isinstance(command, GroupedCommand)]


def options_of(command: str) -> list[click.Option]:
    return [one for one in COMMANDS[command].params if isinstance(one, click.Option)]


@pytest.mark.parametrize("command", GROUPED)
def test_the_help_has_its_sections_in_order(command: str) -> None:
    advanced = any(isinstance(one, GroupedOption) and one.is_advanced for one in options_of(command))
    lines = invoke_of_groups(command, "--help-all" if advanced else "--help").stdout.splitlines()
    titles = [line.removesuffix(":") for line in lines if line.removesuffix(":") in ORDER]
    used = {getattr(one, "group", OTHER) for one in options_of(command)}
    assert titles == [title for title in ORDER if title in used | {OTHER}]
    assert "MODEL" not in [line.strip() for line in lines]


@pytest.mark.parametrize("command", GROUPED)
def test_every_option_but_the_help_stands_in_a_group(command: str) -> None:
    grouped = [one for one in options_of(command) if one.name != "help_all"]
    assert {getattr(one, "group", "") for one in grouped} <= set(ORDER) - {OTHER}


def test_the_first_option_is_what_gives_samples_and_a_preset_of_images_comes_before_what_changes_it() -> None:
    lines = [
        line.split()[0]
        for line in invoke_of_groups("quantize", "--help").stdout.splitlines()
        if line.startswith("  --")
    ]
    assert lines[0] == "--calib"
    assert next(line for line in lines if line.startswith("--image")) == "--image-preset"


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--preset", PRESETS),
        ("--target", TARGETS),
        ("--range", CALIBRATION_METHODS),
        ("--accuracy", ["gptq", "fast"]),
    ],
)
def test_options_that_name_things_list_them(option: str, names: Iterable[str]) -> None:
    listed = [line.partition("\t")[0] for line in invoke_of_groups("quantize", option, "list").stdout.splitlines()]
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
        ([], "cert", ["certify"]),
    ],
)
def test_the_shell_completes_names(words: list[str], begun: str, names: list[str]) -> None:
    completed = ShellComplete(cli, {}, "onnxq", "_ONNXQ").get_completions(words, begun)
    assert [one.value for one in completed] == names


def test_a_name_is_looked_up_where_it_is_used() -> None:
    assert PRESET.convert("int9", None, None) == "int9"


def test_the_help_of_quantize_shows_thirty_options_and_the_rest_when_asked() -> None:
    shown, every = (
        [line for line in invoke_of_groups("quantize", one).stdout.splitlines() if re.match("  -", line)]
        for one in ("--help", "--help-all")
    )
    assert len(shown) <= 30
    assert len(every) == len(options_of("quantize")) + 1


def test_the_help_of_quantize_fits_two_screens() -> None:
    shown = CliRunner().invoke(cli, ["quantize", "--help"], terminal_width=100).stdout.splitlines()
    assert len(shown) <= 60


@pytest.mark.parametrize("command", GROUPED)
def test_a_group_has_at_most_eight_options(command: str) -> None:
    assert max(Counter(getattr(one, "group", OTHER) for one in options_of(command)).values()) <= 8


@pytest.mark.parametrize("name", REMOVED)
def test_what_is_removed_is_refused_with_what_to_use_instead(name: str) -> None:
    # Statistics are still what quantize takes.
    command = "calibrate" if name == "--stats" else "quantize"
    words = [command, "m.onnx", name, "3"] if name.startswith("--") else [name, "m.onnx"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert f"{name} was removed: {REMOVED[name]}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("quantize MODEL --prefer mean", "prefer 'mean' was removed together with several targets; leave"),
        ("quantize MODEL --prefer worst", "prefer 'worst' was removed together with several targets; leave"),
        ("quantize m.onnx --target openvino --target qnn", "--target is given 2 times, expected once; run the command"),
        ("quantize m.onnx --engine openvino --engine ssh:a", "--engine is given 2 times, expected once; run the"),
        ("compare a.onnx b.onnx --data x --engine openvino --engine ssh:a", "--engine is given 2 times, expected once"),
        ("certify a.onnx b.onnx --data x --engine tract", "engine 'tract' was removed; take openvino"),
    ],
)
def test_removed_values_are_refused_with_what_to_use_instead(words: str, sentence: str) -> None:
    result = CliRunner().invoke(cli, words.replace("MODEL", str(MODELS / "gru.onnx")).split())
    assert sentence in f"{' '.join(result.stderr.split())} {result.exception}"


def test_the_target_is_that_of_the_processor_unless_one_is_given() -> None:
    [target] = [parameter for parameter in options_of("quantize") if parameter.name == "target"]
    context = click.Context(cli)
    assert target.process_value(context, ()) == target.process_value(context, ("onnxruntime-cpu",)) == "onnxruntime-cpu"
