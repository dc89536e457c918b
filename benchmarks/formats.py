"""Store the weights of one model in every format that has a preset, and print size, SQNR and latency side by side.

    python benchmarks/formats.py MODEL --calib DATA [--eval DATA] [--json FILE] [PRESET ...]

No node is left in float for its error (no search), so that rows compare formats and not plans. The SQNR is measured on
the samples of --eval, and each model is timed by turns with the float model in one process.

The last column is how far the outputs of the model that `onnxq dequantize` gives back are from those of the quantized
one, relative to the largest. Both run unoptimised there: onnxruntime rounds the data of MatMulNBits to 8 bits by
default. Presets that round data themselves (int8, int8-dynamic, torch-fbgemm and so on) differ by that error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx

from onnxq import dequantize, quantize
from onnxq.calibration.data import Data
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.verification import measure_latency
from onnxq.ir import load
from onnxq.onnx_api import weightless_model
from onnxq.pipeline.request import Budget
from onnxq.runtime.sessions import open_session, run

TIMED_SAMPLES = 4
COMPARED_SAMPLES = 2
# Sums of float32 products in another order.
EQUAL = 1e-5
SHOWN = ("MatMulNBits", "MatMul", "Gemm", "FusedMatMul", "Conv", "DequantizeLinear", "GatherBlockQuantized")


@dataclass(frozen=True)
class Row:
    """One preset."""

    preset: str
    size_ratio: float
    sqnr: float
    speed: tuple[float, ...]
    opset: int
    seconds: float
    difference: float
    kernels: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether the dequantized model computes the same but for the order of sums."""
        return self.difference <= EQUAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--eval", type=Path, help="samples to judge on; by default those of --calib")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each latency comparison")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--json", type=Path)
    parser.add_argument("presets", nargs="*", help="by default all that touch weights only")
    options = parser.parse_intermixed_args()
    weights_only = [name for name, scheme in PRESETS.items() if scheme.rules[0].mode is not Mode.STATIC]
    rows = []
    print(header(options.threads))
    for preset in options.presets or weights_only:
        rows.append(measure(options, preset))
        print(line(rows[-1]), flush=True)
    if options.json:
        results = [{**asdict(row), "equal": row.equal} for row in rows]
        made_on = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "model": options.model.name,
            "threads": options.threads,
        }
        options.json.write_text(json.dumps({"conditions": made_on, "rows": results}, indent=2))


def measure(options: argparse.Namespace, preset: str) -> Row:
    # Only the scales of data need more than one sample.
    limit = None if PRESETS[preset].rules[0].mode is Mode.STATIC else 1
    with tempfile.TemporaryDirectory(prefix="onnxq-formats-") as folder:
        output, back = Path(folder) / "quantized.onnx", Path(folder) / "dequantized.onnx"
        start = time.perf_counter()
        done = quantize(
            options.model,
            Data(options.calib, limit=limit),
            output,
            scheme=preset,
            goal=Goal(force=True),
            budget=Budget(search="off", latency_seconds=0),
        )
        seconds = time.perf_counter() - start
        samples = open_samples(options.calib, model_inputs(weightless_model(load(options.model))))
        agreement = compare_files(options.model, output, options.eval or options.calib)
        timed = list(evenly(samples, TIMED_SAMPLES))
        speed = tuple(
            measure_latency(options.model, output, timed, seconds=options.seconds, threads=threads).speed
            for threads in options.threads
        )
        dequantize(output, back)
        copy = Path(folder) / "optimized.onnx"
        open_session(output, optimized_copy=copy)
        counts = Counter(node.op_type for node in onnx.load(copy).graph.node)
        return Row(
            preset,
            done.report.files.bytes / done.report.files.float_bytes,
            agreement.worst_sqnr,
            speed,
            done.graph.opset,
            seconds,
            difference(output, back, list(evenly(samples, COMPARED_SAMPLES))),
            {op: counts[op] for op in SHOWN if counts[op]},
        )


def difference(one: Path, other: Path, samples: list[Sample]) -> float:
    """Return the largest difference of any output, relative to that output's largest magnitude."""
    sessions = [open_session(path, optimize=False) for path in (one, other)]
    found = 0.0
    for sample in samples:
        for left, right in zip(*(run(session, sample) for session in sessions), strict=True):
            found = max(found, float(np.abs(left - right).max() / (np.abs(right).max() or 1.0)))
    return found


def header(threads: list[int]) -> str:
    speeds = [f"speed, {count} thread{'s' * (count > 1)}" for count in threads]
    names = ["preset", "size", "SQNR, dB", *speeds, "opset", "made in, s", "runs as", "dequantized equals it"]
    return f"| {' | '.join(names)} |\n|---|{'--:|' * (len(names) - 3)}---|---|"


def line(row: Row) -> str:
    speeds = [f"{speed:.2f}" for speed in row.speed]
    kernels = ", ".join(f"{count} {op}" for op, count in row.kernels.items())
    equal = f"{'yes' if row.equal else 'no'}, {row.difference:.0e}"
    figures = [f"{row.size_ratio:.3f}", f"{row.sqnr:.1f}", *speeds, row.opset, f"{row.seconds:.1f}"]
    cells = [row.preset, *figures, kernels, equal]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
