"""The command that quantizes. Heavy imports wait until it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.calibration import chosen_scheme
from onnxq.cli.options import (
    EXIT_CODES,
    FILE,
    FiniteRange,
    collection_options,
    image_options,
    limit_option,
    pass_option,
)

if TYPE_CHECKING:
    from onnxq.execution.resume import Collection
    from onnxq.report import Report
    from onnxq.samples.images import ImageOptions

_SAID_BY_PLANS = (
    "preset",
    "scheme_file",
    "exclude",
    "range_text",
    "target",
    "search",
    "accuracy",
    "emit",
    "strict_types",
)
# Names may hold the characters that separate fields and lines.
_ONE_FIELD = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})


@click.command(
    short_help="Quantize a model and write it when it is verified.",
    epilog=EXIT_CODES,
)
@click.argument("model", type=FILE)
@click.option(
    "--calib",
    type=FILE,
    help="Samples: a folder or file of .npz, .npy, images, or ONNX test data.",
)
@click.option(
    "--validation",
    type=FILE,
    help="Samples of their own by which the result is judged.  [default: every fourth of --calib, which nothing else "
    "uses then; all of fewer than 8, or for a metric]",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="File to write.  [default: MODEL.PRESET.onnx in the current folder]",
)
@click.option("--preset", metavar="NAME", help="What to do; see onnxq presets.  [default: int8]")
@click.option("--scheme", "scheme_file", type=FILE, help="TOML file of rules instead of a preset.")
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave these nodes in float: a glob, or re:REGEX. Repeatable."
)
@pass_option("A pass of yours, applied before onnxq prepares the model")
@click.option(
    "--range",
    "range_text",
    metavar="METHOD",
    help="minmax, average, percentile:99.99, entropy, mse, histogram, fixed:LOW,HIGH, auto, or one of a plugin."
    "  [default: the best of minmax, percentile and mse, measured]",
)
@click.option("--target", metavar="NAME", default="onnxruntime-cpu", show_default=True, help="The runtime to plan for.")
@click.option(
    "--min-sqnr",
    type=float,
    metavar="DECIBELS",
    default=20.0,
    show_default=True,
    help="Decibels the worst output must have.",
)
@click.option(
    "--metric",
    metavar="METRIC",
    help="Judge by top1:LABELS.npy, FILE.py:FUNCTION or MODULE:FUNCTION instead, on the samples in their order.",
)
@click.option(
    "--max-drop", type=FiniteRange(min=0), metavar="NUMBER", help="How much the metric may lose.  [default: 0]"
)
@click.option(
    "--search",
    type=click.Choice(["off", "fast", "full"]),
    default="fast",
    show_default=True,
    help="Measure what each node costs and adds in noise, and take the fastest plan that is faithful enough; off takes "
    "the scheme as it is.",
)
@click.option(
    "--accuracy",
    metavar="EFFORT",
    default="fast",
    show_default=True,
    help="Methods that make codes more faithful, each kept only where it lowers noise: off, fast, full, or any of "
    "ranges,migration,compensation,bias.",
)
@click.option("--costs", type=FILE, help="Keep the node times that a search measures in this file, for the next one.")
@click.option(
    "--plan",
    "plan_file",
    type=FILE,
    help="Carry out the plan of this file as it is, instead of a preset, scheme or search.",
)
@click.option("--plan-out", type=FILE, help="Write the plan that was carried out as TOML.")
@click.option(
    "--emit",
    type=click.Choice(["qdq", "ort"]),
    default="qdq",
    show_default=True,
    help="Standard ONNX, or onnxruntime's own operators for blocked weights and LSTM where they fit.",
)
@click.option(
    "--strict-types",
    is_flag=True,
    help="Write each number in its own ONNX type, even where onnxruntime cannot load it.",
)
@click.option("--strip-metadata", is_flag=True, help="Leave out what the exporter has written about nodes.")
@click.option("--force", is_flag=True, help="Write the model even below --min-sqnr.")
@click.option("--exact", is_flag=True, help="Refuse a model whose weights have not all the bits that were asked for.")
@limit_option
@click.option(
    "--seconds",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    help="Time to spend on comparing latency; 0 skips all timing.",
)
@click.option("--report", type=FILE, help="Write the plan and all figures as JSON.")
@click.option("--dry-run", is_flag=True, help="Print the plan, one node a line, and write nothing.")
@collection_options
@image_options
def quantize(
    model: Path,
    calib: Path | None,
    validation: Path | None,
    output: Path | None,
    preset: str | None,
    scheme_file: Path | None,
    exclude: tuple[str, ...],
    passes: tuple[str, ...],
    range_text: str | None,
    target: str,
    min_sqnr: float,
    metric: str | None,
    max_drop: float | None,
    search: str,
    accuracy: str,
    costs: Path | None,
    plan_file: Path | None,
    plan_out: Path | None,
    emit: str,
    strict_types: bool,
    strip_metadata: bool,
    force: bool,
    exact: bool,
    limit: int | None,
    seconds: float,
    report: Path | None,
    dry_run: bool,
    collection: Collection | None,
    chain: dict[str, str],
    images: ImageOptions | None,
) -> None:
    """Quantize MODEL and write it when it is verified.

    Prints the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq import pipeline
    from onnxq.budget import Budget
    from onnxq.cli import terminal
    from onnxq.data import Data
    from onnxq.judging.goal import Goal
    from onnxq.judging.metrics import load_metric
    from onnxq.modelfile.publish import check_output, data_file
    from onnxq.planning.plan_file import load_plan
    from onnxq.report import FidelityError

    given = click.get_current_context().get_parameter_source
    if plan_file is not None and any(given(name) is click.core.ParameterSource.COMMANDLINE for name in _SAID_BY_PLANS):
        raise click.UsageError(
            "--plan says what happens to every node; leave out --preset, --scheme, --exclude, --range, --target, "
            "--search, --accuracy, --emit and --strict-types"
        )
    if plan_file is not None and dry_run:
        raise click.UsageError("--dry-run shows what a scheme would do, and a --plan says that itself; leave one out")
    if strict_types and emit == "ort":
        raise click.UsageError("--strict-types is about standard ONNX and --emit ort is not; leave one of them out")
    if max_drop is not None and metric is None:
        raise click.UsageError("--max-drop is about a --metric; give one, such as --metric top1:labels.npy")
    if metric is not None and given("min_sqnr") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--metric judges instead of --min-sqnr; leave one of them out")
    scheme = chosen_scheme(preset, scheme_file).excluding(*exclude)
    if strict_types or given("emit") is click.core.ParameterSource.COMMANDLINE:
        scheme = replace(scheme, emit="strict" if strict_types else emit)
    if range_text is not None:
        scheme = replace(scheme, ranges=range_text)
    if strip_metadata:
        passes = (*passes, "StripMetadata")
    if dry_run:
        for decision in pipeline.plan(model, scheme=scheme, target=target, prepare=passes).decisions:
            fields = (decision.mode, decision.op_type, decision.node, decision.reason)
            click.echo("\t".join(field.translate(_ONE_FIELD) for field in fields))
        return
    if calib is None:
        raise click.UsageError("give --calib with representative samples: they set the scales and prove the result")
    replay = load_plan(plan_file) if plan_file is not None else None
    output = output or Path(f"{model.stem}.{replay.scheme if replay is not None else scheme.name}.onnx")
    written = {output.resolve(): "the output", data_file(output).resolve(): "the data of the output"}
    for option, path in (("--report", report), ("--plan-out", plan_out), ("--costs", costs)):
        if path is None:
            continue
        check_output(path, model)
        other = written.setdefault(path.resolve(), option)
        if other.startswith("-") and other != option:
            raise click.UsageError(f"{other} and {option} are both {path}; give one of them another name")
        if other != option:
            raise click.UsageError(f"{option} {path} is {other} itself; give another name")
    try:
        with terminal.progress_bars() as progress:
            done = pipeline.quantize(
                model,
                Data(calib, validation, limit=limit, images=images, chain=chain),
                output,
                scheme=replay or scheme,
                target=target,
                prepare=passes,
                goal=Goal(min_sqnr, load_metric(metric) if metric is not None else None, max_drop or 0.0, force, exact),
                budget=Budget(search, accuracy, seconds, costs, collection, progress),
            )
    except FidelityError as refused:
        _keep(refused.report, report, plan_out)
        raise
    terminal.print_report(done.report)
    _keep(done.report, report, plan_out)
    click.echo(done.report.output)


def _keep(found: Report, report: Path | None, plan_out: Path | None) -> None:
    """Write what was asked to be kept of a quantization, most of all of one that was refused."""
    from onnxq.planning.plan_file import save_plan

    if report is not None:
        found.save(report)
    if plan_out is not None:
        save_plan(found.plan, plan_out)
