"""Compare calibration with plain inference and with onnxruntime's own quantization, whole processes on equal samples.

    python benchmarks/calibration.py --models DIR --data DIR [--results FILE] [--quick] [NAME ...]

Runs each ``DIR/NAME.onnx`` on the samples of ``DIR/NAME/calib``, again and again where there are too few. Time and
peak memory are those of a process from its start to its end, with statistics written; what is compared runs in turns,
and the median time and the greatest memory count. Needs an otherwise idle machine with at least two cores.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import INFERENCE, keep_bytecode

PEER = """
import logging, sys
import numpy as np
from pathlib import Path
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, quantize_static
logging.disable()
class Reader(CalibrationDataReader):
    def __init__(self): self.paths = iter(sorted(Path(sys.argv[2]).glob("*.npz")))
    def get_next(self):
        path = next(self.paths, None)
        return None if path is None else dict(np.load(path))
quantize_static(sys.argv[1], sys.argv[3], Reader(), calibrate_method=getattr(CalibrationMethod, sys.argv[4]))
"""
OURS = """
import sys
from dataclasses import replace
from pathlib import Path
import onnxq
scheme = replace(onnxq.PRESETS["int8"], ranges={"extremes": "minmax", "histograms": ""}[sys.argv[4]])
workers = onnxq.Processes(int(sys.argv[5])) if len(sys.argv) > 5 else None
budget = onnxq.Budget(collection=onnxq.Collection(workers=workers))
found = onnxq.calibrate(sys.argv[1], Path(sys.argv[2]), scheme=scheme, budget=budget)
onnxq.save_statistics(found, Path(sys.argv[3]))
"""

SAMPLES = 64
MANY = 512
PEER_MODEL = "effnet-lite0"


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes that a process took."""

    seconds: float
    bytes: int

    @property
    def memory(self) -> str:
        return f"{self.bytes / 1e6:.0f} MB"


@dataclass(frozen=True)
class Row:
    """What one model costs: plain inference, calibration of extremes only, and with histograms."""

    name: str
    plain: Cost
    extremes: Cost
    histograms: Cost

    @property
    def allowed(self) -> float:
        return 1.5 * self.plain.bytes + 100e6


@dataclass(frozen=True)
class Bar:
    """A promise, and what was measured of it."""

    promise: str
    measured: str
    met: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "calibration.md")
    parser.add_argument("--quick", action="store_true", help="one run of each, for a look; results are not written")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    pairs = dict(models(options.models, options.data))
    names = options.names or list(pairs)
    if unknown := [name for name in names if name not in pairs]:
        parser.error(f"no model or samples for {', '.join(unknown)}, expected one of {', '.join(pairs)}")
    repeat = 1 if options.quick else 3
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        keep_bytecode(Path(folder), "onnxruntime.quantization")
        rows = [row(options.models / f"{name}.onnx", pairs[name], name, repeat) for name in names]
        bars = [*zoo_bars(rows)]
        if PEER_MODEL in names:
            model = options.models / f"{PEER_MODEL}.onnx"
            bars += peer_bars(model, pairs[PEER_MODEL], repeat)
            bars += scaling_bars(model, pairs[PEER_MODEL], repeat)
    text = report(rows, bars, time.perf_counter() - started, repeat)
    print(text)
    if not options.quick:
        options.results.write_text(text)


def models(folder: Path, data: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models that have samples, with their folder; a variant NAME-MORE takes those of NAME."""
    for path in sorted(folder.glob("*.onnx")):
        for name in (path.stem, path.stem.rpartition("-")[0]):
            if name and (data / name / "calib").is_dir():
                yield path.stem, data / name / "calib"
                break


def row(model: Path, data: Path, name: str, repeat: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        samples = links(data, Path(folder) / "samples", SAMPLES)
        arguments = [str(model), str(samples), str(Path(folder) / "written")]
        plain, extremes, histograms = in_turns(
            [(INFERENCE, arguments), (OURS, [*arguments, "extremes"]), (OURS, [*arguments, "histograms"])], repeat
        )
    found = Row(name, plain, extremes, histograms)
    print(f"{name}: {extremes.seconds / plain.seconds:.2f}, {histograms.seconds / plain.seconds:.2f}", file=sys.stderr)
    return found


def zoo_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for what, bar, seconds in (
        ("extremes only", 2.2, [one.extremes.seconds for one in rows]),
        ("with histograms", 2.4, [one.histograms.seconds for one in rows]),
    ):
        ratios = [mine / one.plain.seconds for mine, one in zip(seconds, rows, strict=True)]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        yield Bar(f"{what}: at most {bar} times plain inference, geometric mean", f"{mean:.2f}", mean <= bar)
    above = [one.name for one in rows if max(one.extremes.bytes, one.histograms.bytes) > one.allowed]
    worst = max(rows, key=lambda one: max(one.extremes.bytes, one.histograms.bytes) / one.allowed)
    yield Bar(
        "peak memory at most 1.5 times that of plain inference and 100 MB",
        ("above: " + ", ".join(above) if above else "all models")
        + f"; the closest is {worst.name} with {worst.histograms.memory} of {worst.allowed / 1e6:.0f} MB",
        not above,
    )


def peer_bars(model: Path, data: Path, repeat: int) -> Iterator[Bar]:
    """Compare with quantize_static; its histogram methods keep all activations, so they see the fewer samples only."""
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        for count, methods in ((SAMPLES, ("MinMax", "Entropy", "Percentile")), (MANY, ("MinMax",))):
            samples = links(data, Path(folder) / str(count), count)
            arguments = [str(model), str(samples), str(Path(folder) / "written")]
            for method in methods:
                mode, bar = ("extremes", 3) if method == "MinMax" else ("histograms", 10)
                # The slow ones run less often, and those of many samples vary less.
                runs = repeat if method == "MinMax" and count == SAMPLES else min(repeat, 2)
                peer, ours = in_turns([(PEER, [*arguments, method]), (OURS, [*arguments, mode])], runs)
                ratio = peer.seconds / ours.seconds
                yield Bar(
                    f"at least {bar} times as fast as {method} of onnxruntime on {count} samples of {model.stem}",
                    f"{ratio:.1f} ({peer.seconds:.2f} s and {peer.memory} to {ours.seconds:.2f} s and {ours.memory})",
                    ratio >= bar,
                )


def scaling_bars(model: Path, data: Path, repeat: int) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        output = str(Path(folder) / "written")
        few, many = (links(data, Path(folder) / str(count), count) for count in (32, MANY))
        memory = in_turns([(OURS, [str(model), str(at), output, "histograms"]) for at in (few, many)], min(repeat, 2))
        growth = memory[1].bytes / memory[0].bytes
        yield Bar(
            f"memory on {MANY} samples within 5 % of that on 32",
            f"{growth:.3f} ({memory[0].memory} to {memory[1].memory})",
            growth <= 1.05,
        )
        jobs = [(OURS, [str(model), str(many), output, "histograms", str(count)]) for count in (1, 2)]
        one, two = in_turns(jobs, repeat)
        ratio = one.seconds / two.seconds
        yield Bar(
            f"two worker processes at least 1.6 times as fast as one on {MANY} samples of {model.stem}",
            f"{ratio:.2f} ({one.seconds:.2f} to {two.seconds:.2f} s)",
            ratio >= 1.6,
        )


def report(rows: Sequence[Row], bars: Sequence[Bar], seconds: float, repeat: int) -> str:
    from importlib.metadata import version

    lines = [
        f"onnxq {version('onnxq')}, onnxruntime {version('onnxruntime')}, {os.cpu_count()} cores, "
        f"{platform.machine()}, {SAMPLES} samples, median of {repeat} runs in turns, {seconds:.0f} s in all",
        "",
        "| bar | measured | met |",
        "|---|---|---|",
        *(f"| {bar.promise} | {bar.measured} | {'yes' if bar.met else 'no'} |" for bar in bars),
        "",
        "| model | plain inference | extremes only | with histograms | memory, of plain and allowed |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| `{one.name}` | {one.plain.seconds:.2f} s | {one.extremes.seconds / one.plain.seconds:.2f} | "
        f"{one.histograms.seconds / one.plain.seconds:.2f} | "
        f"{one.histograms.memory}, {one.plain.memory} and {one.allowed / 1e6:.0f} MB |"
        for one in rows
    ]
    return "\n".join(lines) + "\n"


def in_turns(programs: Sequence[tuple[str, Sequence[str]]], repeat: int) -> list[Cost]:
    """Run programs one after the other, several times, and return the median time and greatest memory of each."""
    found = [[cost(*program) for program in programs] for _ in range(repeat)]
    return [
        Cost(statistics.median(one.seconds for one in column), max(one.bytes for one in column))
        for column in zip(*found, strict=True)
    ]


def links(data: Path, folder: Path, count: int) -> Path:
    """Make a folder of `count` samples, those of another folder again and again."""
    folder.mkdir()
    files = sorted(data.glob("*.npz"))
    for index in range(count):
        (folder / f"{index}.npz").symlink_to(files[index % len(files)].resolve())
    return folder


def cost(program: str, arguments: Sequence[str]) -> Cost:
    """Run a program in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"a process failed with code {process.returncode}; see its message above")
    return Cost(time.perf_counter() - start, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


if __name__ == "__main__":
    main()
