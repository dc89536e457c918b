"""The commands of calibration: calibrate and stats. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.cli.help import DATA, ONCE, OUTPUT, GroupedCommand, option
from onnxq.cli.options import (
    FILE,
    READING_EXIT_CODES,
    WRITING_EXIT_CODES,
    batch_option,
    chain_option,
    chosen_scheme,
    collection_options,
    image_options,
    json_option,
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
    from onnxq.calibration.calibrate import Collection
    from onnxq.data.images import ImageOptions


_HEADER = ("tensor", "elements", "minimum", "maximum", "99.99 % from", "to", "note")


@click.command(cls=GroupedCommand, short_help="Collect statistics for quantize --stats.", epilog=WRITING_EXIT_CODES)
@click.argument("model", type=FILE)
@option("--calib", group=DATA, required=True, type=FILE, **ONCE, help="Read samples, as quantize does.")
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
@range_option("Keep what this calibration method needs.  [default: what all but average need]")
@collection_options
@image_options
def calibrate(
    model: Path,
    calib: Path,
    output: Path | None,
    preset: str | None,
    scheme_file: Path | None,
    target: str,
    passes: tuple[str, ...],
    limit: int | None,
    batch: int | None,
    source: str | None,
    ranges: str | None,
    collection: Collection | None,
    chain: tuple[str, ...],
    images: ImageOptions | None,
) -> None:
    """Collect the statistics of MODEL for quantize --stats, and write them to one file.

    If it is interrupted, the same command resumes. Prints the name of the written file on stdout.
    """
    print_start(model)
    from onnxq.calibration.calibrate import Collection, discard_checkpoints
    from onnxq.calibration.data import Data
    from onnxq.calibration.statistics import save_statistics
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.pipeline import quantization
    from onnxq.pipeline.request import Budget
    from onnxq.system.publish import check_output

    chosen = output or Path(f"{model.stem}.stats.npz")
    check_output(chosen, model, [calib])
    how = collection or Collection(notice=lambda sentence: click.echo(f"onnxq: {sentence}", err=True))
    scheme = chosen_scheme(preset, scheme_file)
    with progress_bars() as progress:
        statistics = quantization.calibrate(
            model,
            Data(calib, limit=limit, images=images, chain=chain, source=source, batch=batch),
            scheme=replace(scheme, ranges=ranges) if ranges is not None else scheme,
            target=target,
            prepare=passes,
            budget=Budget(collection=replace(how, checkpoint=chosen), progress=progress),
        )
    save_statistics(statistics, chosen)
    discard_checkpoints(chosen)
    click.echo(chosen)


@click.group(epilog=WRITING_EXIT_CODES)
def stats() -> None:
    """Merge or show files of statistics."""


@stats.command(short_help="Merge statistics of different samples.", epilog=WRITING_EXIT_CODES)
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("-o", "--output", required=True, type=FILE, help="Write this file.")
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Merge statistics of different samples of one model, in any order."""
    from onnxq.calibration.statistics import merge_files, save_statistics
    from onnxq.system.publish import check_output

    check_output(output, None, files)
    save_statistics(merge_files(files), output)
    click.echo(output)


@stats.command(epilog=READING_EXIT_CODES)
@click.argument("file", type=FILE)
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show the statistics in FILE, one tensor a line."""
    from onnxq.calibration.methods import described
    from onnxq.calibration.statistics import load_statistics
    from onnxq.report.formatting import visible

    found = described(load_statistics(file))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"model {found['model'] or 'unknown'}, {found['samples']} samples{_seen_by(found)}")
    click.echo("\t".join(_HEADER))
    for name, one in found["tensors"].items():
        ends = (one["minimum"], one["maximum"], *one["percentile"])
        shown = ("-" if end is None else f"{end:.6g}" for end in ends)
        click.echo("\t".join((visible(name), str(one["elements"]), *shown, one["note"])))


def _seen_by(found: Mapping[str, Any]) -> str:
    machines = found["machines"]
    on = f" on {' and '.join(machines)}" if machines else ""
    # Kernels for other instruction sets round differently.
    differ = ", whose last bits may differ" if len(machines) > 1 else ""
    return f", seen by {found['runtime']}{on}{differ}" if found["runtime"] else ""
