"""The command that optimizes a float model. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.groups import FIDELITY, OUTPUT, PASSES, GroupedCommand, option
from onnxq.cli.options import FILE, WRITING_EXIT_CODES, image_options, limit_option, time_to_spend
from onnxq.cli.rewriting import changes_option, compared_option, tolerance_option

if TYPE_CHECKING:
    from onnxq.data.images import ImageOptions


@click.command(cls=GroupedCommand, short_help="Rewrite a float model into canonical form.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@option("-o", "--output", group=OUTPUT, type=FILE, help="File to write.  [default: MODEL.optimized.onnx]")
@compared_option
@option("--without", group=PASSES, multiple=True, metavar="NAME", help="Leave a pass or rule out. Repeatable.")
@tolerance_option
@time_to_spend("Time to spend on comparing latency; 0 leaves it out.")
@option("--strip-metadata", group=PASSES, is_flag=True, help="Leave out what exporters wrote about nodes and tensors.")
@option(
    "--unverified",
    group=FIDELITY,
    is_flag=True,
    help="Rewrite a model that onnxruntime does not run, without comparing anything.",
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
    seconds: float,
    strip_metadata: bool,
    unverified: bool,
    limit: int | None,
    report: Path | None,
    images: ImageOptions | None,
) -> None:
    """Rewrite MODEL into canonical form: never slower, never larger, and equal but for the rounding of floats.

    A rule that changes an output is left out; where the result is larger or slower, MODEL is written as it was.
    Prints the name of the written file on stdout; what every rule did goes to stderr.
    """
    from onnxq.cli import terminal
    from onnxq.commands import optimization
    from onnxq.preparing.rewriting import Verify
    from onnxq.system.publish import check_output, data_file, write_text

    chosen = output if output is not None else model.with_suffix(".optimized.onnx")
    if report is not None:
        check_output(report, model)
        if report.resolve() in (chosen.resolve(), data_file(chosen).resolve()):
            raise click.UsageError(f"--report {report} is the output itself; give another name")
    verify = Verify(data, tolerance, limit or Verify.limit, images)
    done = optimization.optimize(
        model,
        chosen,
        verify=verify,
        without=without,
        seconds=seconds,
        strip_metadata=strip_metadata,
        unverified=unverified,
    )
    terminal.print_optimized(done)
    if report is not None:
        write_text(report, json.dumps(done.to_dict(), indent=2) + "\n", "report")
    click.echo(chosen)
