"""The commands that compare models: compare and bench. Heavy imports wait until one runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxq.cli.help import ACCURACY, OUTPUT, SPEED, GroupedCommand, Option
from onnxq.cli.options import (
    COMPARING_EXIT_CODES,
    TIMING_EXIT_CODES,
    latency_option,
    metric_of,
    threads_option,
    two_models,
)
from onnxq.cli.output import exit_below, print_json
from onnxq.cli.types import ABOVE_ZERO, FROM_ZERO

if TYPE_CHECKING:
    from onnxq.calibration.data import Data


@click.command(
    cls=GroupedCommand, short_help="Compare the outputs of two models on samples.", epilog=COMPARING_EXIT_CODES
)
@two_models
@Option(ACCURACY, "--layers by_layer", "Also print the error of each layer, isolated and accumulated.")
@Option(ACCURACY, "--top COUNT", "With --layers, print only the layers with the highest isolated error.")
@Option(ACCURACY, "--min-sqnr DECIBELS", "Require this SQNR of the worst output, else exit with 3; for CI.", type=float)
@Option(ACCURACY, "--metric METRIC", "Also score both models: top1, top1:LABELS.npy or FILE.py:FUNCTION.")
@Option(ACCURACY, "--max-drop NUMBER", "Exit with 3 if the metric drops by more; for CI.", type=FROM_ZERO)
@Option(
    ACCURACY,
    "--report PATH",
    "Read CANDIDATE's report of quantize: --layers then shows modes, and compares scaled channels.",
)
@Option(OUTPUT, "--html PATH", "Write the result as an HTML page.")
def compare(
    reference: Path,
    candidate: Path,
    data: Data,
    engine: str,
    as_json: bool,
    by_layer: bool,
    top: int | None,
    min_sqnr: float | None,
    metric: str | None,
    max_drop: float | None,
    report: Path | None,
    html: Path | None,
) -> None:
    """Run two models on the same samples and print the SQNR of each output.

    REFERENCE runs on onnxruntime, CANDIDATE on the engine. Both are files, or folders as quantize takes and writes.

    --layers compares every float tensor that both models have: isolated, with the inputs of each layer from
    REFERENCE, and accumulated, as CANDIDATE runs. The column "as" shows the mode of each node,
    which is read from --report.
    """
    from onnxq.cli import tables
    from onnxq.evaluation.agreement import compare_files
    from onnxq.evaluation.goal import Goal, lack, lost_score
    from onnxq.evaluation.layers import compare_layers
    from onnxq.evaluation.metrics import compare_scores
    from onnxq.pipeline.folders import pairs_of
    from onnxq.report import load_report
    from onnxq.report.page import Comparison
    from onnxq.runtime.engines import DEFAULT_ENGINE, open_engine
    from onnxq.system.publish import check_output

    if html is not None:
        check_output(html, reference)
        check_output(html, candidate, data.given)
    if not by_layer and (report is not None or top is not None):
        raise click.UsageError(f"{'--top' if report is None else '--report'} is for --layers; give both or none")
    if engine != DEFAULT_ENGINE and (by_layer or metric is not None):
        name = "--layers" if by_layer else "--metric"
        raise click.UsageError(f"{name} runs CANDIDATE on onnxruntime; leave out --engine")
    own = metric_of(metric, max_drop)()
    plan = load_report(report).plan if report is not None else None
    pairs, lacks, results = list(pairs_of(reference, candidate, data)), list[str](), dict[str, object]()
    if len(pairs) > 1 and (html or report or metric):
        raise click.UsageError(f"--html, --report and --metric are about one model, and {reference} holds {len(pairs)}")
    for name, first, second, samples in pairs:
        with open_engine(engine) as runtime:
            # If both run here, models with random numbers draw the same ones.
            there = None if engine == DEFAULT_ENGINE else runtime
            agreement = compare_files(first, second, samples, engine=there)
        layers = compare_layers(first, second, samples, plan=plan) if by_layer else None
        scores = compare_scores(own, first, second, samples) if own is not None else None
        if html is not None:
            Comparison(first, second, agreement, layers).save_html(html)
        details = {**(layers.to_dict() if layers is not None else {}), **({"scores": asdict(scores)} if scores else {})}
        results[name] = {**agreement.to_dict(), **details}
        if not as_json:
            if len(pairs) > 1:
                click.echo(name)
            tables.print_images(first, samples)
            tables.print_agreement(agreement)
            if layers is not None:
                tables.print_layers(layers, top)
            if scores is not None:
                click.echo(f"{scores.name}: {scores.reference:.4g} -> {scores.candidate:.4g}")
        if scores is not None and scores.doubt:
            click.echo(f"Warning: {scores.doubt}.", err=True)
        if min_sqnr is not None:
            lacks.append(lack(agreement, Goal(min_sqnr)))
        if scores is not None and max_drop is not None:
            lacks.append(lost_score(scores, Goal(max_drop=max_drop)))
    if as_json:
        print_json(results)
    exit_below(lacks)


# bench


@click.command(cls=GroupedCommand, short_help="Compare the latency of two models.", epilog=TIMING_EXIT_CODES)
@two_models
@threads_option
@latency_option("Time for this long, not counting loading.", 10.0)
@Option(
    SPEED,
    "--min-speed FACTOR",
    "Exit with 3 if CANDIDATE is measurably less than this many times as fast; for CI.",
    type=ABOVE_ZERO,
)
def bench(
    reference: Path,
    candidate: Path,
    data: Data,
    threads: int | None,
    latency_seconds: float,
    min_speed: float | None,
    engine: str,
    as_json: bool,
) -> None:
    """Time two models alternately on the same samples, and print the speedup of CANDIDATE with its interval.

    Both are files, or folders as quantize takes and writes them.
    """
    from onnxq.cli import tables
    from onnxq.evaluation.latency import bench as time_models
    from onnxq.pipeline.folders import pairs_of
    from onnxq.runtime.engines import open_engine

    pairs = list(pairs_of(reference, candidate, data))
    with open_engine(engine) as runtime:
        comparisons = {
            name: time_models(first, second, samples, threads=threads, latency_seconds=latency_seconds, engine=runtime)
            for name, first, second, samples in pairs
        }
    if as_json:
        print_json({name: comparison.to_dict() for name, comparison in comparisons.items()})
    else:
        for (_, first, _, samples), comparison in zip(pairs, comparisons.values(), strict=True):
            tables.print_images(first, samples)
            tables.print_bench(comparison)
    if min_speed is not None:
        exit_below(comparison.lack(min_speed) for comparison in comparisons.values())
