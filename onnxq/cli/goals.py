"""Options that say how faithful a model has to be and what may be spent, packed into values of quantize()."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import click

from onnxq.cli.groups import EFFORT, ENGINE, FIDELITY, SPEED, Command, option, with_options
from onnxq.cli.options import FILE, FiniteRange, time_to_spend
from onnxq.cli.wanted import is_given

accuracy_option: Callable[[Command], Command] = option(
    "--accuracy",
    group=FIDELITY,
    type=EFFORT,
    is_eager=True,
    metavar="EFFORT",
    default="fast",
    show_default=True,
    help="Methods that make codes more faithful, each kept only where it lowers noise: off, fast, full, or "
    "any of ranges,migration,scaling,compensation,tables,bias.",
)

seconds_option: Callable[[Command], Command] = time_to_spend("Time to spend on comparing latency; 0 skips all timing.")

threads_option: Callable[[Command], Command] = option(
    "--threads",
    group=SPEED,
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Threads inside an operator wherever time is measured.  [default: all cores]",
)


def goal_options(command: Command) -> Command:
    """Add what says how faithful the model has to be, which a command takes as one argument ``goal``."""

    @functools.wraps(command)
    def with_goal(*args: Any, **kwargs: Any) -> None:
        from onnxq.evaluation.goal import Goal
        from onnxq.evaluation.metrics import load_metric

        names = ("min_sqnr", "metric", "max_drop", "force", "exact", "prefer")
        min_sqnr, metric, max_drop, *others = (kwargs.pop(name) for name in names)
        if max_drop is not None and metric is None:
            raise click.UsageError("--max-drop is about a --metric; give one, such as --metric top1:labels.npy")
        if metric is not None and is_given("min_sqnr"):
            raise click.UsageError("--metric judges instead of --min-sqnr; leave one of them out")
        # Labels are read last: what else is wrong with the command line is told without them.
        made = functools.partial(load_metric, metric) if metric is not None else lambda: None
        command(*args, goal=lambda: Goal(min_sqnr, made(), max_drop or 0.0, *others), **kwargs)

    return with_options(
        with_goal,
        option(
            "--min-sqnr",
            group=FIDELITY,
            type=float,
            metavar="DECIBELS",
            default=20.0,
            show_default=True,
            help="Decibels the worst output must have.",
        ),
        option(
            "--metric",
            group=FIDELITY,
            metavar="METRIC",
            help="Judge by top1:LABELS.npy, FILE.py:FUNCTION or MODULE:FUNCTION instead, on samples in their order.",
        ),
        option(
            "--max-drop",
            group=FIDELITY,
            type=FiniteRange(min=0),
            metavar="NUMBER",
            help="How much the metric may lose.  [default: 0]",
        ),
        accuracy_option,
        option("--force", group=FIDELITY, is_flag=True, help="Write the result even if it is refused."),
        option(
            "--exact",
            group=FIDELITY,
            is_flag=True,
            help="Refuse the result unless all weights have the bits that were asked for.",
        ),
        option(
            "--prefer",
            group=SPEED,
            type=click.Choice(["speed", "size"]),
            default="speed",
            show_default=True,
            help="Take the fastest plan that is faithful enough, or the fastest of those in which as many weights "
            "as can be have 4 bits instead of 8.",
        ),
    )


measurements_option = option(
    "--measurements",
    group=SPEED,
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Models that a search builds and runs at most; unlike --budget, the same the next time.",
)
"""Adds how many models a search tries to a command that has `speed_options` too, which are to stand above it."""


def speed_options(command: Command) -> Command:
    """Add how much is measured, which a command takes with --accuracy and ``collection`` as one argument ``budget``."""

    @functools.wraps(command)
    def with_budget(*args: Any, **kwargs: Any) -> None:
        from onnxq.steps.request import Budget

        latency, limit = kwargs.pop("seconds"), kwargs.pop("limit_seconds") or math.inf
        measurements = kwargs.pop("measurements", None) or math.inf
        given = {name: kwargs.pop(name) for name in ("search", "accuracy", "collection", "threads")}
        engine = kwargs.pop("engine") or ""
        limits = {"latency_seconds": latency, "time_limit": limit, "max_candidates": measurements}
        given["profile_cache"] = kwargs.pop("costs")
        command(*args, budget=Budget(**given, **limits, engine=engine), **kwargs)

    return with_options(
        with_budget,
        option(
            "--search",
            group=SPEED,
            type=click.Choice(["off", "fast", "full"]),
            default="fast",
            show_default=True,
            help="Measure what each node costs and adds in noise, and take the fastest plan that is faithful enough; "
            "off takes the scheme as it is.",
        ),
        seconds_option,
        threads_option,
        option(
            "--engine",
            group=SPEED,
            type=ENGINE,
            metavar="NAME[:PLACE]",
            help="What verifies and times the result, such as openvino, onnxruntime-web:FOLDER, python:PATH or "
            "ssh:HOST.  [default: that of --target, where it is installed]",
        ),
        option(
            "--budget",
            "limit_seconds",
            group=SPEED,
            type=FiniteRange(min=0, min_open=True),
            metavar="SECONDS",
            help="Time for all of it, of which calibrating and judging the result have theirs for certain.",
        ),
        option(
            "--costs",
            group=SPEED,
            type=FILE,
            help="Keep the node times that a search measures in this file, for the next one.",
        ),
    )
