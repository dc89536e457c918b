"""The command calibrate. Heavy imports wait until it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import CALIBRATION, GroupedCommand, Option
from onnxq.cli.options import (
    WRITING_EXIT_CODES,
    chosen_scheme,
    cluster_option,
    pass_option,
    preset_option,
    range_option,
    scheme_file_option,
    statistics_data_options,
    target_option,
)
from onnxq.cli.output import output_option, print_start
from onnxq.cli.types import FILE

if TYPE_CHECKING:
    from onnxq.calibration.data import Data


@click.command(cls=GroupedCommand, short_help="Collect statistics for quantize --stats.", epilog=WRITING_EXIT_CODES)
@click.argument("files", metavar="MODEL | FILES...", nargs=-1, required=True, type=FILE)
@statistics_data_options
@Option(CALIBRATION, "--merge", "Merge FILES of statistics of different samples instead.")
@output_option("MODEL.stats.npz in the current folder")
@preset_option
@scheme_file_option
@target_option
@pass_option("Apply a pass first, as in quantize")
@range_option("Collect what this calibration method needs.  [default: what every method except average needs]")
@cluster_option
def calibrate(
    files: tuple[Path, ...],
    data: Data | None,
    merge: bool,
    output: Path | None,
    preset: str | None,
    scheme_file: Path | None,
    target: str,
    passes: tuple[str, ...],
    ranges: str | None,
    cluster: str | None,
) -> None:
    """Collect the statistics of MODEL for quantize --stats, and write them to one file.

    With --merge, FILES are statistics of one model, in any order, and --output is the file that holds them all.

    Prints the name of the written file on stdout.
    """
    from onnxq.calibration.statistics import save_statistics
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline import quantization
    from onnxq.pipeline.request import Budget
    from onnxq.system.publish import check_output

    if merge:
        _merge(files, data, output)
        return
    if data is None or len(files) > 1:
        raise click.UsageError("give one MODEL and --calib with samples, or --merge with files of statistics")
    [model] = files
    print_start(model)
    chosen = output or Path(f"{model.stem}.stats.npz")
    check_output(chosen, model, data.given)
    scheme = chosen_scheme(preset, scheme_file)
    with progress_bars() as progress:
        statistics = quantization.calibrate(
            model,
            data,
            scheme=replace(scheme, ranges=ranges) if ranges is not None else scheme,
            target=target,
            prepare=passes,
            budget=Budget(cluster=cluster, progress=progress),
        )
    save_statistics(statistics, chosen)
    click.echo(chosen)


def _merge(files: Sequence[Path], data: Data | None, output: Path | None) -> None:
    from onnxq.calibration.statistics import merge_files, save_statistics
    from onnxq.system.publish import check_output

    if output is None or data is not None:
        raise click.UsageError("--merge reads files of statistics and writes --output; give both, and no --calib")
    check_output(output, None, files)
    save_statistics(merge_files(files), output)
    click.echo(output)
