"""The command that applies passes. Heavy imports wait until it runs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.groups import FIDELITY, OUTPUT, PASSES, GroupedCommand, option
from onnxq.cli.options import FILE, WRITING_EXIT_CODES, image_options, limit_option, pass_option
from onnxq.cli.rewriting import changes_option, compared_option, tolerance_option

if TYPE_CHECKING:
    from onnxq.data.images import ImageOptions


def _list_passes(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Print every pass with its options and their defaults, as --pass takes them, and what it does."""
    if not wanted or context.resilient_parsing:
        return
    from onnxq.preparing.named_passes import option_texts, passes_by_name

    for name, step in passes_by_name().items():
        text = ":".join((name, *(f"{option}={value}" for option, value in option_texts(step).items())))
        click.echo(f"{text}\t{(inspect.getdoc(step) or '').partition(chr(10))[0]}")
    context.exit()


@click.command(cls=GroupedCommand, short_help="Apply passes and rules, onnxq's or your own.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@pass_option("A pass to apply")
@option("-o", "--output", group=OUTPUT, type=FILE, required=True, help="File to write.")
@option(
    "--verify-each",
    group=FIDELITY,
    is_flag=True,
    help="Compare the outputs after every pass with MODEL's, unoptimised, and name the first pass that changes them.",
)
@compared_option
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
    help="List the passes and rules with their options, one a line.",
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
    """Apply passes to MODEL in the order given, and write it when onnxruntime loads it.

    Prints the name of the written file on stdout; what every pass did goes to stderr.
    """
    from onnxq.cli import terminal
    from onnxq.data.images import ImageOptions
    from onnxq.preparing import rewriting
    from onnxq.system.publish import check_output, data_file, write_text

    if not passes:
        raise click.UsageError("give at least one --pass; --list shows what there is")
    if not verify_each and (data is not None or limit is not None or images != ImageOptions()):
        raise click.UsageError("--data, --limit and --image-* are about --verify-each; add that")
    if report is not None:
        check_output(report, model)
        if report.resolve() in (output.resolve(), data_file(output).resolve()):
            raise click.UsageError(f"--report {report} is the output itself; give another name")
    verify = rewriting.Verify(data, tolerance, limit or rewriting.Verify.limit, images) if verify_each else None
    done = rewriting.run_passes(model, passes, output, verify_each=verify)
    terminal.print_applied(done)
    if report is not None:
        write_text(report, json.dumps(done.to_dict(), indent=2) + "\n", "report")
    click.echo(output)
