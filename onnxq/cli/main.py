"""The command line: parse, call, print. Heavy imports wait until a command runs."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.bench import bench
from onnxq.cli.calibration import calibrate, chosen_scheme, stats
from onnxq.cli.dequantize import dequantize
from onnxq.cli.options import collection_options, image_options

if TYPE_CHECKING:
    from onnxq.calibration.images import ImageOptions
    from onnxq.calibration.resume import Collection

_BAD_INPUT = 2
_BELOW_FIDELITY = 3

_EPILOG = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input (nothing written), 3 below the wanted fidelity."

# Names may hold the characters that separate fields and lines.
_ONE_FIELD = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})

_MODEL = click.argument("model", type=click.Path(path_type=Path))


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="onnxq")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Quantize ONNX models: calibrate, choose, rewrite, and prove the result on onnxruntime."""


@cli.command(epilog=_EPILOG)
@_MODEL
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    help="Samples: a folder or file of .npz, .npy, images, or ONNX test data.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write.  [default: MODEL.PRESET.onnx in the current folder]",
)
@click.option("--preset", help="What to do; see onnxq presets.  [default: int8]")
@click.option(
    "--scheme", "scheme_file", type=click.Path(path_type=Path), help="TOML file of rules instead of a preset."
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave these nodes in float: a glob, or re:REGEX. Repeatable."
)
@click.option(
    "--range",
    "range_text",
    metavar="METHOD",
    help="minmax, average, percentile:99.99, entropy, mse, histogram, fixed:LOW,HIGH, auto, or one of a plugin."
    "  [default: the best of minmax, percentile and mse, measured]",
)
@click.option("--target", default="onnxruntime-cpu", show_default=True, help="The runtime to plan for.")
@click.option("--min-sqnr", type=float, default=20.0, show_default=True, help="Decibels the worst output must have.")
@click.option(
    "--metric",
    metavar="METRIC",
    help="Judge by top1:LABELS.npy, FILE.py:FUNCTION or MODULE:FUNCTION instead, on the samples in their order.",
)
@click.option("--max-drop", type=click.FloatRange(min=0), help="How much the metric may lose.  [default: 0]")
@click.option(
    "--search",
    type=click.Choice(["off", "fast", "full"]),
    default="fast",
    show_default=True,
    help="Measure what each node costs and adds in noise, and take the fastest plan that is faithful enough; off takes "
    "the scheme as it is.",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Carry out the plan of this file as it is, instead of a preset, scheme or search.",
)
@click.option("--plan-out", type=click.Path(path_type=Path), help="Write the plan that was carried out as TOML.")
@click.option(
    "--emit",
    type=click.Choice(["qdq", "ort"]),
    default="qdq",
    show_default=True,
    help="Standard ONNX, or onnxruntime's own operators for blocked weights where they fit.",
)
@click.option(
    "--strict-types",
    is_flag=True,
    help="Write each number in its own ONNX type, even where onnxruntime cannot load it.",
)
@click.option("--force", is_flag=True, help="Write the model even below --min-sqnr.")
@click.option("--limit", type=click.IntRange(min=1), help="Use at most this many samples.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Time to spend on comparing latency; 0 skips it.",
)
@click.option("--report", type=click.Path(path_type=Path), help="Write the plan and all figures as JSON.")
@click.option("--dry-run", is_flag=True, help="Print the plan, one node a line, and write nothing.")
@collection_options
@image_options
def quantize(
    model: Path,
    calib: Path | None,
    output: Path | None,
    preset: str | None,
    scheme_file: Path | None,
    exclude: tuple[str, ...],
    range_text: str | None,
    target: str,
    min_sqnr: float,
    metric: str | None,
    max_drop: float | None,
    search: str,
    plan_file: Path | None,
    plan_out: Path | None,
    emit: str,
    strict_types: bool,
    force: bool,
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
    from onnxq.calibration.range_table import parse_range
    from onnxq.cli import terminal
    from onnxq.metrics import load_metric
    from onnxq.planning.plan_file import load_plan, save_plan
    from onnxq.publish import check_output

    given = click.get_current_context().get_parameter_source
    if plan_file is not None and any(
        given(name) is click.core.ParameterSource.COMMANDLINE for name in ("preset", "scheme_file", "search", "exclude")
    ):
        raise click.UsageError(
            "--plan says what happens to every node; leave out --preset, --scheme, --exclude and --search"
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
    if dry_run:
        for decision in pipeline.plan(model, scheme=scheme, target=target).decisions:
            fields = (decision.mode, decision.op_type, decision.node, decision.reason)
            click.echo("\t".join(field.translate(_ONE_FIELD) for field in fields))
        return
    if calib is None:
        raise click.UsageError("give --calib with representative samples: they set the scales and prove the result")
    replay = load_plan(plan_file) if plan_file is not None else None
    output = output or Path(f"{model.stem}.{replay.scheme if replay is not None else scheme.name}.onnx")
    for option, path in (("--report", report), ("--plan-out", plan_out)):
        if path is not None:
            check_output(path, model)
            if path.resolve() == output.resolve():
                raise click.UsageError(f"{option} {path} is the output itself; give another name")
    if report is not None and plan_out is not None and report.resolve() == plan_out.resolve():
        raise click.UsageError(f"--report and --plan-out are both {report}; give one of them another name")
    with terminal.progress_bars() as progress:
        done = pipeline.quantize(
            model,
            calib,
            output,
            scheme=scheme,
            target=target,
            ranges=parse_range(range_text) if range_text is not None else None,
            min_sqnr=min_sqnr,
            metric=load_metric(metric) if metric is not None else None,
            max_drop=max_drop or 0.0,
            search=search,
            replay=replay,
            emit="strict" if strict_types else emit,
            collection=collection,
            chain=chain,
            force=force,
            limit=limit,
            images=images,
            seconds=seconds,
            progress=progress,
        )
    terminal.print_report(done.report)
    if report is not None:
        done.report.save(report)
    if plan_out is not None:
        save_plan(done.report.plan, plan_out)
    click.echo(done.report.output)


@cli.command()
def presets() -> None:
    """List the presets of quantize, one a line."""
    from onnxq.presets import DESCRIPTIONS

    for name, description in DESCRIPTIONS.items():
        click.echo(f"{name}\t{description}")


cli.add_command(bench)
cli.add_command(calibrate)
cli.add_command(dequantize)
cli.add_command(stats)


@cli.command(epilog=_EPILOG)
@_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(model: Path, as_json: bool) -> None:
    """Show what is in MODEL: operators, types, sizes, and what is quantized and how."""
    from onnxq.cli import terminal
    from onnxq.inspection import inspect_model

    found = inspect_model(model)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        terminal.print_inspection(found)


@cli.command(epilog=_EPILOG)
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Samples, as --calib takes them.")
@click.option("--limit", type=click.IntRange(min=1), help="Use at most this many samples.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@image_options
def compare(
    reference: Path,
    candidate: Path,
    data: Path,
    limit: int | None,
    as_json: bool,
    images: ImageOptions | None,
) -> None:
    """Run two models on the same samples and print how well each output agrees."""
    from onnxq.cli import terminal
    from onnxq.evaluate import compare_files

    agreement = compare_files(reference, candidate, data, images=images, limit=limit)
    if as_json:
        click.echo(json.dumps(agreement.to_dict(), indent=2))
    else:
        terminal.print_agreement(agreement)


def main() -> None:
    """Run the command line and exit: an error is one sentence on stderr, a fault in onnxq asks for a report."""
    debug = "--debug" in sys.argv[1:]
    # The flag is taken wherever it stands.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    # Graphs are millions of small objects that live as long as the command; looking through them often finds nothing.
    gc.set_threshold(100_000, 50, 100)
    try:
        cli.main(arguments, prog_name="onnxq", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("onnxq: stopped; nothing was written", err=True)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        _exit_with_sentence(error)


def _exit_with_sentence(error: Exception) -> None:
    from onnxq.errors import FidelityError, OnnxqError

    if isinstance(error, FidelityError):
        from onnxq.cli import terminal

        terminal.print_report(error.report)
        click.echo(f"onnxq: {error}", err=True)
        sys.exit(_BELOW_FIDELITY)
    if isinstance(error, OnnxqError):
        click.echo(f"onnxq: {error}", err=True)
        sys.exit(_BAD_INPUT)
    click.echo(
        f"onnxq: a fault in onnxq ({type(error).__name__}: {error}); run again with --debug and report it", err=True
    )
    sys.exit(1)
