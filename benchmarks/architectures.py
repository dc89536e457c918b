"""Quantize many small architectures by defaults, and see whether the promise holds on each.

    python benchmarks/networks/export_architectures.py MODELS    # in an environment of its own, see export.py
    python benchmarks/architectures.py --models MODELS [--only NAME ...] [--exporter NAME] [--looks 3] [--save FILE]

MODELS/NAME/EXPORTER.onnx is quantized with MODELS/NAME/calib in a process of its own and judged on MODELS/NAME/eval,
both by onnxruntime as it is used: decibels of each float output as it comes, and in each look the medians of
interleaved runs of the given and of the written model. An output whose shape depends on the answer is compared where
both shapes are equal, and is told of beside the worst output, since one row more or less moves all others. So does an
answer of TopK: what lies behind one is judged as it comes all the same. A fault is any end but a written model with
exit code 0, or a refusal.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rewrite import Sample, interleaved, outputs_of

LEAST_SPEED, LEAST_SQNR = 0.97, 20.0
BAD_INPUT, REFUSED = 2, 3
NOTHING = "there is nothing to quantize"
TIMED_SAMPLES = 4


@dataclass(frozen=True)
class Row:
    """What became of one model.

    Attributes:
        model: its name and exporter.
        exit_code: of `quantize`; negative where a signal ended it, and None where it took too long.
        sentence: the last line that it wrote.
        seconds: that it took.
        sqnr: decibels by output, of outputs that are floats and always have the same shape.
        moving: decibels by output, of floats whose shape depends on the answer; NaN where no sample has the same shape.
        claimed: decibels of the worst output as `quantize` reports them.
        speeds: how many times as fast as the given model the written one is, one for each look.
        claimed_speed: the same as `quantize` reports it.
        size: share of the given model's bytes.
    """

    model: str
    exit_code: int | None
    sentence: str
    seconds: float
    sqnr: Mapping[str, float] = field(default_factory=dict)
    moving: Mapping[str, float] = field(default_factory=dict)
    claimed: float = math.nan
    speeds: Sequence[float] = ()
    claimed_speed: float | None = None
    size: float = math.nan

    @property
    def is_refused(self) -> bool:
        """Whether nothing was written, for a reason that the model gives."""
        return self.exit_code == REFUSED or (self.exit_code == BAD_INPUT and NOTHING in self.sentence)

    @property
    def is_fault(self) -> bool:
        return self.exit_code != 0 and not self.is_refused

    @property
    def speed(self) -> float:
        """The median of all looks."""
        return statistics.median(self.speeds) if self.speeds else math.nan

    @property
    def worst(self) -> float:
        """Decibels of the worst output of fixed shape, NaN where there is none."""
        return min(self.sqnr.values(), default=math.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="what export_architectures.py wrote")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="an architecture; repeatable")
    parser.add_argument("--exporter", choices=("torchscript", "dynamo"), help="its exports alone")
    parser.add_argument("--looks", type=int, default=3, help="how often the two models are timed beside each other")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each look")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that quantize may take")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="while timing")
    parser.add_argument("--keep", type=Path, help="folder for what was written, and for the whole output of each run")
    parser.add_argument("--save", type=Path, help="write the tables here; as JSON where the name ends so")
    options = parser.parse_args()
    paths = [
        path
        for path in sorted(options.models.glob(f"*/{options.exporter or '*'}.onnx"))
        if not options.only or path.parent.name in options.only
    ]
    if not paths:
        sys.exit(f"there are no such models in {options.models}")
    rows = []
    print(header(options.threads), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        for path in paths:
            rows.append(verifier(path, kept, options))
            print(line(rows[-1]), flush=True)
    print(summary(rows))
    if options.save and options.save.suffix == ".json":
        options.save.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    elif options.save:
        options.save.write_text("\n".join([header(options.threads), *map(line, rows), summary(rows)]) + "\n")


def verifier(path: Path, folder: Path, options: argparse.Namespace) -> Row:
    """Quantize one model through the command line, and compare what was written with what was given."""
    name = f"{path.parent.name}/{path.stem}"
    stem = name.replace("/", "-")
    output, report = folder / f"{stem}.onnx", folder / f"{stem}.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "onnxq", "quantize", str(path), "--calib", str(path.parent / "calib")]
    start = time.perf_counter()
    try:
        run = subprocess.run(
            [*command, "-o", str(output), "--report", str(report)],
            capture_output=True,
            text=True,
            check=False,
            timeout=options.timeout,
        )
    except subprocess.TimeoutExpired:
        return Row(name, None, f"no end in {options.timeout:.0f} s", time.perf_counter() - start)
    took = time.perf_counter() - start
    (folder / f"{stem}.txt").write_text(run.stdout + run.stderr)
    sentence = (run.stderr.strip().splitlines() or [""])[-1].replace(str(folder), "").strip()
    if run.returncode or not output.exists():
        return Row(name, run.returncode or 1, sentence, took)
    samples = [arrays(file) for file in sorted((path.parent / "eval").glob("*.npz"))]
    sqnr, moving = compared(outputs_of(path, samples), outputs_of(output, samples))
    speeds = []
    for _ in range(options.looks):
        given, written = interleaved([path, output], samples[:TIMED_SAMPLES], options.seconds, options.threads)
        speeds.append(given / written)
    message = json.loads(report.read_text())
    return Row(
        name,
        0,
        sentence,
        took,
        sqnr,
        moving,
        math.inf if message["worst_sqnr"] is None else float(message["worst_sqnr"]),
        speeds,
        message["speed"],
        output.stat().st_size / path.stat().st_size,
    )


def arrays(path: Path) -> Sample:
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def compared(
    given: Mapping[str, Sequence[Any]], written: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return decibels of each float output, of fixed shapes and of shapes that depend on the answer."""
    fixed: dict[str, float] = {}
    moving: dict[str, float] = {}
    for name, expected in given.items():
        pairs = list(zip(expected, written[name], strict=True))
        if expected[0].dtype.kind == "f":
            alike = [(one, other) for one, other in pairs if one.shape == other.shape]
            if len({one.shape for one in expected}) > 1:
                moving[name] = decibels(alike)
            else:
                fixed[name] = decibels(alike) if len(alike) == len(pairs) else math.nan
    return fixed, moving


def decibels(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Compare arrays; what is infinite or no number in both is equal."""
    signal = nsr = 0.0
    for one, other in pairs:
        wide = one.astype(np.float64)
        compared = np.isfinite(wide) | ~np.isclose(wide, other, equal_nan=True)
        signal += float(np.square(wide[compared]).sum())
        nsr += float(np.square(wide[compared] - other[compared]).sum())
    if not pairs or math.isnan(nsr):
        return math.nan
    return math.inf if not nsr else 10 * math.log10(signal / nsr) if signal else -math.inf


def header(threads: int) -> str:
    ran_on = f"{platform.processor() or platform.machine()}, onnxruntime {version('onnxruntime')}, {threads} threads"
    columns = ["model", "end", "worst output dB", "as reported", "speed by look", "as reported", "size", "seconds"]
    return f"{ran_on}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def line(row: Row) -> str:
    if row.exit_code:
        end = f"{'refused' if not row.is_fault else 'fault'}, exit {row.exit_code}: {row.sentence[:200]}"
        return f"| {row.model} | {end} | | | | | | {row.seconds:.0f} |"
    if row.exit_code is None:
        return f"| {row.model} | fault: {row.sentence} | | | | | | {row.seconds:.0f} |"
    moving = ", ".join(f"{name} {value:.1f}" for name, value in row.moving.items())
    cells = [
        row.model,
        f"written; shapes depend on the answer: {moving}" if moving else "written",
        f"{row.worst:.1f}",
        f"{row.claimed:.1f}",
        ", ".join(f"{speed:.2f}" for speed in row.speeds),
        "-" if row.claimed_speed is None else f"{row.claimed_speed:.2f}",
        f"{row.size:.2f}",
        f"{row.seconds:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def summary(rows: Sequence[Row]) -> str:
    """Return which models break a part of the promise."""
    written = [row for row in rows if row.exit_code == 0]
    parts = {
        "faults": [row.model for row in rows if row.is_fault],
        f"slower than {LEAST_SPEED}x": [f"{row.model} {row.speed:.2f}" for row in written if row.speed < LEAST_SPEED],
        f"below {LEAST_SQNR:.0f} dB and not refused": [
            f"{row.model} {row.worst:.1f}" for row in written if row.worst < LEAST_SQNR
        ],
        "larger than given": [f"{row.model} {row.size:.2f}" for row in written if row.size > 1],
        "refused": [row.model for row in rows if row.is_refused],
    }
    lines = [f"- {part}: {len(models)}{': ' if models else ''}{', '.join(models)}" for part, models in parts.items()]
    return "\n".join([f"\n{len(rows)} models, {len(written)} written", *lines])


if __name__ == "__main__":
    onnxruntime.set_default_logger_severity(4)
    main()
