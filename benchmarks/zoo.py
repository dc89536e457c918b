"""Quantize every model of a folder through the command line and print what came out, measured on unseen samples.

    python benchmarks/zoo.py --models DIR --data DIR [--json FILE] [NAME ...] [-- further options of onnxq quantize]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib and judged on DATA/NAME/eval (or calib when there is no eval). A
model without a data folder of its own name takes the one whose name its own starts with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from onnxq.calibration.data import open_samples
from onnxq.calibration.inputs import model_inputs
from onnxq.evaluate import compare_files
from onnxq.graph import load, skeleton
from onnxq.verify import evenly, measure_latency

TIMED_SAMPLES = 4


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    valid: bool
    sentence: str = ""
    sqnr: float = math.nan
    agreement: float | None = None
    size_ratio: float = math.nan
    integer_kernels: int = 0
    float_heavy: int = 0
    speed: tuple[float, ...] = ()
    seconds: float = math.nan


def main() -> None:
    arguments = sys.argv[1:]
    further = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each latency comparison")
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments[: len(arguments) - len(further) - bool(further)])
    models = [path for path in sorted(options.models.glob("*.onnx")) if not options.names or path.stem in options.names]
    if not models:
        sys.exit(f"there are no such models in {options.models}")
    threads = sorted({1, len(os.sched_getaffinity(0))})
    print(f"{platform.processor() or platform.machine()}, {_cpu()}, threads {' and '.join(map(str, threads))}\n")
    header = ["model", "valid", "SQNR dB", "same arg max", "size", "integer kernels", "float heavy"]
    print("| " + " | ".join([*header, *(f"speed, {n} thr" for n in threads), "time s"]) + " |")
    print("|" + "---|" * (len(header) + len(threads) + 1))
    rows = []
    for path in models:
        row = judge(path, _samples(options.data, path.stem), threads, options.seconds, further)
        rows.append(row)
        print(_line(row, len(threads)), flush=True)
    done = [row for row in rows if row.valid]
    if done:
        print(f"\n{len(done)} valid of {len(rows)}; geometric means: size {_mean([r.size_ratio for r in done]):.2f}")
        print(
            ", ".join(f"speed with {n} threads {_mean([r.speed[i] for r in done]):.2f}" for i, n in enumerate(threads))
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def judge(model: Path, data: Path | None, threads: list[int], seconds: float, further: list[str]) -> Row:
    """Quantize one model through the command line and judge the written file."""
    calib = data / "calib" if data is not None else model.parent
    judged = data / "eval" if data is not None and (data / "eval").is_dir() else calib
    with tempfile.TemporaryDirectory() as folder:
        output, report = Path(folder) / "quantized.onnx", Path(folder) / "report.json"
        command = [sys.executable, "-m", "onnxq", "quantize", str(model), "--calib", str(calib), "-o", str(output)]
        start = time.perf_counter()
        run = subprocess.run([*command, "--report", str(report), *further], capture_output=True, text=True, check=False)
        took = time.perf_counter() - start
        if run.returncode:
            return Row(model.stem, False, f"exit {run.returncode}: {run.stderr.strip().splitlines()[-1]}", seconds=took)
        written = json.loads(report.read_text())
        agreement = compare_files(model, output, judged)
        samples = open_samples(judged, model_inputs(skeleton(load(model))))
        timed = list(evenly(samples, len(samples), TIMED_SAMPLES))
        speeds = tuple(measure_latency(model, output, timed, seconds=seconds, threads=n).speed for n in threads)
        return Row(
            model.stem,
            agreement.sound,
            sqnr=agreement.worst_sqnr,
            agreement=agreement.worst_agreement,
            size_ratio=written["bytes"] / written["float_bytes"],
            integer_kernels=written["kernels"]["integer"],
            float_heavy=written["kernels"]["heavy_float"],
            speed=speeds,
            seconds=took,
        )


def _samples(data: Path, name: str) -> Path | None:
    known = [folder for folder in data.iterdir() if folder.is_dir() and name.startswith(folder.name)]
    return max(known, key=lambda folder: len(folder.name), default=None)


def _line(row: Row, threads: int) -> str:
    if not row.valid:
        return f"| {row.model} | no: {row.sentence} |" + " |" * (6 + threads)
    agreement = "-" if row.agreement is None else f"{row.agreement:.3f}"
    speeds = " | ".join(f"{speed:.2f}" for speed in row.speed)
    return (
        f"| {row.model} | yes | {row.sqnr:.1f} | {agreement} | {row.size_ratio:.2f} | {row.integer_kernels} | "
        f"{row.float_heavy} | {speeds} | {row.seconds:.0f} |"
    )


def _mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.platform()


if __name__ == "__main__":
    main()
