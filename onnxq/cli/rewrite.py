"""The commands that rewrite models: optimize, run and dequantize. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import ACCURACY, OUTPUT, PASSES, GroupedCommand, option
from onnxq.cli.options import (
    FILE,
    WRITING_EXIT_CODES,
    changes_option,
    image_options,
    latency_option,
    limit_option,
    pass_option,
    samples_option,
    tolerance_option,
)
from onnxq.cli.output import check_files

if TYPE_CHECKING:
    from onnxq.data.images import ImageOptions


@click.command(cls=GroupedCommand, short_help="Rewrite a float model into canonical form.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@option("-o", "--output", group=OUTPUT, type=FILE, help="Write this file.  [default: MODEL.optimized.onnx]")
@samples_option
@option("--without", group=PASSES, multiple=True, metavar="NAME", help="Skip a pass or rule. Repeatable.")
@tolerance_option
@latency_option("Compare latency for this long; 0 skips it.")
@option("--strip-metadata", group=PASSES, is_flag=True, help="Remove the exporter's notes about nodes and tensors.")
@option(
    "--unverified",
    group=ACCURACY,
    is_flag=True,
    help="Rewrite a model that onnxruntime cannot run, without comparing outputs.",
)
@limit_option
@changes_option
@image_options
def optimize(
    model: Path,
    output: Path | None,
    data: Path | None,
    without: tuple[str, ...],
    tolerance: float,
    latency_seconds: float,
    strip_metadata: bool,
    unverified: bool,
    limit: int | None,
    report: Path | None,
    images: ImageOptions | None,
) -> None:
    """Rewrite MODEL into canonical form: never slower, and equal except for float rounding.

    A rule is left out if it changes an output, or makes the model slower, or larger by more than 1 % and 64 KiB.
    Prints the name of the written file on stdout; the changes of each rule go to stderr.
    """
    from onnxq.cli import terminal
    from onnxq.passes.preparing.rewriting import Verify
    from onnxq.pipeline import optimization
    from onnxq.system.publish import write_text

    chosen = output if output is not None else model.with_suffix(".optimized.onnx")
    check_files(model, chosen, {"--report": report})
    verify = Verify(data, tolerance, limit or Verify.limit, images)
    done = optimization.optimize(
        model,
        chosen,
        verify=verify,
        without=without,
        latency_seconds=latency_seconds,
        strip_metadata=strip_metadata,
        unverified=unverified,
    )
    terminal.print_optimized(done)
    if report is not None:
        write_text(report, json.dumps(done.to_dict(), indent=2) + "\n", "report")
    click.echo(chosen)


# run


def _list_passes(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from onnxq.passes.preparing.named_passes import equation_and_purpose, option_texts, passes_by_name

    for name, step in passes_by_name().items():
        text = ":".join((name, *(f"{option}={value}" for option, value in option_texts(step).items())))
        click.echo(f"{text}\t{'. '.join(filter(None, equation_and_purpose(step)))}")
    context.exit()


@click.command(cls=GroupedCommand, short_help="Apply passes and rules to a model.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@pass_option("Apply a pass")
@option("-o", "--output", group=OUTPUT, type=FILE, required=True, help="Write this file.")
@option(
    "--verify-each",
    group=ACCURACY,
    is_flag=True,
    help="Compare the outputs after every pass with MODEL's, and name the first pass that changes them.",
)
@samples_option
@tolerance_option
@limit_option
@changes_option
@option(
    "--list",
    group=PASSES,
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_passes,
    help="List the passes and rules with their options, one per line.",
)
@image_options
def run(
    model: Path,
    passes: tuple[str, ...],
    output: Path,
    verify_each: bool,
    data: Path | None,
    tolerance: float,
    limit: int | None,
    report: Path | None,
    images: ImageOptions | None,
) -> None:
    """Apply passes to MODEL in the given order, and write the result if onnxruntime loads it.

    Prints the name of the written file on stdout; the changes of each pass go to stderr.
    """
    from onnxq.cli import terminal
    from onnxq.data.images import ImageOptions
    from onnxq.passes.preparing import rewriting
    from onnxq.system.publish import write_text

    if not passes:
        raise click.UsageError("give at least one --pass; --list shows all")
    if not verify_each and (data is not None or limit is not None or images != ImageOptions()):
        raise click.UsageError("--data, --limit and --image-* need --verify-each; add it")
    check_files(model, output, {"--report": report})
    verify = rewriting.Verify(data, tolerance, limit or rewriting.Verify.limit, images) if verify_each else None
    done = rewriting.run_passes(model, passes, output, verify_each=verify)
    terminal.print_applied(done)
    if report is not None:
        write_text(report, json.dumps(done.to_dict(), indent=2) + "\n", "report")
    click.echo(output)


# dequantize


@click.command(short_help="Turn a quantized model back into a float model.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Write this file.  [default: MODEL.float.onnx in the current folder]",
)
def dequantize(model: Path, output: Path | None) -> None:
    """Turn a quantized MODEL, of onnxq or onnxruntime, back into a plain float model.

    Weights become exactly the values that they represent. Prints the name of the written file on stdout.
    """
    from onnxq.pipeline import dequantization

    chosen = output or Path(f"{model.stem}.float.onnx")
    dequantization.dequantize(model, chosen)
    click.echo(chosen)
