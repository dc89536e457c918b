"""The command that trains what becomes codes. Heavy imports wait until it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.goals import goal_options, seconds_option, threads_option
from onnxq.cli.groups import TRAINING, WHAT, Command, GroupedCommand, option, with_options
from onnxq.cli.options import EXIT_CODES, FILE, FiniteRange, collection_options
from onnxq.cli.output import Output, output_options
from onnxq.cli.wanted import NO_SAMPLES, Asked, data_options, scheme_options
from onnxq.errors import OnnxqError
from onnxq.training.settings import BLOCKS, Training, TrainingProgress

if TYPE_CHECKING:
    from onnxq.calibration.calibrate import Collection
    from onnxq.calibration.data import Data
    from onnxq.evaluation.goal import Goal
    from onnxq.pipeline import Quantized
    from onnxq.steps.budget import Budget


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
    from onnxq.steps.budget import Budget
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
    from onnxq.steps.wanted import Wanted
    from onnxq.training.pipeline import state_folder
    from onnxq.training.pipeline import train as train_model

    wanted = Wanted.of(asked.scheme, asked.target, asked.prepare)
    notes: dict[str, str] = {}
    with progress_bars(budget.seconds, notes, quiet=quiet) as told:
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
    from onnxq.numerics.affine import decibels

    told = f"loss {standing.loss:.3g}, {decibels(standing.noise_to_signal):.1f} dB"
    notes["blocks" if standing.block else "train"] = told
