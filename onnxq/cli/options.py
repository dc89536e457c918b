"""Options of several commands, and the values that commands receive. Heavy imports wait until a command runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.help import (
    ACCURACY,
    CALIBRATION,
    DATA,
    IMAGES,
    OPTIMIZER,
    OUTPUT,
    PASSES,
    SPEED,
    TRAINING,
    TYPES,
    WHAT,
    Command,
    Decorator,
    Option,
    given_of,
    once,
    packed,
    with_options,
)
from onnxq.cli.types import (
    ABOVE_ZERO,
    COUNT,
    EFFORT,
    FILE,
    FROM_ZERO,
    PASS,
    PREFERENCE,
    PRESET,
    RANGE,
    TARGET,
    parsed,
)
from onnxq.errors import SchemeError
from onnxq.training.settings import BLOCKS, LEARNED, Training

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.config.scheme import Scheme
    from onnxq.data.images import ImageOptions
    from onnxq.evaluation.goal import Goal
    from onnxq.evaluation.metrics import Metric
    from onnxq.passes.preparing.rewriting import Verify
    from onnxq.pipeline.request import Budget, QuantizationRequest
    from onnxq.planning.plan import Plan

COMPARING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input, 3 below --min-sqnr or --max-drop."
TIMING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input, 3 below --min-speed."
READING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input."
WRITING_EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input and nothing written."
EXIT_CODES = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input and nothing written, 3 below the goal or no gain."

BELOW_GOAL = 3
"""The exit code if a model misses the goal, or if quantization gains nothing."""

NO_SAMPLES = (
    "give --calib with representative samples: they set the scales and prove the result; weight-only presets need none"
)


# Samples: `images`, and `data` with them.


def _parse_size(text: str) -> tuple[int, int]:
    height, width = text.lower().split("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ValueError
    return int(height), int(width)


def _parse_number(text: str) -> float:
    return float(Fraction(text.strip()))


_size = parsed(_parse_size, "HEIGHTxWIDTH such as 224x224")
_factor = parsed(_parse_number, "a number such as 1/255 or 0.5")
_numbers = parsed(lambda text: tuple(map(_parse_number, text.split(","))), "numbers separated by commas")
_image = functools.partial(Option, IMAGES, advanced=True)
_IMAGES = (
    Option(
        DATA,
        "--image-preset KIND",
        "Prepare images for models such as imagenet, clip or inception.",
        type=click.Choice(["imagenet", "clip", "inception"]),
    ),
    _image("--image-size HxW", "Resize images.  [default: the model's own size]", type=_size),
    _image("--image-scale FACTOR", "Multiply pixels of 0..255, for float inputs.  [default: 1/255]", type=_factor),
    _image("--image-mean R,G,B", "Subtract 1 or 3 numbers after --image-scale.  [default: 0]", type=_numbers),
    _image("--image-std R,G,B", "Divide by 1 or 3 numbers after --image-mean.  [default: 1]", type=_numbers),
    _image("--image-layout [NCHW|NHWC]", "Set the axis of channels.  [default: the model's own axis of 1 or 3]"),
    _image("--image-channels [RGB|BGR|GRAY]", "Set the order of colours; 1 channel is gray.  [default: RGB]"),
    _image("--image-fit [stretch|crop]", "Stretch images to the size, or crop the centre.  [default: stretch]"),
    _image("--image-resize PIXELS", "Resize the shorter side before a crop.  [default: to cover the size]", type=COUNT),
)

IMAGE_FLAGS = tuple(option.names[0] for option in _IMAGES)
"""The flags of the options about image files."""


def _build_images(image_preset: str | None, **settings: Any) -> ImageOptions:
    from onnxq.data.images import IMAGE_PRESETS, ImageOptions

    chosen = {name.removeprefix("image_"): value for name, value in settings.items() if value is not None}
    return replace(IMAGE_PRESETS.get(image_preset or "", ImageOptions()), **chosen)


def _samples(flags: str, text: str, **settings: Any) -> Option:
    return Option(DATA, flags, text, **once("put all samples into one folder"), **settings)


_limit = functools.partial(Option, DATA, "--limit COUNT")
_batch = Option(
    DATA, "--batch ROWS", "Run this many rows at a time.  [default: rows of a file]", advanced=True, type=COUNT
)
_source = Option(DATA, "--source READER", "Use this reader, such as audio:rate=8000.  [default: by file type]")
_chain = Option(
    DATA,
    "--chain OUTPUT=INPUT",
    "Feed an output to an input of the next sample, for stateful models. Repeatable.",
    advanced=True,
    multiple=True,
)


def _build_data(calibration: Path | None, **settings: Any) -> Data | None:
    from onnxq.calibration.data import Data

    images = _build_images(**{option.name: settings.pop(option.name) for option in _IMAGES})
    return None if calibration is None else Data(calibration, images=images, **settings)


def _data_options(*options: Option) -> Decorator:
    """Return a decorator that adds samples, which a command takes as ``data``: None without a place."""
    return packed("data", _build_data, *options, _source, _chain, *_IMAGES)


_calibrated_and_judged = (
    _samples("--calib PATH calibration", "Read samples from a folder or file: .npz, .npy, images."),
    _samples("--validation PATH", "Evaluate on these, with their labels.  [default: a quarter of --calib]"),
    _limit("Use at most this many samples, evenly spaced (the first ones with --chain or --metric)."),
    Option(CALIBRATION, "--stats PATH statistics", "Use these statistics from onnxq calibrate.", advanced=True),
)
data_options = _data_options(*_calibrated_and_judged, _batch)
"""Adds the samples of a command that quantizes."""

training_data_options = _data_options(*_calibrated_and_judged)
"""As `data_options` without --batch, which is the size of a step in training."""

statistics_data_options = _data_options(
    _samples("--calib PATH calibration", "Read samples, as quantize does."),
    _limit("Use at most this many samples."),
    _batch,
)
"""Adds the samples of a command that collects statistics."""

_compared_data_options = _data_options(
    _samples("--data PATH calibration", "Read samples, as --calib of quantize.", required=True),
    _limit("Use at most this many samples, evenly spaced; the first ones for --chain."),
    _batch,
)

json_option = Option(OUTPUT, "--json as_json", "Print JSON.")


def two_models(command: Command) -> Command:
    """Add the arguments of a command that compares two models, which takes samples as ``data``."""
    return with_options(
        command,
        _compared_data_options,
        click.argument("reference", type=FILE),
        click.argument("candidate", type=FILE),
        Option(
            SPEED,
            "--engine NAME[:PLACE]",
            "Run the models on this engine, such as openvino, onnxruntime-web:FOLDER, python:PATH or ssh:HOST.  "
            "[default: onnxruntime]",
            **once("run the command for each engine", "onnxruntime"),
        ),
        json_option,
    )


# The quantization itself: `request`.


def pass_option(text: str, group: str = PASSES) -> Option:
    """Return the option of passes."""
    return Option(
        group,
        "-p --pass NAME[:OPTION=VALUE] passes",
        f"{text}: a name from onnxq run --list, MODULE:CLASS or FILE.py:CLASS. Repeatable.",
        type=PASS,
        multiple=True,
    )


range_option = functools.partial(Option, WHAT, "--range METHOD ranges", type=RANGE, is_eager=True)
"""Makes the option of a calibration method from its help."""

preset_option = Option(
    WHAT,
    "--preset NAME",
    "Use this preset, or 'list'.  [default: int8; int4-block32 with --max-size or --prefer size]",
    type=PRESET,
    is_eager=True,
)
scheme_file_option = Option(WHAT, "--scheme PATH scheme_file", "Use the rules in this TOML file instead of a preset.")
target_option = Option(
    WHAT,
    "--target NAME",
    "Plan for this runtime, or 'list'.  [default: onnxruntime-cpu]",
    type=TARGET,
    is_eager=True,
    **once("run the command for each target", "onnxruntime-cpu"),
)
plan_option = Option(WHAT, "--plan PATH plan_file", "Apply the plan in this file, without a scheme or search.")

SAID_BY_PLANS = (
    *("--preset", "--scheme", "--encodings", "--exclude", "--range", "--target", "--search"),
    *("--prefer", "--max-size", "--accuracy", "--exact", "--emit", "--io"),
)
"""Options that a given plan replaces."""


@dataclass(frozen=True)
class Request:
    """The scheme or plan, the target and the passes.

    Attributes:
        read: files that were read, which no output may replace.
    """

    scheme: Scheme | Plan
    target: str
    prepare: tuple[str, ...]
    read: tuple[Path | None, ...] = ()

    @property
    def rules(self) -> Scheme:
        """The scheme, if there is no plan to apply."""
        from onnxq.config.scheme import Scheme

        assert isinstance(self.scheme, Scheme)
        return self.scheme

    @property
    def name(self) -> str:
        """The part of output names that comes from the scheme."""
        from onnxq.planning.plan import Plan

        return self.scheme.scheme if isinstance(self.scheme, Plan) else self.scheme.name

    def to_quantize(self) -> QuantizationRequest:
        """Return the request as the pipeline takes it."""
        from onnxq.pipeline.request import QuantizationRequest

        return QuantizationRequest.of(self.scheme, self.target, self.prepare)

    @property
    def is_data_free(self) -> bool:
        """Whether no scale depends on samples."""
        from onnxq.config.scheme import Mode, Scheme

        return isinstance(self.scheme, Scheme) and all(rule.mode is not Mode.STATIC for rule in self.scheme.rules)

    def with_plan(self, plan_file: Path | None) -> Request:
        """Replace the scheme with the plan of a file, if one is given.

        Raises:
            UsageError: if options contradict the plan.
        """
        if plan_file is None:
            return self
        from onnxq.planning.plan_file import load_plan

        if given_of(*SAID_BY_PLANS):
            flags = f"{', '.join(SAID_BY_PLANS[:-1])} and {SAID_BY_PLANS[-1]}"
            raise click.UsageError(f"--plan decides for every node; leave out {flags}")
        return replace(self, scheme=load_plan(plan_file))


def chosen_scheme(preset: str | None, scheme_file: Path | None, default: str = "int8") -> Scheme:
    """Return the scheme of a preset or a file; if neither is given, that of the preset `default`.

    Raises:
        UsageError: if both are given.
        SchemeError: if there is no such preset, or the file is invalid.
    """
    from onnxq.config.presets import preset_named
    from onnxq.config.scheme_file import load_scheme

    if preset is not None and scheme_file is not None:
        raise click.UsageError('give --preset or --scheme, not both; a scheme file can say base = "int8"')
    if preset in ("fp16", "float16"):
        raise SchemeError(
            f"there is no preset {preset!r}; onnxq quantize --dtypes fp16 writes a model of 16-bit floats"
        )
    return load_scheme(scheme_file) if scheme_file is not None else preset_named(preset or default)


def _default_preset() -> str:
    """Return the preset of a command that names none: 4-bit blocks if a size chooses the bits of weights."""
    parameters = click.get_current_context().params
    by_size = parameters.get("max_size") is not None or parameters.get("prefer") == "size"
    return "int4-block32" if by_size else "int8"


def _build_request(
    preset: str | None,
    scheme_file: Path | None,
    exclude: tuple[str, ...],
    target: str,
    ranges: str | None,
    encodings: Path | None,
    passes: tuple[str, ...],
    emit: str,
    io: str,
    strip_metadata: bool,
) -> Request:
    from onnxq.config.encodings_file import load_encodings
    from onnxq.config.scheme import InputsOutputs

    scheme = chosen_scheme(preset, scheme_file, _default_preset()).excluding(*exclude)
    # Options that are left out leave what a scheme file says.
    if given_of("--io"):
        scheme = replace(scheme, io=InputsOutputs(io))
    if given_of("--emit"):
        scheme = replace(scheme, emit=emit)
    if ranges is not None:
        scheme = replace(scheme, ranges=ranges)
    if encodings is not None:
        scheme = replace(scheme, encodings=load_encodings(encodings))
    return Request(scheme, target, (*passes, *(("StripMetadata",) if strip_metadata else ())), (encodings,))


_type = functools.partial(Option, TYPES, advanced=True)
scheme_options = packed(
    "request",
    _build_request,
    preset_option,
    scheme_file_option,
    Option(WHAT, "--exclude PATTERN", "Leave these nodes in float: a glob, or re:REGEX. Repeatable.", multiple=True),
    target_option,
    range_option(
        "Set the calibration method, such as minmax, percentile:99.99 or mse, or 'list'.  "
        "[default: the best of several]"
    ),
    Option(
        WHAT,
        "--encodings PATH",
        "Take formats and scales of tensors from encodings of AIMET or TensorQuantOverrides, as JSON.",
        advanced=True,
    ),
    pass_option("Apply a pass first", WHAT),
    _type(
        "--emit [fastest|qdq|ort]",
        "Use onnxruntime's own operators where they measure faster, nowhere, or wherever they fit.",
        default="fastest",
    ),
    _type(
        "--io [float|quantized]",
        "Keep inputs and outputs, or write them as integers where the plan quantizes them.",
        default="float",
    ),
    _type("--strip-metadata", "Remove the exporter's notes about nodes."),
)
"""Adds the scheme, the target and the passes, which a command takes as ``request``."""


# Accuracy: `goal`.

accuracy_option = Option(
    ACCURACY,
    "--accuracy EFFORT",
    "Try accuracy methods: off, fast, full, or any of ranges,equalization,awq,gptq.",
    type=EFFORT,
    is_eager=True,
    default="fast",
)


def metric_of(metric: str | None, max_drop: float | None) -> Callable[[], Metric | None]:
    """Return a function that loads a metric with its labels, if there is one.

    Raises:
        UsageError: if only a drop is given.
    """
    from onnxq.evaluation.metrics import load_metric

    if max_drop is not None and metric is None:
        raise click.UsageError("--max-drop is about a --metric; give one, such as --metric top1:labels.npy")
    return functools.partial(load_metric, metric) if metric is not None else lambda: None


def _build_goal(
    min_sqnr: float,
    metric: str | None,
    max_drop: float | None,
    force: bool,
    exact: bool,
    prefer: str,
    max_size: str | None,
) -> Callable[[], Goal]:
    from onnxq.evaluation.goal import Goal

    load = metric_of(metric, max_drop)
    if metric is not None and given_of("--min-sqnr"):
        raise click.UsageError("--metric replaces --min-sqnr; leave one of them out")
    goal = Goal(min_sqnr, None, max_drop or 0.0, force, exact, prefer, max_size)
    # Labels are read last, so that other errors of the command line come first.
    return lambda: replace(goal, metric=load())


goal_options = packed(
    "goal",
    _build_goal,
    Option(ACCURACY, "--min-sqnr DECIBELS", "Require this SQNR of the worst output.", type=float, default=20.0),
    Option(ACCURACY, "--metric METRIC", "Require a metric instead: top1, top1:LABELS.npy or FILE.py:FUNCTION."),
    Option(ACCURACY, "--max-drop NUMBER", "Allow the metric to drop by this much.  [default: 0]", type=FROM_ZERO),
    Option(ACCURACY, "--force", "Write the result even if it misses the goal."),
    Option(ACCURACY, "--exact", "Require the scheme's bits for all weights.", advanced=True),
    Option(
        SPEED,
        "--prefer [speed|size]",
        "Take the fastest plan, or the smallest file that meets the goal.",
        advanced=True,
        type=PREFERENCE,
        default="speed",
    ),
    Option(
        ACCURACY,
        "--max-size SHARE",
        "Choose 2, 4, 8 bits or float for each weight, to fit this share of the float model, or 300MB.",
        advanced=True,
    ),
)
"""Adds the goal, which a command takes as ``goal``: a function that loads labels and returns it."""


# Effort and time: `budget`.


def latency_option(text: str, seconds: float = 2.0, *, advanced: bool = False) -> Option:
    """Return the option of the seconds for timing."""
    return Option(SPEED, "--latency-seconds SECONDS", text, advanced=advanced, type=FROM_ZERO, default=seconds)


result_latency_option = latency_option("Compare latency for this long; 0 skips all timing.", advanced=True)
threads_option = Option(SPEED, "--threads COUNT", "Time with this many threads.  [default: all cores]")
cluster_option = Option(
    CALIBRATION, "--cluster ADDRESS", "Calibrate on the Dask cluster of this scheduler.", advanced=True
)


def _build_budget(time_limit: float | None, engine: str | None = None, **settings: Any) -> Budget:
    from onnxq.pipeline.request import Budget

    return Budget(**settings, time_limit=time_limit or math.inf, engine=engine or "")


budget_options = packed(
    "budget",
    _build_budget,
    Option(SPEED, "--search [off|fast|full]", "Search for the fastest plan, or apply the scheme.", default="fast"),
    Option(SPEED, "--time-limit SECONDS", "Limit the total time.", type=ABOVE_ZERO),
    threads_option,
    Option(
        SPEED,
        "--engine NAME[:PLACE]",
        "Verify and time on this engine, such as ssh:HOST.  [default: that of --target]",
        **once("run the command for each engine"),
    ),
    result_latency_option,
    Option(
        SPEED,
        "--no-cache cache",
        "Measure all times anew, and keep none of them for the next run.",
        advanced=True,
        flag_value=False,
        default=True,
    ),
    cluster_option,
    also=("accuracy",),
)
"""Adds effort and time, which a command takes with --accuracy as ``budget``."""


# Training: `training`.

_training, _optimizer = (functools.partial(Option, group) for group in (TRAINING, OPTIMIZER))
training_options = packed(
    "training",
    Training,
    _training("--labels PATH", "Train towards the classes of this .npy file, one for each sample of --calib."),
    _training(
        "--loss FILE.py:FUNCTION",
        "Minimize a function of outputs, the float model's outputs and inputs.  [default: the error]",
        default="",
    ),
    _training(
        "--learn NAMES",
        "Train these parameters.",
        type=lambda text: tuple(name.strip() for name in text.split(",")),
        default=",".join(LEARNED),
    ),
    _training(
        f"--blocks [{'|'.join(BLOCKS)}]",
        "Train blocks of a few weights before the whole model, never, or only them.",
        default="first",
    ),
    _training("--epochs COUNT", "Pass over the samples this many times.  [default: depends on their number]"),
    _training("--minutes COUNT", "Limit the time of training.  [default: none]", type=ABOVE_ZERO),
    _training(
        "--device NAME", "Train on this torch device, such as cpu or cuda.  [default: cuda if torch has it]", default=""
    ),
    _optimizer("--batch COUNT", "Take this many samples in each step.  [default: 32, or an eighth if there are few]"),
    _optimizer(
        "--rate SHARE", "Set the initial learning rate, relative to each tensor.  [default: 0.001]", type=ABOVE_ZERO
    ),
    _optimizer("--patience COUNT", "Stop after this many epochs without a gain.  [default: never]"),
    _optimizer("--seed NUMBER", "Seed the order of samples.", type=click.IntRange(min=0), default=0),
)
"""Adds how a model is trained, which a command takes as ``training``."""


# Rewriting: `verify`.

changes_option = Option(OUTPUT, "--report PATH", "Write the changes and skipped matches of every pass as JSON.")


def _build_verify(data: Path | None, tolerance: float, limit: int | None, **settings: Any) -> Verify:
    from onnxq.passes.preparing.rewriting import Verify

    return Verify(data, tolerance, limit or Verify.limit, _build_images(**settings))


verify_options = packed(
    "verify",
    _build_verify,
    Option(DATA, "--data PATH", "Compare on these samples, as --calib of quantize.  [default: generated inputs]"),
    Option(
        ACCURACY,
        "--tolerance SHARE",
        "Allow this difference, relative to an output's largest value.",
        type=FROM_ZERO,
        default=1e-5,
    ),
    _limit("Use at most this many samples."),
    *_IMAGES,
)
"""Adds how a rewritten model is compared, which a command takes as ``verify``."""
