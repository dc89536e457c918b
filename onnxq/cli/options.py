"""Options that set the fields of requests, and the values that commands receive: one table per value.

Heavy imports wait until a command runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.help import (
    ACCURACY,
    CALIBRATION,
    DATA,
    EFFORT,
    ENGINE,
    IMAGES,
    OPTIMIZER,
    OUTPUT,
    PASS,
    PASSES,
    PREFERENCE,
    PRESET,
    RANGE,
    SPEED,
    TARGET,
    TRAINING,
    TYPES,
    WHAT,
    Command,
    FiniteRange,
    field,
    is_given,
    once,
    option,
    packed,
    with_options,
)
from onnxq.errors import ModelError
from onnxq.training.settings import BLOCKS, LEARNED, Training

if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.config.scheme import Scheme
    from onnxq.data.images import ImageOptions
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline.request import Budget
    from onnxq.planning.plan import Plan

FILE = click.Path(path_type=Path)
"""The type of arguments and options that name a file or folder."""


class _ModelPath(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if not path.exists():
            raise ModelError(f"{path} does not exist; give the path of an .onnx file")
        return path


MODEL = _ModelPath()
"""The type of the model of commands that also need samples: a missing model is reported before missing samples."""

ONE_FOLDER = once("put all samples into one folder")
"""Settings of options that read samples."""

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

_COUNT = click.IntRange(min=1)
_ABOVE_ZERO = FiniteRange(min=0, min_open=True)


def _parse_size(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"expected HEIGHTxWIDTH such as 224x224, found {text!r}")
    return int(parts[0]), int(parts[1])


def _parse_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ArithmeticError):
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}") from None


def _parse_factor(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else float(Fraction(text.strip()))
    except (ValueError, ArithmeticError):
        raise click.BadParameter(f"expected a number such as 1/255 or 0.5, found {text!r}") from None


def _parse_names(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


# Samples: `images`, and `data` with them.


def _build_images(image_preset: str | None, **settings: Any) -> ImageOptions:
    from onnxq.data.images import IMAGE_PRESETS, ImageOptions

    chosen = {name.removeprefix("image_"): value for name, value in settings.items() if value is not None}
    return replace(IMAGE_PRESETS.get(image_preset or "", ImageOptions()), **chosen)


def _image(name: str, text: str, **settings: Any) -> Callable[[str], Callable[[Command], Command]]:
    return field(f"--image-{name}", group=IMAGES, advanced=True, help=text, **settings)


_IMAGES: Mapping[str, Callable[[str], Callable[[Command], Command]]] = MappingProxyType(
    {
        "image_preset": field(
            "--image-preset",
            group=DATA,
            type=click.Choice(["imagenet", "clip", "inception"]),
            metavar="KIND",
            help="Prepare images for models such as imagenet, clip or inception.",
        ),
        "image_size": _image(
            "size", "Resize images.  [default: the model's own size]", callback=_parse_size, metavar="HxW"
        ),
        "image_scale": _image(
            "scale",
            "Multiply pixels of 0..255, for float inputs.  [default: 1/255]",
            callback=_parse_factor,
            metavar="FACTOR",
        ),
        "image_mean": _image(
            "mean",
            "Subtract 1 or 3 numbers after --image-scale.  [default: 0]",
            callback=_parse_numbers,
            metavar="R,G,B",
        ),
        "image_std": _image(
            "std",
            "Divide by 1 or 3 numbers after --image-mean.  [default: 1]",
            callback=_parse_numbers,
            metavar="R,G,B",
        ),
        "image_layout": _image(
            "layout",
            "Set the axis of channels.  [default: the model's own axis of 1 or 3]",
            type=click.Choice(["NCHW", "NHWC"]),
        ),
        "image_channels": _image(
            "channels",
            "Set the order of colours; 1 channel is gray.  [default: RGB]",
            type=click.Choice(["RGB", "BGR", "GRAY"]),
        ),
        "image_fit": _image(
            "fit",
            "Stretch images to the size, or crop the centre.  [default: stretch]",
            type=click.Choice(["stretch", "crop"]),
        ),
        "image_resize": _image(
            "resize",
            "Resize the shorter side before a crop.  [default: to cover the size]",
            type=_COUNT,
            metavar="PIXELS",
        ),
    },
)
image_options = packed("images", _build_images, _IMAGES)
"""Adds the options about image files, which a command takes as ``images``."""


def limit_field(text: str = "Use at most this many samples.") -> Callable[[str], Callable[[Command], Command]]:
    """Return the option of a number of samples."""
    return field("--limit", group=DATA, type=_COUNT, metavar="COUNT", help=text)


_SPREAD = "Use at most this many samples, evenly spaced (the first ones with --chain or --metric)."
_batch = field(
    "--batch",
    group=DATA,
    advanced=True,
    type=_COUNT,
    metavar="ROWS",
    help="Run this many rows at a time.  [default: rows of a file]",
)
_chain = field(
    "--chain",
    group=DATA,
    advanced=True,
    multiple=True,
    metavar="OUTPUT=INPUT",
    help="Feed an output to an input of the next sample, for stateful models. Repeatable.",
)
_source = field(
    "--source",
    group=DATA,
    metavar="READER",
    help="Use this reader, such as audio:rate=8000.  [default: by file type]",
)
limit_option, batch_option = limit_field()("limit"), _batch("batch")
chain_option, source_option = _chain("chain"), _source("source")


def _build_data(calibration: Path | None, **settings: Any) -> Data | None:
    from onnxq.calibration.data import Data

    images = _build_images(**{name: settings.pop(name) for name in _IMAGES})
    return None if calibration is None else Data(calibration, images=images, **settings)


def _data_options(command: Command, *, batch: bool) -> Command:
    fields = {
        "calibration": field(
            "--calib",
            group=DATA,
            type=FILE,
            **ONE_FOLDER,
            help="Read samples from a folder or file: .npz, .npy, images.",
        ),
        "validation": field(
            "--validation",
            group=DATA,
            type=FILE,
            **ONE_FOLDER,
            help="Evaluate on these, with their labels.  [default: a quarter of --calib]",
        ),
        "limit": limit_field(_SPREAD),
        **({"batch": _batch} if batch else {}),
        "source": _source,
        "chain": _chain,
        "statistics": field(
            "--stats", group=CALIBRATION, advanced=True, type=FILE, help="Use these statistics from onnxq calibrate."
        ),
        **_IMAGES,
    }
    return packed("data", _build_data, fields)(command)


data_options = functools.partial(_data_options, batch=True)
"""Adds the samples, which a command takes as ``data``: None without --calib."""

training_data_options = functools.partial(_data_options, batch=False)
"""As `data_options` without --batch, which is the size of a step in training."""


def engines_option(default: str) -> Callable[[Command], Command]:
    """Return the option for the engines to run on; the command receives ``engines``."""
    return option(
        "--engine",
        "engines",
        group=SPEED,
        type=ENGINE,
        multiple=True,
        metavar="NAME[:PLACE]",
        help=f"Run on this engine, such as openvino or ssh:HOST. Repeatable.  [default: {default}]",
    )


def two_models(command: Command) -> Command:
    """Add the arguments of a command that compares two models, which takes samples as ``data``."""
    fields = {
        "calibration": field(
            "--data", group=DATA, required=True, type=FILE, **ONE_FOLDER, help="Read samples, as --calib of quantize."
        ),
        "limit": limit_field("Use at most this many samples, evenly spaced; the first ones for --chain."),
        "batch": _batch,
        "source": _source,
        "chain": _chain,
        **_IMAGES,
    }
    return with_options(
        packed("data", _build_data, fields)(command),
        click.argument("reference", type=FILE),
        click.argument("candidate", type=FILE),
        option(
            "--engine",
            group=SPEED,
            type=ENGINE,
            metavar="NAME[:PLACE]",
            **once("run the command for each engine", "onnxruntime"),
            help="Run the models on this engine, such as openvino, onnxruntime-web:FOLDER, python:PATH or ssh:HOST.  "
            "[default: onnxruntime]",
        ),
        json_option,
    )


json_option = option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print JSON.")


# The quantization itself: `request`.


def pass_option(text: str, group: str = PASSES) -> Callable[[Command], Command]:
    """Return a decorator that adds ``passes`` to a command."""
    return option(
        "-p",
        "--pass",
        "passes",
        group=group,
        type=PASS,
        multiple=True,
        metavar="NAME[:OPTION=VALUE]",
        help=f"{text}: a name from onnxq run --list, MODULE:CLASS or FILE.py:CLASS. Repeatable.",
    )


def range_option(text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``ranges`` to a command."""
    return option("--range", "ranges", group=WHAT, type=RANGE, is_eager=True, metavar="METHOD", help=text)


preset_option = option(
    "--preset",
    group=WHAT,
    type=PRESET,
    is_eager=True,
    metavar="NAME",
    help="Use this preset, or 'list'.  [default: int8; int4-block32 with --max-size or --prefer size]",
)
scheme_file_option = option(
    "--scheme", "scheme_file", group=WHAT, type=FILE, help="Use the rules in this TOML file instead of a preset."
)
target_option = option(
    "--target",
    group=WHAT,
    type=TARGET,
    is_eager=True,
    metavar="NAME",
    **once("run the command for each target", "onnxruntime-cpu"),
    help="Plan for this runtime, or 'list'.  [default: onnxruntime-cpu]",
)
plan_option = option(
    "--plan", "plan_file", group=WHAT, type=FILE, help="Apply the plan in this file, without a scheme or search."
)

SAID_BY_PLANS = (
    *("preset", "scheme_file", "encodings", "exclude", "ranges", "target"),
    *("search", "prefer", "max_size", "accuracy", "exact", "emit", "io"),
)
"""Parameters that a given plan replaces."""


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

        if any(map(is_given, SAID_BY_PLANS)):
            raise click.UsageError(
                "--plan decides for every node; leave out --preset, --scheme, --encodings, --exclude, --range, "
                "--target, --search, --prefer, --max-size, --accuracy, --exact, --emit and --io"
            )
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
    scheme = chosen_scheme(preset, scheme_file, _default_preset()).excluding(*exclude)
    if is_given("io"):
        from onnxq.config.scheme import InputsOutputs

        scheme = replace(scheme, io=InputsOutputs(io))
    if is_given("emit"):
        scheme = replace(scheme, emit=emit)
    if ranges is not None:
        scheme = replace(scheme, ranges=ranges)
    if encodings is not None:
        from onnxq.config.encodings_file import load_encodings

        scheme = replace(scheme, encodings=load_encodings(encodings))
    return Request(scheme, target, (*passes, *(("StripMetadata",) if strip_metadata else ())), (encodings,))


scheme_options = packed(
    "request",
    _build_request,
    {
        "preset": lambda name: preset_option,
        "scheme_file": lambda name: scheme_file_option,
        "exclude": field(
            "--exclude",
            group=WHAT,
            multiple=True,
            metavar="PATTERN",
            help="Leave these nodes in float: a glob, or re:REGEX. Repeatable.",
        ),
        "target": lambda name: target_option,
        "ranges": lambda name: range_option(
            "Set the calibration method, such as minmax, percentile:99.99 or mse, or 'list'.  "
            "[default: the best of several]"
        ),
        "encodings": field(
            "--encodings",
            group=WHAT,
            advanced=True,
            type=FILE,
            help="Take formats and scales of tensors from encodings of AIMET or TensorQuantOverrides, as JSON.",
        ),
        "passes": lambda name: pass_option("Apply a pass first", WHAT),
        "emit": field(
            "--emit",
            group=TYPES,
            advanced=True,
            type=click.Choice(["fastest", "qdq", "ort"]),
            default="fastest",
            show_default=True,
            help="Use onnxruntime's own operators where they measure faster, nowhere, or wherever they fit.",
        ),
        "io": field(
            "--io",
            group=TYPES,
            advanced=True,
            type=click.Choice(["float", "quantized"]),
            default="float",
            show_default=True,
            help="Keep inputs and outputs, or write them as integers where the plan quantizes them.",
        ),
        "strip_metadata": field(
            "--strip-metadata",
            group=TYPES,
            advanced=True,
            is_flag=True,
            help="Remove the exporter's notes about nodes.",
        ),
    },
)
"""Adds the scheme, the target and the passes, which a command takes as ``request``."""


# Accuracy: `goal`.

accuracy_option = option(
    "--accuracy",
    group=ACCURACY,
    type=EFFORT,
    is_eager=True,
    metavar="EFFORT",
    default="fast",
    show_default=True,
    help="Try accuracy methods: off, fast, full, or any of ranges,equalization,awq,gptq.",
)


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
    from onnxq.evaluation.metrics import load_metric

    if max_drop is not None and metric is None:
        raise click.UsageError("--max-drop is about a --metric; give one, such as --metric top1:labels.npy")
    if metric is not None and is_given("min_sqnr"):
        raise click.UsageError("--metric replaces --min-sqnr; leave one of them out")
    # Labels are read last, so that other errors of the command line come first.
    build_metric = functools.partial(load_metric, metric) if metric is not None else lambda: None
    goal = Goal(min_sqnr, None, max_drop or 0.0, force, exact, prefer, max_size)
    return lambda: replace(goal, metric=build_metric())


goal_options = packed(
    "goal",
    _build_goal,
    {
        "min_sqnr": field(
            "--min-sqnr",
            group=ACCURACY,
            type=float,
            metavar="DECIBELS",
            default=20.0,
            show_default=True,
            help="Require this SQNR of the worst output.",
        ),
        "metric": field(
            "--metric",
            group=ACCURACY,
            metavar="METRIC",
            help="Require a metric instead: top1, top1:LABELS.npy or FILE.py:FUNCTION.",
        ),
        "max_drop": field(
            "--max-drop",
            group=ACCURACY,
            type=FiniteRange(min=0),
            metavar="NUMBER",
            help="Allow the metric to drop by this much.  [default: 0]",
        ),
        "force": field("--force", group=ACCURACY, is_flag=True, help="Write the result even if it misses the goal."),
        "exact": field(
            "--exact", group=ACCURACY, advanced=True, is_flag=True, help="Require the scheme's bits for all weights."
        ),
        "prefer": field(
            "--prefer",
            group=SPEED,
            advanced=True,
            type=PREFERENCE,
            metavar="[speed|size]",
            default="speed",
            show_default=True,
            help="Take the fastest plan, or the smallest file that meets the goal.",
        ),
        "max_size": field(
            "--max-size",
            group=ACCURACY,
            advanced=True,
            metavar="SHARE",
            help="Choose 2, 4, 8 bits or float for each weight, to fit this share of the float model, or 300MB.",
        ),
    },
)
"""Adds the goal, which a command takes as ``goal``: a function that loads labels and returns it."""


# Effort and time: `budget`.


def latency_option(text: str, seconds: float = 2.0, *, advanced: bool = False) -> Callable[[Command], Command]:
    """Return a decorator that adds ``latency`` to a command: seconds for timing."""
    return option(
        "--latency-seconds",
        "latency_seconds",
        group=SPEED,
        advanced=advanced,
        type=FiniteRange(min=0),
        metavar="SECONDS",
        default=seconds,
        show_default=True,
        help=text,
    )


result_latency_option = latency_option("Compare latency for this long; 0 skips all timing.", advanced=True)
threads_option = option(
    "--threads",
    group=SPEED,
    type=_COUNT,
    metavar="COUNT",
    help="Time with this many threads.  [default: all cores]",
)


_cluster = field(
    "--cluster",
    group=CALIBRATION,
    advanced=True,
    metavar="ADDRESS",
    help="Calibrate on the Dask cluster of this scheduler.",
)
cluster_option = _cluster("cluster")


def _build_budget(time_limit: float | None, engine: str | None = None, **settings: Any) -> Budget:
    from onnxq.pipeline.request import Budget

    return Budget(**settings, time_limit=time_limit or math.inf, engine=engine or "")


_BUDGET: Mapping[str, Callable[[str], Callable[[Command], Command]]] = MappingProxyType(
    {
        "search": field(
            "--search",
            group=SPEED,
            type=click.Choice(["off", "fast", "full"]),
            default="fast",
            show_default=True,
            help="Search for the fastest plan, or apply the scheme.",
        ),
        "time_limit": field(
            "--time-limit", group=SPEED, type=_ABOVE_ZERO, metavar="SECONDS", help="Limit the total time."
        ),
        "threads": lambda name: threads_option,
        "engine": field(
            "--engine",
            group=SPEED,
            type=ENGINE,
            metavar="NAME[:PLACE]",
            **once("run the command for each engine"),
            help="Verify and time on this engine, such as ssh:HOST.  [default: that of --target]",
        ),
        "latency_seconds": lambda name: result_latency_option,
        "cache": field(
            "--no-cache",
            group=SPEED,
            advanced=True,
            is_flag=True,
            flag_value=False,
            default=True,
            help="Measure all times anew, and keep none of them for the next run.",
        ),
        "cluster": _cluster,
    }
)
budget_options = packed("budget", _build_budget, _BUDGET, ("accuracy",))
"""Adds effort and time, which a command takes with --accuracy as ``budget``."""


# Training: `training`.


def _training(name: str, text: str, **settings: Any) -> Callable[[str], Callable[[Command], Command]]:
    return field(name, help=text, **{"group": TRAINING, **settings})


training_options = packed(
    "training",
    Training,
    {
        "labels": _training(
            "--labels", "Train towards the classes of this .npy file, one for each sample of --calib.", type=FILE
        ),
        "loss": _training(
            "--loss",
            "Minimize a function of outputs, the float model's outputs and inputs.  [default: the error]",
            metavar="FILE.py:FUNCTION",
            default="",
        ),
        "learn": _training(
            "--learn",
            "Train these parameters.",
            metavar="NAMES",
            default=",".join(LEARNED),
            show_default=True,
            callback=_parse_names,
        ),
        "blocks": _training(
            "--blocks",
            "Train blocks of a few weights before the whole model, never, or only them.",
            type=click.Choice(BLOCKS),
            default="first",
            show_default=True,
        ),
        "epochs": _training(
            "--epochs",
            "Pass over the samples this many times.  [default: depends on their number]",
            type=_COUNT,
            metavar="COUNT",
        ),
        "minutes": _training(
            "--minutes", "Limit the time of training.  [default: none]", type=_ABOVE_ZERO, metavar="COUNT"
        ),
        "device": _training(
            "--device",
            "Train on this torch device, such as cpu or cuda.  [default: cuda if torch has it]",
            metavar="NAME",
            default="",
        ),
        "batch": _training(
            "--batch",
            "Take this many samples in each step.  [default: 32, or an eighth if there are few]",
            group=OPTIMIZER,
            type=_COUNT,
            metavar="COUNT",
        ),
        "rate": _training(
            "--rate",
            "Set the initial learning rate, relative to each tensor.  [default: 0.001]",
            group=OPTIMIZER,
            metavar="SHARE",
            type=_ABOVE_ZERO,
        ),
        "patience": _training(
            "--patience",
            "Stop after this many epochs without a gain.  [default: never]",
            group=OPTIMIZER,
            type=_COUNT,
            metavar="COUNT",
        ),
        "seed": _training(
            "--seed",
            "Seed the order of samples.",
            group=OPTIMIZER,
            metavar="NUMBER",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
        ),
    },
)
"""Adds how a model is trained, which a command takes as ``training``."""


# Rewriting.

samples_option = option(
    "--data",
    group=DATA,
    type=FILE,
    help="Compare on these samples, as --calib of quantize.  [default: generated inputs]",
)
tolerance_option = option(
    "--tolerance",
    group=ACCURACY,
    type=FiniteRange(min=0),
    metavar="SHARE",
    default=1e-5,
    show_default=True,
    help="Allow this difference, relative to an output's largest value.",
)
changes_option = option(
    "--report", group=OUTPUT, type=FILE, help="Write the changes and skipped matches of every pass as JSON."
)
