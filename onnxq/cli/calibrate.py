"""The command calibrate. Heavy imports wait until it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import CALIBRATION, DATA, OUTPUT, GroupedCommand, option
from onnxq.cli.options import (
    FILE,
    ONE_FOLDER,
    WRITING_EXIT_CODES,
    batch_option,
    chain_option,
    chosen_scheme,
    cluster_option,
    image_options,
    limit_option,
    pass_option,
    preset_option,
    range_option,
    scheme_file_option,
    source_option,
    target_option,
)
from onnxq.cli.output import print_start

if TYPE_CHECKING:
    from onnxq.data.images import ImageOptions


@click.command(cls=GroupedCommand, short_help="Collect statistics for quantize --stats.", epilog=WRITING_EXIT_CODES)
@click.argument("files", metavar="MODEL | FILES...", nargs=-1, required=True, type=FILE)
@option("--calib", group=DATA, type=FILE, **ONE_FOLDER, help="Read samples, as quantize does.")
@option("--merge", group=CALIBRATION, is_flag=True, help="Merge FILES of statistics of different samples instead.")
@option(
    "-o", "--output", group=OUTPUT, type=FILE, help="Write this file.  [default: MODEL.stats.npz in the current folder]"
)
@preset_option
@scheme_file_option
@target_option
@pass_option("Apply a pass first, as in quantize")
@limit_option
@batch_option
@source_option
@chain_option
@range_option("Collect what this calibration method needs.  [default: what every method except average needs]")
@cluster_option
@image_options
def calibrate(
    files: tuple[Path, ...],
    calib: Path | None,
    merge: bool,
    output: Path | None,
    preset: str | None,
    scheme_file: Path | None,
    target: str,
    passes: tuple[str, ...],
    limit: int | None,
    batch: int | None,
    source: str | None,
    ranges: str | None,
    cluster: str | None,
    chain: tuple[str, ...],
    images: ImageOptions | None,
) -> None:
    """Collect the statistics of MODEL for quantize --stats, and write them to one file.

    With --merge, FILES are statistics of one model, in any order, and --output is the file that holds them all.

    Prints the name of the written file on stdout.
    """
    from onnxq.calibration.data import Data
    from onnxq.calibration.statistics import save_statistics
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline import quantization
    from onnxq.pipeline.request import Budget
    from onnxq.system.publish import check_output

    if merge:
        _merge(files, calib, output)
        return
    if calib is None or len(files) > 1:
        raise click.UsageError("give one MODEL and --calib with samples, or --merge with files of statistics")
    [model] = files
    print_start(model)
    chosen = output or Path(f"{model.stem}.stats.npz")
    check_output(chosen, model, [calib])
    scheme = chosen_scheme(preset, scheme_file)
    with progress_bars() as progress:
        statistics = quantization.calibrate(
            model,
            Data(calib, limit=limit, images=images, chain=chain, source=source, batch=batch),
            scheme=replace(scheme, ranges=ranges) if ranges is not None else scheme,
            target=target,
            prepare=passes,
            budget=Budget(cluster=cluster, progress=progress),
        )
    save_statistics(statistics, chosen)
    click.echo(chosen)


def _merge(files: Sequence[Path], calib: Path | None, output: Path | None) -> None:
    from onnxq.calibration.statistics import merge_files, save_statistics
    from onnxq.system.publish import check_output

    if output is None or calib is not None:
        raise click.UsageError("--merge reads files of statistics and writes --output; give both, and no --calib")
    check_output(output, None, files)
    save_statistics(merge_files(files), output)
    click.echo(output)
