"""Options that several commands share, as decorators. Heavy imports wait until a command runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from onnxq.cli.groups import (
    CALIBRATION,
    DATA,
    ENGINE,
    IMAGES,
    ONCE,
    OUTPUT,
    PASS,
    PASSES,
    SPEED,
    Command,
    option,
    with_options,
)
from onnxq.system.records import parse_size

FILE = click.Path(path_type=Path)
"""The type of arguments and options that name a file or folder."""


class FiniteRange(click.FloatRange):
    """The type of options that are numbers between limits; NaN, which is beyond no limit, and infinity are refused."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the number."""
        found = super().convert(value, parameter, context)
        if not math.isfinite(found):
            self.fail(f"expected a finite number, found {value}", parameter, context)
        return found


COMPARING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input, 3 below --min-sqnr."
READING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input."
WRITING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input and nothing written."
EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input and nothing written, 3 too noisy or of no use."

BELOW_FIDELITY = 3
"""The exit code where models are less alike than they have to be, or the quantized one is of no use."""

json_option = option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print JSON.")


def most_samples(told: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``limit`` to a command, told of in these words."""
    return option("--limit", group=DATA, type=click.IntRange(min=1), metavar="COUNT", help=told)


def time_to_spend(told: str, seconds: float = 2.0) -> Callable[[Command], Command]:
    """Return a decorator that adds ``seconds`` to a command, told of in these words."""
    return option(
        "--seconds",
        group=SPEED,
        type=FiniteRange(min=0),
        metavar="SECONDS",
        default=seconds,
        show_default=True,
        help=told,
    )


limit_option = most_samples("Use at most this many samples.")
batch_option = option(
    "--batch",
    "rows",
    group=DATA,
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Run the model with this many rows at a time.  [default: as many as each of several files holds, 1 of a "
    "single file]",
)
chain_option = option(
    "--chain",
    group=DATA,
    multiple=True,
    metavar="OUTPUT=INPUT",
    help="Feed an output of each sample to an input of the next, for stateful models; each folder, and each "
    "file of several samples, starts anew, from zeros and an empty past. Repeatable.",
)
source_option = option(
    "--source",
    group=DATA,
    metavar="NAME[:OPTION=VALUE]",
    help="What reads the samples, such as audio:rate=8000 or text:tokenizer=tokenizer.json; see docs/samples.md.  "
    "[default: what the files are]",
)


def pass_option(what: str) -> Callable[[Command], Command]:
    """Return a decorator that adds a repeatable option to a command, which takes it as ``passes``."""
    return option(
        "-p",
        "--pass",
        "passes",
        group=PASSES,
        type=PASS,
        multiple=True,
        metavar="NAME[:OPTION=VALUE]",
        help=f"{what}: a name of onnxq run --list, MODULE:CLASS or FILE.py:CLASS. Repeatable.",
    )


_IMAGE_OPTIONS = ("size", "mean", "std", "scale", "channels", "layout", "fit", "resize")


def two_models(command: Command) -> Command:
    """Add what a command takes that sets two models side by side: these, what runs them, and samples as ``data``."""

    @functools.wraps(command)
    def with_data(*args: Any, **kwargs: Any) -> None:
        from onnxq.calibration.data import Data

        samples, limit, images, chain, source, rows = (
            kwargs.pop(name) for name in ("data", "limit", "images", "chain", "source", "rows")
        )
        command(*args, data=Data(samples, None, limit, images, chain, source=source, batch=rows), **kwargs)

    return with_options(
        image_options(with_data),
        click.argument("reference", type=FILE),
        click.argument("candidate", type=FILE),
        option("--data", group=DATA, required=True, type=FILE, **ONCE, help="Samples, as --calib takes them."),
        most_samples("Use at most this many samples, from all over; the first ones for --chain."),
        batch_option,
        chain_option,
        source_option,
        option(
            "--engine",
            group=SPEED,
            type=ENGINE,
            metavar="NAME[:PLACE]",
            default="onnxruntime",
            show_default=True,
            help="What runs the models, such as openvino, onnxruntime-web:FOLDER, python:PATH or ssh:HOST.",
        ),
        json_option,
    )


def image_options(command: Command) -> Command:
    """Add the options about image files to a command, which takes them as one argument ``images``."""

    @functools.wraps(command)
    def with_images(*args: Any, **kwargs: Any) -> None:
        from onnxq.data.images import IMAGE_PRESETS, ImageOptions

        given = {name: kwargs.pop(f"image_{name}") for name in _IMAGE_OPTIONS}
        chosen = {name: value for name, value in given.items() if value is not None}
        preset = IMAGE_PRESETS.get(kwargs.pop("image_preset"), ImageOptions())
        command(*args, images=replace(preset, **chosen), **kwargs)

    return with_options(
        with_images,
        option(
            "--image-preset",
            group=IMAGES,
            type=click.Choice(["imagenet", "clip", "inception"]),
            help="How images were prepared for models of a kind; the options below override it.",
        ),
        option(
            "--image-size",
            group=IMAGES,
            callback=_parse_size,
            metavar="HxW",
            help="Resize images.  [default: the model's own size]",
        ),
        option(
            "--image-scale",
            group=IMAGES,
            callback=_parse_factor,
            metavar="FACTOR",
            help="Multiply pixels, which are 0..255, by this; for float inputs.  [default: 1/255]",
        ),
        option(
            "--image-mean",
            group=IMAGES,
            callback=_parse_numbers,
            metavar="R,G,B",
            help="Subtract these from pixels, after --image-scale.  [default: 0]",
        ),
        option(
            "--image-std",
            group=IMAGES,
            callback=_parse_numbers,
            metavar="R,G,B",
            help="Divide pixels by these, after --image-mean.  [default: 1]",
        ),
        option(
            "--image-layout",
            group=IMAGES,
            type=click.Choice(["NCHW", "NHWC"]),
            help="Where the channels are.  [default: the model's own axis of 1 or 3]",
        ),
        option(
            "--image-channels",
            group=IMAGES,
            type=click.Choice(["RGB", "BGR", "GRAY"]),
            help="Order of the colours.  [default: RGB]",
        ),
        option(
            "--image-fit",
            group=IMAGES,
            type=click.Choice(["stretch", "crop"]),
            help="Stretch images to the size, or keep their shape and crop the centre.  [default: stretch]",
        ),
        option(
            "--image-resize",
            group=IMAGES,
            type=click.IntRange(min=1),
            metavar="PIXELS",
            help="Resize the shorter side to this before --image-fit crop.  [default: what just covers the size]",
        ),
    )


def collection_options(command: Command) -> Command:
    """Add the options about running samples to a command, which takes them as ``collection``.

    The argument is None where none of them is given.
    """

    @functools.wraps(command)
    def with_collection(*args: Any, **kwargs: Any) -> None:
        from onnxq.calibration.calibrate import Collection, workers_for

        stats, jobs, cluster, memory = (kwargs.pop(name) for name in ("stats", "jobs", "cluster", "memory"))
        workers = None if jobs is None and cluster is None else workers_for(jobs=jobs, cluster=cluster)
        collection = Collection(workers=workers, reuse=stats, memory=memory, notice=_notice)
        # A chain has something to tell too.
        given = any(value is not None for value in (stats, workers, memory)) or bool(kwargs.get("chain"))
        command(*args, collection=collection if given else None, **kwargs)

    return with_options(
        with_collection,
        option(
            "--stats",
            group=CALIBRATION,
            type=FILE,
            help="Statistics from onnxq calibrate; what matches is not run again.",
        ),
        option(
            "--jobs",
            group=CALIBRATION,
            type=click.IntRange(min=1),
            metavar="COUNT",
            help="Calibrate in this many worker processes.",
        ),
        option(
            "--cluster", group=CALIBRATION, metavar="ADDRESS", help="Calibrate on the Dask cluster of this scheduler."
        ),
        option(
            "--memory",
            group=CALIBRATION,
            callback=_parse_memory,
            metavar="SIZE",
            help="Most memory for calibration, such as 4GB: where more is needed, the samples run several times, and "
            "training keeps them on disk.",
        ),
    )


def _notice(sentence: str) -> None:
    click.echo(f"onnxq: {sentence}", err=True)


def _parse_size(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"expected HEIGHTxWIDTH such as 224x224, found {text!r}")
    return int(parts[0]), int(parts[1])


def _parse_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}") from None


def _parse_factor(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else float(Fraction(text.strip()))
    except (ValueError, ArithmeticError):
        raise click.BadParameter(f"expected a number such as 1/255 or 0.5, found {text!r}") from None


def _parse_memory(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as reason:
        raise click.BadParameter(str(reason)) from None
