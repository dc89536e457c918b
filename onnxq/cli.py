"""The command line: parse, call, print. Heavy imports wait until a command runs."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from onnxq.calibration.images import ImageOptions
    from onnxq.scheme import Scheme

_BAD_INPUT = 2
_BELOW_FIDELITY = 3

_EPILOG = "Exit codes: 0 done, 1 a fault in onnxq, 2 bad input (nothing written), 3 below the wanted fidelity."

_MODEL = click.argument("model", type=click.Path(path_type=Path))


_IMAGE_OPTIONS = ("size", "mean", "std", "channels", "fit")


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


def _image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options about image files to a command, which takes them as one argument ``images``."""

    @functools.wraps(command)
    def with_images(*args: Any, **kwargs: Any) -> None:
        from onnxq.calibration.images import ImageOptions

        given = {name: kwargs.pop(f"image_{name}") for name in _IMAGE_OPTIONS}
        chosen = {name: value for name, value in given.items() if value is not None}
        # Nothing is guessed about images: samples that are images need at least one of these options.
        command(*args, images=replace(ImageOptions(), **chosen) if chosen else None, **kwargs)

    for option in (
        click.option(
            "--image-fit",
            type=click.Choice(["stretch", "crop"]),
            help="Stretch images to the size, or keep their shape and crop the centre.  [default: stretch]",
        ),
        click.option(
            "--image-channels",
            type=click.Choice(["RGB", "BGR", "GRAY"]),
            help="Order of the colours.  [default: RGB]",
        ),
        click.option(
            "--image-std",
            callback=_parse_numbers,
            metavar="R,G,B",
            help="Divide pixels by these, after --image-mean.  [default: 1]",
        ),
        click.option(
            "--image-mean",
            callback=_parse_numbers,
            metavar="R,G,B",
            help="Subtract these from pixels in 0..1.  [default: 0]",
        ),
        click.option(
            "--image-size", callback=_parse_size, metavar="HxW", help="Resize images.  [default: the model's own size]"
        ),
    ):
        with_images = option(with_images)
    return with_images


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
@click.option("--preset", help="What to do: int8, int8-per-tensor, int8-storage.  [default: int8]")
@click.option(
    "--scheme", "scheme_file", type=click.Path(path_type=Path), help="TOML file of rules instead of a preset."
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave these nodes in float: a glob, or re:REGEX. Repeatable."
)
@click.option("--range", "range_text", help="minmax, percentile:99.99 or mse.  [default: the best of these, measured]")
@click.option("--target", default="onnxruntime-cpu", show_default=True, help="The runtime to plan for.")
@click.option("--min-sqnr", type=float, default=20.0, show_default=True, help="Decibels the worst output must have.")
@click.option("--search/--no-search", default=True, help="Leave in float what hurts too much, and everything when integers prove slower.  [default: search]")
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
@_image_options
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
    search: bool,
    force: bool,
    limit: int | None,
    seconds: float,
    report: Path | None,
    dry_run: bool,
    images: ImageOptions | None,
) -> None:
    """Quantize MODEL and write it when it is verified.

    Prints the written file on stdout; progress and the closing table go to stderr.
    """
    from onnxq import pipeline, terminal
    from onnxq.calibration.ranges import parse_range

    scheme = _scheme(preset, scheme_file).excluding(*exclude)
    if dry_run:
        for decision in pipeline.plan(model, scheme=scheme, target=target).decisions:
            click.echo("\t".join((decision.mode, decision.op_type, decision.node, decision.reason)))
        return
    if calib is None:
        raise click.UsageError("give --calib with representative samples: they set the scales and prove the result")
    with terminal.progress_bars() as progress:
        done = pipeline.quantize(
            model,
            calib,
            output or Path(f"{model.stem}.{scheme.name}.onnx"),
            scheme=scheme,
            target=target,
            ranges=parse_range(range_text) if range_text is not None else None,
            min_sqnr=min_sqnr,
            search=search,
            force=force,
            limit=limit,
            images=images,
            seconds=seconds,
            progress=progress,
        )
    terminal.print_report(done.report)
    if report is not None:
        done.report.save(report)
    click.echo(done.report.output)


@cli.command(epilog=_EPILOG)
@_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(model: Path, as_json: bool) -> None:
    """Show what is in MODEL: operators, types, sizes, and what is quantized and how."""
    from onnxq import terminal
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
@_image_options
def compare(
    reference: Path,
    candidate: Path,
    data: Path,
    limit: int | None,
    as_json: bool,
    images: ImageOptions | None,
) -> None:
    """Run two models on the same samples and print how well each output agrees."""
    from onnxq import terminal
    from onnxq.evaluate import compare_files

    agreement = compare_files(reference, candidate, data, images=images, limit=limit)
    if as_json:
        click.echo(json.dumps(agreement.to_dict(), indent=2))
    else:
        terminal.print_agreement(agreement)


def _scheme(preset: str | None, scheme_file: Path | None) -> Scheme:
    from onnxq.presets import preset_named
    from onnxq.scheme import load_scheme

    if preset is not None and scheme_file is not None:
        raise click.UsageError('give --preset or --scheme, not both; a scheme file can say base = "int8"')
    return load_scheme(scheme_file) if scheme_file is not None else preset_named(preset or "int8")


def main() -> None:
    """Run the command line and exit: an error is one sentence on stderr, a fault in onnxq asks for a report."""
    debug = "--debug" in sys.argv[1:]
    # The flag is taken wherever it stands.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
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
        from onnxq import terminal

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
