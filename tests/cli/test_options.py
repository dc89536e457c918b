from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from onnxq.calibration.calibrate import Collection
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.workers import Processes
from onnxq.cli.options import chain_option, collection_options, image_options, two_models
from onnxq.data.images import IMAGE_PRESETS, ImageOptions

TAKEN: list[dict[str, Any]] = []


@click.command()
@collection_options
@image_options
@chain_option
def command(**given: Any) -> None:
    TAKEN.append(given)


def invoke(*arguments: str) -> Result:
    TAKEN.clear()
    return CliRunner().invoke(command, arguments)


def test_nothing_is_taken_when_nothing_is_given() -> None:
    assert invoke().exit_code == 0
    assert [{"images": ImageOptions(), "collection": None, "chain": ()}] == TAKEN


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


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--jobs", "3"], "workers", Processes(3)),
        (["--cluster", "tcp://a:1"], "workers", Cluster("tcp://a:1")),
        (["--memory", "4GB"], "memory", 4 * 10**9),
        (["--memory", "1.5 gib"], "memory", 3 * 2**29),
        (["--memory", "512m"], "memory", 512 * 10**6),
        (["--memory", "1000"], "memory", 1000),
    ],
)
def test_options_about_collecting_become_one_value(arguments: list[str], field: str, value: object) -> None:
    assert invoke(*arguments).exit_code == 0
    collection = TAKEN[0]["collection"]
    assert isinstance(collection, Collection)
    assert getattr(collection, field) == value


def test_chains_are_taken_as_they_are_said_and_have_something_to_tell() -> None:
    invoke("--chain", "hN=h", "--chain", "cN=c")
    assert TAKEN[0]["chain"] == ("hN=h", "cN=c")
    assert TAKEN[0]["collection"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "expected a size such as 4GB or 512MiB, found 'much'"),
        (["--jobs", "0"], "0 is not in the range"),
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
