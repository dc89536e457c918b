"""Options become the values that quantize() takes, in groups that complete and list names."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from conftest import MODELS

from cli.commands import COMMANDS, GRU, QUICK, command_with, exit_code_of, invoke, words_of
from onnxq.calibration.methods import CALIBRATION_METHODS
from onnxq.cli.help import ORDER, OTHER, REMOVED, GroupedCommand, GroupedOption
from onnxq.cli.main import cli
from onnxq.cli.options import (
    accuracy_option,
    budget_options,
    changes_option,
    chosen_scheme,
    cluster_option,
    data_options,
    goal_options,
    scheme_options,
    statistics_data_options,
    two_models,
    verify_options,
)
from onnxq.cli.types import PRESET
from onnxq.config.presets import PRESETS
from onnxq.data.images import IMAGE_PRESETS, ImageOptions
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.passes.preparing.rewriting import Verify
from onnxq.pipeline.request import Budget
from onnxq.runtime.targets import TARGETS

COLLECTING, collected = command_with(cluster_option, statistics_data_options)
_, quantized = command_with(data_options, scheme_options, goal_options, accuracy_option, budget_options)
_, rewritten = command_with(verify_options, changes_option)
_, compared = command_with(two_models)


def test_options_that_are_left_out_have_the_defaults_of_python() -> None:
    assert collected() == {"data": None, "cluster": None}
    found = quantized()
    assert (found["data"], found["goal"](), found["budget"]) == (None, Goal(), Budget())
    assert found["budget"].time_limit == math.inf
    request = found["request"]
    assert (request.rules.name, request.target, request.prepare) == ("int8", "onnxruntime-cpu", ())
    assert rewritten() == {"verify": Verify(images=ImageOptions()), "report": None}


def test_images_have_the_defaults_that_help_shows() -> None:
    shown = words_of(CliRunner().invoke(COLLECTING, ["--help"]).output)
    plain = ImageOptions()
    assert (plain.mean, plain.std, plain.scale) == ((0.0,), (1.0,), 1 / 255)
    for default in ("0", "1", "1/255", plain.channels, plain.fit):
        assert f"[default: {default}]" in shown


def test_every_image_option_of_the_command_line_is_a_field_and_every_preset_a_choice() -> None:
    options = {option.name: option for option in COLLECTING.params if str(option.name).startswith("image_")}
    assert list(options.pop("image_preset").type.choices) == list(IMAGE_PRESETS)  # type: ignore[attr-defined]
    assert set(options) == {f"image_{field.name}" for field in dataclasses.fields(ImageOptions)}


@pytest.mark.parametrize(
    ("arguments", "images"),
    [
        (
            "--image-size 32X48 --image-mean 0.5,0.25,0 --image-fit crop",
            ImageOptions(size=(32, 48), mean=(0.5, 0.25, 0), fit="crop"),
        ),
        (
            "--image-fit crop --image-resize 256 --image-layout NHWC --image-scale 1/128",
            ImageOptions(fit="crop", resize=256, layout="NHWC", scale=1 / 128),
        ),
        # Other options go before the preset.
        ("--image-preset imagenet --image-resize 384", dataclasses.replace(IMAGE_PRESETS["imagenet"], resize=384)),
    ],
)
def test_image_options_become_one_value(arguments: str, images: ImageOptions) -> None:
    assert collected("--calib", "c", *arguments.split())["data"].images == images


def test_chains_are_taken_as_they_are_said() -> None:
    found = collected("--calib", "c", "--chain", "hN=h", "--chain", "cN=c", "--cluster", "tcp://a:1")
    assert (found["data"].chained, found["cluster"]) == ({"hN": "h", "cN": "c"}, "tcp://a:1")
    assert found["data"].images == ImageOptions()


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        (collected, "--image-size 32", "expected HEIGHTxWIDTH such as 224x224, found '32'"),
        (collected, "--image-size 0x32", "expected HEIGHTxWIDTH such as 224x224, found '0x32'"),
        (collected, "--image-scale 1/0", "expected a number such as 1/255 or 0.5, found '1/0'"),
        (collected, "--image-mean a,b", "expected numbers separated by commas, found 'a,b'"),
        (rewritten, "--tolerance -1", "-1.0 is not in the range x>=0"),
        (rewritten, "--tolerance nan", "expected a finite number"),
        (quantized, "--max-drop 1", "--max-drop is about a --metric"),
        (quantized, "--metric top1:l.npy --min-sqnr 9", "--metric replaces --min-sqnr"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(values: Any, arguments: str, message: str) -> None:
    with pytest.raises(click.UsageError, match=re.escape(message)):
        values(*arguments.split())


def test_two_models_take_samples_as_quantize_does() -> None:
    options = ("--limit", "3", "--chain", "new=old", "--source", "audio:rate=8000", "--image-preset", "imagenet")
    data = compared("a.onnx", "b.onnx", "--data", "d", *options)["data"]
    assert (str(data.calibration), data.limit, data.chained, data.source) == ("d", 3, {"new": "old"}, options[5])
    assert data.images == IMAGE_PRESETS["imagenet"]


@pytest.mark.parametrize(
    ("arguments", "goal"),
    [
        ("--min-sqnr 30", Goal(30.0)),
        ("--force --exact", Goal(force=True, exact=True)),
        ("--prefer size", Goal(prefer="size")),
        ("--max-size 300MB", Goal(max_size="300MB")),
    ],
)
def test_goals(arguments: str, goal: Goal) -> None:
    assert quantized(*arguments.split())["goal"]() == goal


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        ("--search full --accuracy gptq", Budget(search="full", accuracy="gptq")),
        ("--latency-seconds 0 --time-limit 60", Budget(latency_seconds=0.0, time_limit=60.0)),
        ("--engine openvino --no-cache", Budget(engine="openvino", cache=False)),
        ("--threads 2", Budget(threads=2)),
    ],
)
def test_budgets(arguments: str, budget: Budget) -> None:
    assert quantized(*arguments.split())["budget"] == budget


def test_samples_and_schemes_are_those_given() -> None:
    found = quantized(
        *("--calib", "c", "--validation", "v", "--limit", 3, "--chain", "stateN=state", "--image-size", "8x8"),
        *("--source", "audio:rate=8000"),
        *("--preset", "int4-block32", "--range", "mse", "--emit", "ort", "--strip-metadata", "-p", "NameNodes"),
    )
    data, scheme = found["data"], found["request"].rules
    assert (data.calibration, data.validation, data.limit) == (Path("c"), Path("v"), 3)
    assert (data.chained, data.images.size, data.source) == ({"stateN": "state"}, (8, 8), "audio:rate=8000")
    assert (scheme.name, scheme.ranges, scheme.emit) == ("int4-block32", "mse", "ort")
    assert found["request"].prepare == ("NameNodes", "StripMetadata")


@pytest.mark.parametrize(
    ("arguments", "preset"),
    [
        ("--prefer size", "int4-block32"),
        ("--max-size 0.3", "int4-block32"),
        ("--prefer speed", "int8"),
        ("--max-size 0.3 --preset int8-block32", "int8-block32"),
    ],
)
def test_a_size_needs_no_preset(arguments: str, preset: str) -> None:
    assert quantized(*arguments.split())["request"].name == preset


def test_a_scheme_is_a_preset_or_a_file() -> None:
    assert chosen_scheme(None, None).name == "int8"
    with pytest.raises(SchemeError, match="did you mean 'int8'"):
        chosen_scheme("int9", None)
    with pytest.raises(SchemeError, match="there is no preset 'fp16'; onnxq quantize --dtypes fp16 writes"):
        chosen_scheme("fp16", None)


GROUPED = [name for name, command in COMMANDS.items() if isinstance(command, GroupedCommand)]


def options_of(command: str) -> list[click.Option]:
    return [option for option in COMMANDS[command].params if isinstance(option, click.Option)]


@pytest.mark.parametrize("command", GROUPED)
def test_options_stand_in_groups_of_at_most_eight_in_order(command: str) -> None:
    options = options_of(command)
    groups = Counter(getattr(option, "group", "") for option in options if option.name != "help_all")
    assert set(groups) <= set(ORDER) - {OTHER}
    assert max(groups.values()) <= 8
    advanced = any(isinstance(option, GroupedOption) and option.is_advanced for option in options)
    lines = invoke(command, "--help-all" if advanced else "--help").stdout.splitlines()
    titles = [line.removesuffix(":") for line in lines if line.removesuffix(":") in ORDER]
    assert titles == [title for title in ORDER if title in groups or title == OTHER]
    assert "MODEL" not in [line.strip() for line in lines]


def test_the_first_option_gives_samples_and_a_preset_of_images_comes_before_what_changes_it() -> None:
    lines = [line.split()[0] for line in invoke("quantize", "--help").stdout.splitlines() if line.startswith("  --")]
    assert lines[0] == "--calib"
    assert next(line for line in lines if line.startswith("--image")) == "--image-preset"


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--preset", PRESETS),
        ("--range", CALIBRATION_METHODS),
        ("--accuracy", ["gptq", "fast"]),
    ],
)
def test_options_that_name_things_list_them(option: str, names: Iterable[str]) -> None:
    listed = [line.partition("\t")[0] for line in invoke("quantize", option, "list").stdout.splitlines()]
    assert set(names) <= set(listed)


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(SchemeError, match="the largest size is foo, expected a share"):
        invoke("quantize", GRU, *QUICK, "--max-size", "foo")


def test_targets_are_listed_by_name_alone() -> None:
    assert invoke("quantize", "--target", "list").stdout.splitlines() == list(TARGETS)


def test_every_preset_is_listed_with_a_description() -> None:
    lines = [line.split("\t") for line in invoke("quantize", "--preset", "list").stdout.splitlines()]
    assert [name for name, _ in lines] == list(PRESETS)
    assert all(description for _, description in lines)


@pytest.mark.parametrize(
    ("words", "begun", "names"),
    [
        (["quantize", "--preset"], "int8-b", ["int8-block32"]),
        (["calibrate", "--target"], "tens", ["tensorrt"]),
        (["calibrate", "--range"], "perc", ["percentile"]),
        (["quantize", "--accuracy"], "gp", ["gptq"]),
        (["run", "-p"], "FuseBatch", ["FuseBatchNorm"]),
        (["quantize", "--pass"], "FuseBatch", ["FuseBatchNorm"]),
        (["inspect", str(MODELS / "gru.onnx")], "/gru/GR", ["/gru/GRU", "/gru/GRU_1"]),
        (["inspect", "none.onnx"], "/", []),
        ([], "cert", ["certify"]),
    ],
)
def test_the_shell_completes_names(words: list[str], begun: str, names: list[str]) -> None:
    completed = ShellComplete(cli, {}, "onnxq", "_ONNXQ").get_completions(words, begun)
    assert [completion.value for completion in completed] == names


def test_a_name_is_looked_up_where_it_is_used() -> None:
    assert PRESET.convert("int9", None, None) == "int9"


def test_the_help_of_quantize_fits_two_screens_and_the_rest_is_shown_when_asked() -> None:
    short, every = (
        CliRunner().invoke(cli, ["quantize", flag], terminal_width=100).stdout.splitlines()
        for flag in ("--help", "--help-all")
    )
    assert len(short) <= 60
    assert sum(line.startswith("  -") for line in short) <= 30
    assert sum(line.startswith("  -") for line in every) == len(options_of("quantize")) + 1


@pytest.mark.parametrize("name", REMOVED)
def test_removed_names_are_refused_with_what_to_use_instead(name: str) -> None:
    # Statistics are still what quantize takes.
    command = "calibrate" if name == "--stats" else "quantize"
    words = [command, "m.onnx", name, "3"] if name.startswith("--") else [name, "m.onnx"]
    result = exit_code_of(*words)
    assert result.exit_code == 2
    assert f"{name} was removed: {REMOVED[name]}" in words_of(result.stderr)


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
    result = exit_code_of(*words.replace("MODEL", str(MODELS / "gru.onnx")).split())
    assert sentence in f"{words_of(result.stderr)} {result.exception}"
