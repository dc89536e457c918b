"""The commands that rewrite models: optimize, run and dequantize. Heavy imports wait until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import ACCURACY, PASSES, GroupedCommand, Option, given_of
from onnxq.cli.options import (
    IMAGE_FLAGS,
    WRITING_EXIT_CODES,
    changes_option,
    latency_option,
    pass_option,
    verify_options,
)
from onnxq.cli.output import check_files, output_option, write_json
from onnxq.cli.types import FILE

if TYPE_CHECKING:
    from onnxq.passes.preparing.rewriting import Verify


@click.command(cls=GroupedCommand, short_help="Rewrite a float model into canonical form.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@output_option("MODEL.optimized.onnx")
@verify_options
@Option(PASSES, "--without NAME", "Skip a pass or rule. Repeatable.", multiple=True)
@latency_option("Compare latency for this long; 0 skips it.")
@Option(PASSES, "--strip-metadata", "Remove the exporter's notes about nodes and tensors.")
@Option(ACCURACY, "--unverified", "Rewrite a model that onnxruntime cannot run, without comparing outputs.")
@changes_option
def optimize(
    model: Path,
    output: Path | None,
    verify: Verify,
    without: tuple[str, ...],
    latency_seconds: float,
    strip_metadata: bool,
    unverified: bool,
    report: Path | None,
) -> None:
    """Rewrite MODEL into canonical form: never slower, and equal except for float rounding.

    A rule is left out if it changes an output, or makes the model slower, or larger by more than 1 % and 64 KiB.
    Prints the name of the written file on stdout; the changes of each rule go to stderr.
    """
    from onnxq.cli import terminal
    from onnxq.pipeline import optimization

    chosen = output if output is not None else model.with_suffix(".optimized.onnx")
    check_files(model, chosen, {"--report": report})
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
    write_json(done.to_dict(), report)
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
@output_option(required=True)
@Option(
    ACCURACY,
    "--verify-each",
    "Compare the outputs after every pass with MODEL's, and name the first pass that changes them.",
)
@verify_options
@changes_option
@Option(
    PASSES,
    "--list",
    "List the passes and rules with their options, one per line.",
    is_eager=True,
    expose_value=False,
    callback=_list_passes,
)
def run(
    model: Path, passes: tuple[str, ...], output: Path, verify_each: bool, verify: Verify, report: Path | None
) -> None:
    """Apply passes to MODEL in the given order, and write the result if onnxruntime loads it.

    Prints the name of the written file on stdout; the changes of each pass go to stderr.
    """
    from onnxq.cli import terminal
    from onnxq.passes.preparing import rewriting

    if not passes:
        raise click.UsageError("give at least one --pass; --list shows all")
    if not verify_each and given_of("--data", "--limit", *IMAGE_FLAGS):
        raise click.UsageError("--data, --limit and --image-* need --verify-each; add it")
    check_files(model, output, {"--report": report})
    done = rewriting.run_passes(model, passes, output, verify_each=verify if verify_each else None)
    terminal.print_applied(done)
    write_json(done.to_dict(), report)
    click.echo(output)


# dequantize


@click.command(short_help="Turn a quantized model back into a float model.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@click.option("-o", "--output", type=FILE, help="Write this file.  [default: MODEL.float.onnx in the current folder]")
def dequantize(model: Path, output: Path | None) -> None:
    """Turn a quantized MODEL, of onnxq or onnxruntime, back into a plain float model.

    Weights become exactly the values that they represent. Prints the name of the written file on stdout.
    """
    from onnxq.pipeline import dequantization

    chosen = output or Path(f"{model.stem}.float.onnx")
    dequantization.dequantize(model, chosen)
    click.echo(chosen)
