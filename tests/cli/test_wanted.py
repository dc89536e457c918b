"""Options packed into the values that quantize() takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from onnxq.cli.options import (
    accuracy_option,
    budget_options,
    chosen_scheme,
    collection_options,
    data_options,
    goal_options,
    scheme_options,
)
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal


def packed(*arguments: object) -> dict[str, Any]:
    """What a command with all of these options is called with."""
    found: dict[str, Any] = {}

    @click.command()
    @collection_options
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
            "--profile-cache",
            "t.json",
        ),
    )
    data, scheme, budget = found["data"], found["request"].rules, found["budget"]
    assert (data.calibration, data.validation, data.limit) == (Path("c"), Path("v"), 3)
    assert (data.chained, data.images.size, data.source) == ({"stateN": "state"}, (8, 8), "audio:rate=8000")
    assert (scheme.name, scheme.ranges, scheme.emit) == ("int4-block32", "mse", "ort")
    assert found["request"].prepare == ("NameNodes", "StripMetadata")
    assert found["goal"]() == Goal(12, force=True, exact=True)
    assert (budget.search, budget.latency_seconds, budget.profile_cache) == ("off", 0.0, Path("t.json"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--strict-types", "--emit", "ort"), "--strict-types is about standard ONNX and --emit ort is not"),
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
