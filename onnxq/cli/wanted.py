"""Options that say which samples there are and what becomes of which nodes, packed into values of quantize()."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.groups import DATA, ONCE, PASS, PRESET, RANGE, TARGET, WHAT, Command, option, with_options
from onnxq.cli.options import FILE, chain_option, image_options, most_samples, source_option

if TYPE_CHECKING:
    from onnxq.config.scheme import Scheme
    from onnxq.planning.plan import Plan

NO_SAMPLES = "give --calib with representative samples: they set the scales and prove the result"

scheme_file_option: Callable[[Command], Command] = option(
    "--scheme", "scheme_file", group=WHAT, type=FILE, help="TOML file of rules instead of a preset."
)
target_option: Callable[[Command], Command] = option(
    "--target",
    group=WHAT,
    type=TARGET,
    is_eager=True,
    metavar="NAME",
    default="onnxruntime-cpu",
    show_default=True,
    help="The runtime to plan for, or list.",
)


def preset_option(told: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``preset`` to a command, told of in these words."""
    return option("--preset", group=WHAT, type=PRESET, is_eager=True, metavar="NAME", help=told)


def range_option(told: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``format_method`` to a command, told of in these words."""
    return option("--range", "format_method", group=WHAT, type=RANGE, is_eager=True, metavar="METHOD", help=told)


SAID_BY_PLANS = (
    *("preset", "scheme_file", "exclude", "format_method", "target"),
    *("search", "prefer", "accuracy", "exact", "emit", "strict_types"),
)
"""Parameters that a plan to carry out takes the place of."""


@dataclass(frozen=True)
class Asked:
    """What is to become of the model, as options say it.

    Attributes:
        scheme: the rules, or a plan to carry out.
        target: name of the runtime.
        prepare: names of passes.
    """

    scheme: Scheme | Plan
    target: str
    prepare: tuple[str, ...]

    @property
    def rules(self) -> Scheme:
        """The scheme, where there is no plan to carry out."""
        from onnxq.config.scheme import Scheme

        assert isinstance(self.scheme, Scheme)
        return self.scheme

    @property
    def name(self) -> str:
        """How outputs are called after it."""
        from onnxq.planning.plan import Plan

        return self.scheme.scheme if isinstance(self.scheme, Plan) else self.scheme.name

    def following(self, plan_file: Path | None) -> Asked:
        """Return what the plan of a file asks for in the place of options, or the same where there is no file.

        Raises:
            UsageError: options say what the plan says.
        """
        if plan_file is None:
            return self
        from onnxq.planning.plan_file import load_plan

        if any(map(is_given, SAID_BY_PLANS)):
            raise click.UsageError(
                "--plan says what happens to every node; leave out --preset, --scheme, --exclude, --range, --target, "
                "--search, --prefer, --accuracy, --exact, --emit and --strict-types"
            )
        return replace(self, scheme=load_plan(plan_file))


def is_given(name: str) -> bool:
    """Return whether a parameter stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def chosen_scheme(preset: str | None, scheme_file: Path | None) -> Scheme:
    """Return the scheme of a preset or a file.

    Raises:
        UsageError: Both are given.
        SchemeError: There is no such preset, or the file is wrong.
    """
    from onnxq.config.presets import preset_named
    from onnxq.config.scheme_file import load_scheme

    if preset is not None and scheme_file is not None:
        raise click.UsageError('give --preset or --scheme, not both; a scheme file can say base = "int8"')
    return load_scheme(scheme_file) if scheme_file is not None else preset_named(preset or "int8")


def data_options(command: Command) -> Command:
    """Add the samples to a command, which takes them with --limit, --chain and --image-* as one argument ``data``.

    It is None without --calib.
    """

    @functools.wraps(command)
    def with_data(*args: Any, **kwargs: Any) -> None:
        from onnxq.calibration.data import Data

        names = ("calib", "validation", "limit", "images", "chain", "source")
        calib, validation, limit, images, chain, source = (kwargs.pop(name) for name in names)
        # Training has another --batch, of samples of a step.
        rows = kwargs.pop("rows", None)
        data = Data(calib, validation, limit, images, chain, source=source, batch=rows) if calib is not None else None
        command(*args, data=data, **kwargs)

    return with_options(
        image_options(with_data),
        option(
            "--calib",
            group=DATA,
            type=FILE,
            **ONCE,
            help="Samples: a folder or file of .npz, .npy, images, ONNX test data, or what --source reads.",
        ),
        option(
            "--validation",
            group=DATA,
            type=FILE,
            **ONCE,
            help="Samples of their own by which the result is judged.  [default: every fourth of --calib, which "
            "nothing else uses then; all of fewer than 8, or for a function as metric]",
        ),
        most_samples("Use at most this many samples, from all over; the first ones for --chain and --metric."),
        source_option,
        chain_option,
    )


def scheme_options(command: Command) -> Command:
    """Add what says what becomes of which nodes, which a command takes as one argument ``asked``."""

    @functools.wraps(command)
    def with_scheme(*args: Any, **kwargs: Any) -> None:
        names = (
            "preset",
            "scheme_file",
            "exclude",
            "passes",
            "format_method",
            "emit",
            "strict_types",
            "strip_metadata",
        )
        preset, file, exclude, passes, ranges, emit, strict, strip = (kwargs.pop(name) for name in names)
        if strict and emit == "ort":
            raise click.UsageError("--strict-types is about standard ONNX and --emit ort is not; leave one of them out")
        scheme = chosen_scheme(preset, file).excluding(*exclude)
        if strict or is_given("emit"):
            scheme = replace(scheme, emit="strict" if strict else emit)
        if ranges is not None:
            scheme = replace(scheme, ranges=ranges)
        asked = Asked(scheme, kwargs.pop("target"), (*passes, *(("StripMetadata",) if strip else ())))
        command(*args, asked=asked, **kwargs)

    return with_options(
        with_scheme,
        preset_option("What to do, or list.  [default: int8]"),
        scheme_file_option,
        option(
            "--exclude",
            group=WHAT,
            multiple=True,
            metavar="PATTERN",
            help="Leave these nodes in float: a glob, or re:REGEX. Repeatable.",
        ),
        target_option,
        range_option(
            "minmax, extremes, average, percentile:99.99, entropy, mse, histogram, fixed:LOW,HIGH, auto, one of a "
            "plugin, or list.  [default: the best of several, measured]"
        ),
        option(
            "-p",
            "--pass",
            "passes",
            group=WHAT,
            type=PASS,
            multiple=True,
            metavar="NAME[:OPTION=VALUE]",
            help="A pass of yours, applied before onnxq prepares the model: a name of onnxq run --list, MODULE:CLASS "
            "or FILE.py:CLASS. Repeatable.",
        ),
        option(
            "--emit",
            group=WHAT,
            type=click.Choice(["fastest", "qdq", "ort"]),
            default="fastest",
            show_default=True,
            help="Operators of onnxruntime's own, for LSTM and weights in blocks: where they measure faster than "
            "standard ONNX, nowhere (qdq), or wherever they fit (ort).",
        ),
        option(
            "--strict-types",
            group=WHAT,
            is_flag=True,
            help="Write each number in its own ONNX type, even where onnxruntime cannot load it.",
        ),
        option(
            "--strip-metadata", group=WHAT, is_flag=True, help="Leave out what the exporter has written about nodes."
        ),
    )
