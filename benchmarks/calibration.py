"""Compare calibration with plain inference and with onnxruntime's own quantization, whole processes on equal samples.

    python benchmarks/calibration.py --models DIR --data DIR [--peer] [--samples N] [--repeat N] [NAME ...]

``DIR/NAME.onnx`` is run on ``DIR/NAME/calib``. Prints ratios to the plain inference of the same run: time and
peak memory from the start of a process to its end, with statistics written. ``--peer`` adds quantize_static.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INFERENCE = """
import sys
import numpy as np, onnxruntime
from pathlib import Path
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
for path in sorted(Path(sys.argv[2]).glob("*.npz")):
    with np.load(path) as arrays:
        session.run(None, dict(arrays))
"""
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
from pathlib import Path
import onnxq
from onnxq.calibration.resume import Collection
from onnxq.calibration.workers import Processes, Threads
workers = {"process": Processes, "thread": Threads}[sys.argv[4]](int(sys.argv[5])) if len(sys.argv) > 4 else None
data = Path(sys.argv[2])
onnxq.calibrate(sys.argv[1], data, collection=Collection(workers=workers)).save(Path(sys.argv[3]))
"""


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes that a process took."""

    seconds: float
    bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer", action="store_true", help="run quantize_static of onnxruntime too")
    parser.add_argument("--samples", type=int, default=64, help="samples that each model runs")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names = options.names or [path.name for path in sorted(options.data.iterdir()) if path.is_dir()]
    header = (
        "model",
        "samples",
        "ours",
        "ours, memory",
        *(("MinMax", "Entropy", "Percentile") if options.peer else ()),
    )
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    ratios = [row(options, name) for name in names if (options.models / f"{name}.onnx").is_file()]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    print(f"\nGeometric mean of ours: {mean:.2f} times the plain inference")
    scaling(options, "effnet-lite0" if "effnet-lite0" in names else names[0])


def row(options: argparse.Namespace, name: str) -> float:
    """Print the line of one model and return our time in units of the plain inference."""
    model, data = options.models / f"{name}.onnx", options.data / name / "calib"
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        output = str(Path(folder) / "written")
        samples = links(data, Path(folder) / "samples", options.samples)
        programs: list[tuple[str, Sequence[str]]] = [(INFERENCE, ()), (OURS, ())]
        # Model, samples and the file to write come first in all programs.
        if options.peer:
            programs += [(PEER, (method,)) for method in ("MinMax", "Entropy", "Percentile")]
        found = [
            [cost(program, [str(model), str(samples), output, *more]) for program, more in programs]
            for _ in range(options.repeat)
        ]
    costs = [
        Cost(statistics.median(c.seconds for c in one), max(c.bytes for c in one)) for one in zip(*found, strict=True)
    ]
    plain, ours, *peers = costs
    cells = [f"`{name}`", str(options.samples), f"{ours.seconds / plain.seconds:.2f}"]
    cells.append(f"{ours.bytes / plain.bytes:.2f} ({ours.bytes / 1e6:.0f} of {plain.bytes / 1e6:.0f} MB)")
    cells += [f"{peer.seconds / plain.seconds:.2f} ({peer.bytes / 1e6:.0f} MB)" for peer in peers]
    print("| " + " | ".join(cells) + " |", flush=True)
    return ours.seconds / plain.seconds


def scaling(options: argparse.Namespace, name: str) -> None:
    """Print what more samples cost in memory, and what a second worker process saves in time."""
    model, data = options.models / f"{name}.onnx", options.data / name / "calib"
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        output = str(Path(folder) / "written")
        few, many = (links(data, Path(folder) / str(count), count) for count in (32, 512))
        memory = [cost(OURS, [str(model), str(target), output]).bytes for target in (few, many)]
        print(f"`{name}`: 512 samples take {memory[1] / memory[0]:.3f} times the memory of 32")
        seconds = [cost(OURS, [str(model), str(many), output, "process", str(jobs)]).seconds for jobs in (1, 2)]
        print(f"`{name}`: two worker processes are {seconds[0] / seconds[1]:.2f} times as fast as one on 512 samples")


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
