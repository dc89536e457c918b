"""The command that trains what becomes codes. Heavy imports wait until it runs."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.goals import (
    goal_options,
    measurements_option,
    seconds_option,
    speed_options,
    threads_option,
)
from onnxq.cli.groups import ONCE, OUTPUT, TRAINING, WHAT, Command, GroupedCommand, option, with_options
from onnxq.cli.options import (
    BELOW_FIDELITY,
    EXIT_CODES,
    FILE,
    READING_EXIT_CODES,
    FiniteRange,
    batch_option,
    collection_options,
)
from onnxq.cli.output import Output, output_options
from onnxq.cli.wanted import NO_SAMPLES, Asked, data_options, scheme_options
from onnxq.errors import OnnxqError
from onnxq.training.settings import BLOCKS, Training, TrainingProgress

if TYPE_CHECKING:
    from onnxq.calibration.calibrate import Collection
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline import Quantized
    from onnxq.steps.request import Budget
if TYPE_CHECKING:
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline import Quantized
    from onnxq.planning.plan import Decision, Plan
    from onnxq.steps.request import Budget


def training_options(command: Command) -> Command:
    """Add how a model is trained to a command, which takes it as one argument ``training``."""

    @functools.wraps(command)
    def with_training(*args: Any, **kwargs: Any) -> None:
        names = (
            "labels",
            "loss",
            "blocks",
            "epochs",
            "batch",
            "rate",
            "patience",
            "seed",
            "minutes",
            "device",
        )
        given = {name: kwargs.pop(name) for name in names}
        learn = tuple(name.strip() for name in kwargs.pop("learn").split(","))
        command(*args, training=Training(learn=learn, **given), **kwargs)

    return with_options(
        with_training,
        option(
            "--labels",
            group=TRAINING,
            type=FILE,
            help="Learn the classes of this .npy file, one for each sample of --calib.",
        ),
        option(
            "--loss",
            group=TRAINING,
            metavar="FILE.py:FUNCTION",
            default="",
            help="Make small what this function of outputs, the float model's outputs and inputs returns.  "
            "[default: the noise on the outputs, without labels]",
        ),
        option(
            "--learn",
            group=TRAINING,
            metavar="NAMES",
            default="weights,biases,scales,zero-points",
            show_default=True,
            help="What changes.",
        ),
        option(
            "--blocks",
            group=TRAINING,
            type=click.Choice(BLOCKS),
            default="first",
            show_default=True,
            help="Let blocks of a few weights learn one after the other before all learn together, or only them.",
        ),
        option(
            "--epochs",
            group=TRAINING,
            metavar="COUNT",
            type=click.IntRange(min=1),
            help="How often samples are seen.  [default: by their number]",
        ),
        option(
            "--batch",
            group=TRAINING,
            metavar="COUNT",
            type=click.IntRange(min=1),
            help="Samples of a step.  [default: 32, or an eighth of few]",
        ),
        option(
            "--rate",
            group=TRAINING,
            metavar="SHARE",
            type=FiniteRange(min=0, min_open=True),
            help="How much of its size a weight may change in the first steps.  [default: what does best in a few]",
        ),
        option(
            "--patience",
            group=TRAINING,
            metavar="COUNT",
            type=click.IntRange(min=1),
            help="Epochs without gain until it ends.  [default: all are run]",
        ),
        option(
            "--minutes",
            group=TRAINING,
            type=FiniteRange(min=0, min_open=True),
            metavar="COUNT",
            help="Time for all that learns, of which blocks take half.  [default: what it takes]",
        ),
        option(
            "--seed",
            group=TRAINING,
            metavar="NUMBER",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Seed of the order of samples.",
        ),
        option(
            "--device",
            group=TRAINING,
            metavar="NAME",
            default="",
            help="Device of torch, such as cpu or cuda.  [default: a GPU where there is one]",
        ),
    )


@click.command(cls=GroupedCommand, short_help="Quantize a model and train what becomes codes.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@data_options
@scheme_options
@option(
    "--plan",
    "plan_file",
    group=WHAT,
    type=FILE,
    help="Train what this plan makes codes, such as one that onnxq plan wrote.",
)
@training_options
@goal_options
@seconds_option
@threads_option
@output_options("MODEL.PRESET.onnx")
def train(
    model: Path,
    output: Output,
    data: Data | None,
    asked: Asked,
    plan_file: Path | None,
    training: Training,
    goal: Callable[[], Goal],
    accuracy: str,
    seconds: float,
    threads: int | None,
    collection: Collection | None,
) -> None:
    """Quantize MODEL as its scheme or a plan says, train what becomes codes, and write it when it is verified.

    Without labels, the outputs of the float model are learned. Killed, the same command goes on where it was.

    Prints the name of the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq.steps.request import Budget
    from onnxq.training import require_torch

    require_torch()
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    asked = asked.following(plan_file)
    file = output.named(f"{model.stem}.{asked.name}.onnx", model, {}, (*data.given, plan_file))
    budget = Budget("off", accuracy, seconds, threads=threads, collection=collection, layers=output.kept.layers)
    if collection is not None and collection.most_bytes is not None:
        training = replace(training, memory=collection.most_bytes)
    report = output.of(lambda: trained(model, file, data, asked, goal(), budget, training, quiet=output.quiet))
    click.echo(report.to_json() if output.as_json else report.output)


def trained(
    model: Path, output: Path, data: Data, asked: Asked, goal: Goal, budget: Budget, training: Training, *, quiet: bool
) -> Quantized:
    """Run train() with bars that tell of its progress."""
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.steps.request import QuantizationRequest
    from onnxq.training.pipeline import state_folder
    from onnxq.training.pipeline import train as train_model

    wanted = QuantizationRequest.of(asked.scheme, asked.target, asked.prepare)
    notes: dict[str, str] = {}
    with progress_bars(budget.time_limit, notes, quiet=quiet) as told:
        budget = replace(budget, progress=told)
        training = replace(training, on_progress=functools.partial(note, notes))
        try:
            return train_model(model, data, output, scheme=wanted, goal=goal, budget=budget, training=training)
        except (KeyboardInterrupt, OnnxqError) as end:
            if (kept := state_folder(output)).exists():
                next_one = "the same command" if isinstance(end, KeyboardInterrupt) else "one that corrects this"
                click.echo(f"onnxq: what was learned is kept in {kept}; {next_one} goes on there", err=True)
            raise


def note(notes: dict[str, str], standing: TrainingProgress) -> None:
    """Keep what is said beside the progress of training.

    >>> notes = {}
    >>> note(notes, TrainingProgress(1, 8, loss=0.0123, noise_to_signal=0.01))
    >>> notes
    {'train': 'loss 0.0123, 20.0 dB'}
    """
    from onnxq.numerics.affine import sqnr_of_ratio

    told = f"loss {standing.loss:.3g}, {sqnr_of_ratio(standing.noise_to_signal):.1f} dB"
    notes["blocks" if standing.block else "train"] = told


# The commands that quantize, and that only plan it. Heavy imports wait until one runs.


@click.command(cls=GroupedCommand, short_help="Quantize a model and write it when it is verified.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@data_options
@batch_option
@scheme_options
@option(
    "--plan",
    "plan_file",
    group=WHAT,
    type=FILE,
    help="Carry out the plan of this file as it is, instead of a preset, scheme or search.",
)
@option(
    "--train",
    "minutes",
    group=TRAINING,
    type=FiniteRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Train the fastest plan that is just not faithful enough, and take it if it is then.",
)
@goal_options
@speed_options
@measurements_option
@output_options("MODEL.PRESET.onnx")
@option("--plan-out", group=OUTPUT, type=FILE, help="Write the plan that was carried out as TOML.")
@option("--dry-run", group=OUTPUT, is_flag=True, help="Print the plan, one node a line, and write nothing.")
def quantize(
    model: Path,
    output: Output,
    data: Data | None,
    asked: Asked,
    plan_file: Path | None,
    minutes: float | None,
    goal: Callable[[], Goal],
    budget: Budget,
    plan_out: Path | None,
    dry_run: bool,
) -> None:
    """Quantize MODEL and write it when it is verified.

    Prints the name of the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq import pipeline

    if plan_file is not None and dry_run:
        raise click.UsageError("--dry-run shows what a scheme would do, and a --plan says that itself; leave one out")
    if dry_run:
        found = pipeline.plan(model, scheme=asked.rules, target=asked.target, prepare=asked.prepare)
        click.echo(_as_json(found) if output.as_json else _as_lines(found))
        return
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    asked = asked.following(plan_file)
    budget = replace(budget, layers=output.kept.layers)
    others = {"--plan-out": plan_out, "--costs": budget.profile_cache}
    file = output.named(f"{model.stem}.{asked.name}.onnx", model, others, (*data.given, plan_file))

    def run() -> Quantized:
        if minutes is None:
            return quantized(model, file, data, asked, goal(), budget, quiet=output.quiet)
        return with_training(model, file, data, asked, goal(), budget, minutes, quiet=output.quiet)

    report = output.of(run, plan_out)
    click.echo(report.to_json() if output.as_json else report.output)


@click.command(cls=GroupedCommand, short_help="Search for a plan and write it, but no model.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@data_options
@batch_option
@scheme_options
@goal_options
@speed_options
@measurements_option
@output_options("MODEL.plan.toml")
def plan(
    model: Path,
    output: Output,
    data: Data | None,
    asked: Asked,
    goal: Callable[[], Goal],
    budget: Budget,
) -> None:
    """Search for a plan of MODEL, verify what it makes, and write the plan alone.

    onnxq quantize --plan carries it out. Prints the name of the written file on stdout; progress and tables go to
    stderr.
    """
    from onnxq.planning.plan_file import save_plan

    if data is None:
        raise click.UsageError(NO_SAMPLES)
    budget = replace(budget, layers=output.kept.layers)
    file = output.named(f"{model.stem}.plan.toml", model, {"--costs": budget.profile_cache}, data.given)
    report = output.of(lambda: quantized(model, None, data, asked, goal(), budget, quiet=output.quiet))
    save_plan(report.plan, file)
    click.echo(report.to_json() if output.as_json else file)


def _as_lines(found: Plan) -> str:
    from onnxq.report.formatting import visible

    return "\n".join("\t".join(map(visible, _fields(one).values())) for one in found.decisions)


def _as_json(found: Plan) -> str:
    return json.dumps([_fields(one) for one in found.decisions], indent=2)


def _fields(decision: Decision) -> dict[str, str]:
    named = {"mode": str(decision.mode), "op_type": decision.op_type, "node": decision.node}
    return {**named, "reason": decision.reason}


def quantized(
    model: Path, output: Path | None, data: Data, asked: Asked, goal: Goal, budget: Budget, *, quiet: bool
) -> Quantized:
    """Run quantize() with bars that tell of its progress."""
    from onnxq import pipeline
    from onnxq.cli.progress_bars import progress_bars

    with progress_bars(budget.time_limit, quiet=quiet) as told:
        return pipeline.quantize(
            model,
            data,
            output,
            scheme=asked.scheme,
            target=asked.target,
            prepare=asked.prepare,
            goal=goal,
            budget=replace(budget, progress=told),
        )


def with_training(
    model: Path, output: Path, data: Data, asked: Asked, goal: Goal, budget: Budget, minutes: float, *, quiet: bool
) -> Quantized:
    """Run quantize_and_train() with bars that tell of its progress."""
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.steps.request import QuantizationRequest
    from onnxq.training.pipeline import quantize_and_train
    from onnxq.training.settings import Training

    notes: dict[str, str] = {}
    with progress_bars(notes=notes, quiet=quiet) as told:
        return quantize_and_train(
            model,
            data,
            output,
            scheme=QuantizationRequest.of(asked.scheme, asked.target, asked.prepare),
            goal=goal,
            budget=replace(budget, progress=told),
            training=Training(blocks="no", minutes=minutes, on_progress=partial(note, notes)),
        )


# The command that fills a folder for transformers.js. Heavy imports wait until it runs.

_NAMES = ("q8", "int8", "uint8", "q4", "q4f16", "fp16", "bnb4")


@click.command("web-folder", short_help="Write the dtypes of a folder for transformers.js.", epilog=EXIT_CODES)
@click.argument("folder", type=FILE)
@click.option(
    "--calib",
    type=FILE,
    required=True,
    **ONCE,
    help="Samples; of several sessions, a folder with one for each, called after it, such as encoder_model.npz.",
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(_NAMES), multiple=True, help="Write this dtype. Repeatable.  [default: all]"
)
@click.option("--target", metavar="NAME", default="onnxruntime-web", show_default=True, help="The runtime.")
@click.option(
    "--min-sqnr",
    type=float,
    metavar="DECIBELS",
    default=20.0,
    show_default=True,
    help="Decibels the worst output must have.",
)
@click.option(
    "--search",
    type=click.Choice(("off", "fast", "full")),
    default="fast",
    show_default=True,
    help="How much is tried and measured for each model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def web_folder(
    folder: Path, calib: Path, dtypes: tuple[str, ...], target: str, min_sqnr: float, search: str, as_json: bool
) -> None:
    """Write the models in FOLDER/onnx in the dtypes of transformers.js, under the names that it looks for.

    All sessions of a pipeline are calibrated together: what one makes, the next is given. A dtype whose sessions,
    running one behind the other, are too noisy is refused as a whole, and the others are written.
    """
    from onnxq.cli import tables
    from onnxq.commands.web_folder import DTYPES, write_web_folder
    from onnxq.system.records import to_plain

    chosen = dtypes or tuple(DTYPES)
    found = list(write_web_folder(folder, calib, dtypes=chosen, target=target, goal=min_sqnr, budget=search))
    if as_json:
        click.echo(json.dumps(to_plain(found), indent=2, default=str))
    else:
        tables.print_written(str(folder), found)
    if any(one.refused for one in found):
        sys.exit(BELOW_FIDELITY)


# The command that lists presets.


@click.command(epilog=READING_EXIT_CODES)
def presets() -> None:
    """List the presets of quantize, one a line."""
    from onnxq.config.presets import DESCRIPTIONS

    for name, description in DESCRIPTIONS.items():
        click.echo(f"{name}\t{description}")
