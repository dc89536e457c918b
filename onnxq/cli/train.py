"""The command that trains what becomes codes. Heavy imports wait until it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.goals import goal_options
from onnxq.cli.groups import OUTPUT, SPEED, TRAINING, WHAT, GroupedCommand, option
from onnxq.cli.kept import Kept, kept_options, with_command
from onnxq.cli.options import EXIT_CODES, FILE, FiniteRange, collection_options, image_options
from onnxq.cli.quantize import check_files, default_name, keep, show
from onnxq.cli.wanted import NO_SAMPLES, SAID_BY_PLANS, Asked, data_options, is_given, scheme_options

if TYPE_CHECKING:
    from onnxq.data import Data
    from onnxq.execution.resume import Collection
    from onnxq.judging.goal import Goal


@click.command(cls=GroupedCommand, short_help="Quantize a model and train what becomes codes.", epilog=EXIT_CODES)
@click.argument("model", type=FILE)
@collection_options
@image_options
@data_options
@scheme_options
@option(
    "--plan", "plan_file", group=WHAT, type=FILE, help="Train what this plan, such as of onnxq plan, makes codes of."
)
@option(
    "--labels", group=TRAINING, type=FILE, help="Learn the classes of this .npy file, one for each sample of --calib."
)
@option(
    "--loss",
    group=TRAINING,
    metavar="FILE.py:FUNCTION",
    default="",
    help="Make small what this function of outputs, the float model's outputs and inputs returns.  [default: the noise "
    "on the outputs, without labels]",
)
@option(
    "--learn",
    group=TRAINING,
    metavar="NAMES",
    default="weights,biases,scales,zero-points",
    show_default=True,
    help="What changes.",
)
@option(
    "--epochs",
    group=TRAINING,
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="How often samples are seen.  [default: by their number]",
)
@option(
    "--batch",
    group=TRAINING,
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="Samples of a step.  [default: 32, or an eighth of few]",
)
@option(
    "--rate",
    group=TRAINING,
    metavar="SHARE",
    type=FiniteRange(min=0, min_open=True),
    default=1e-3,
    show_default=True,
    help="How much of its size a weight may change in the first steps.",
)
@option(
    "--patience",
    group=TRAINING,
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="Epochs without gain until it ends.  [default: all are run]",
)
@option(
    "--seed",
    group=TRAINING,
    metavar="NUMBER",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the order of samples.",
)
@goal_options
@option(
    "--seconds",
    group=SPEED,
    type=FiniteRange(min=0),
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    help="Time to spend on comparing latency; 0 skips all timing.",
)
@option(
    "-o", "--output", group=OUTPUT, type=FILE, help="File to write.  [default: MODEL.PRESET.onnx in the current folder]"
)
@kept_options
@option("--json", "as_json", group=OUTPUT, is_flag=True, help="Print the report as JSON instead of the written file.")
@option("-v", "--verbose", group=OUTPUT, is_flag=True, help="Show all reasons, plans and regions.")
@option("-q", "--quiet", group=OUTPUT, is_flag=True, help="Show neither progress nor tables.")
def train(
    model: Path,
    output: Path | None,
    data: Data | None,
    asked: Asked,
    plan_file: Path | None,
    goal: Callable[[], Goal],
    accuracy: str,
    seconds: float,
    collection: Collection | None,
    kept: Kept,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    labels: Path | None,
    loss: str,
    learn: str,
    epochs: int | None,
    batch: int | None,
    rate: float,
    patience: int | None,
    seed: int,
) -> None:
    """Quantize MODEL as its scheme or a plan says, train what becomes codes, and write it when it is verified.

    Without labels, the outputs of the float model are learned. Killed, the same command goes on where it was.

    Prints the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq import progress
    from onnxq.budget import Budget
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.planning.plan_file import load_plan
    from onnxq.report import FidelityError
    from onnxq.training import require_torch
    from onnxq.training.pipeline import train as train_model
    from onnxq.training.settings import Training
    from onnxq.wanted import Wanted

    require_torch()
    if data is None:
        raise click.UsageError(NO_SAMPLES)
    if plan_file is not None:
        if any(map(is_given, SAID_BY_PLANS)):
            raise click.UsageError("--plan says what happens to every node; leave out what else says so")
        asked = replace(asked, scheme=load_plan(plan_file))
    names = tuple(name.strip() for name in learn.split(","))
    training = Training(labels, loss, names, epochs, batch, rate, patience, seed)
    output = output or Path(f"{model.stem}.{default_name(asked)}.onnx")
    check_files(model, output, {**kept.files})
    wanted = Wanted.of(asked.scheme, asked.target, asked.prepare)
    try:
        with progress_bars() as told:
            budget = Budget(
                "off", accuracy, seconds, collection=collection, progress=progress.silent if quiet else told
            )
            done = train_model(model, data, output, scheme=wanted, goal=goal(), budget=budget, training=training)
    except FidelityError as refused:
        refused.report = with_command(refused.report)
        keep(refused.report, kept, None)
        raise
    report = with_command(done.report)
    keep(report, kept, None)
    show(report, quiet=quiet, verbose=verbose)
    click.echo(report.to_json() if as_json else report.output)
