"""What each accuracy method buys: decibels on unseen samples, all nodes as the preset says, and the time it takes.

    python benchmarks/accuracy.py --models DIR --data DIR [--preset NAME] [--effort NAME ...] [NAME ...]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib and judged on DATA/NAME/eval; a model without a data folder of its
own name takes the one whose name its own starts with. The project's own models/ are judged on labelled test images that
calibration has not seen. There is no search: every node that can be is quantized, faithful or not. A column is what
``--accuracy`` is given: nothing, one method alone with all effort, or all of them, fast or full. Seconds are of whole
processes that calibrate, choose and write.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxq.accuracy.effort import METHODS
from onnxq.judging.agreement import compare_files

OWN = Path(__file__).parents[1] / "models"
EFFORTS = ("off", *METHODS, "fast", "full")
EVALUATED = 512


@dataclass(frozen=True)
class Case:
    """A model with samples to calibrate by, and others to judge by."""

    name: str
    model: Path
    calibration: Path
    evaluation: Path


@dataclass(frozen=True)
class Result:
    """What came out of one effort: decibels of the worst output on unseen samples, seconds, or why there is none."""

    sqnr: float = math.nan
    seconds: float = math.nan
    kept: str = ""
    failure: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--preset", default="int8")
    parser.add_argument("--effort", nargs="*", choices=EFFORTS, default=EFFORTS)
    parser.add_argument("--results", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    rows: list[tuple[str, list[Result]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(options.models, options.data, Path(scratch)):
            if options.names and case.name not in options.names:
                continue
            found = [measured(case, options.preset, effort, Path(scratch)) for effort in options.effort]
            rows.append((case.name, found))
            print("\n".join(_lines(case.name, options.effort, found)), file=sys.stderr, flush=True)
    text = "\n".join(table(options.preset, options.effort, rows))
    print(text)
    if options.results is not None:
        options.results.write_text(text + "\n", encoding="utf-8")


def cases(models: Path | None, data: Path | None, scratch: Path) -> Iterator[Case]:
    """Yield our own models, and those of a folder that have unseen samples."""
    images = scratch / "unseen.npz"
    np.savez(images, image=np.load(OWN / "data" / "test.npz")["image"][:EVALUATED])
    for model in sorted(OWN.glob("*.onnx")):
        yield Case(model.stem, model, OWN / "data" / "calib.npz", images)
    if models is None or data is None:
        return
    folders = sorted(path.name for path in data.iterdir())
    for model in sorted(models.glob("*.onnx")):
        folder = next((name for name in reversed(folders) if model.stem.startswith(name)), "")
        if folder and (data / folder / "eval").exists():
            yield Case(model.stem, model, data / folder / "calib", data / folder / "eval")


def measured(case: Case, preset: str, effort: str, scratch: Path) -> Result:
    """Quantize a model in a process of its own, and compare the outcome with float."""
    output, report = scratch / "out.onnx", scratch / "report.json"
    command = [sys.executable, "-m", "onnxq", "quantize", str(case.model), "--calib", str(case.calibration)]
    command += ["-o", str(output), "--preset", preset, "--accuracy", effort, "--report", str(report)]
    start = time.perf_counter()
    done = subprocess.run([*command, "--search", "off", "--seconds", "0", "--force"], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        return Result(failure=done.stderr.strip().splitlines()[-1])
    gains = json.loads(report.read_text(encoding="utf-8"))["encoding"]["gains"]
    kept = ", ".join(f"{gain['method']}: {gain['kept']}" for gain in gains if gain["kept"])
    return Result(compare_files(case.model, output, case.evaluation).worst_sqnr, seconds, kept)


def table(preset: str, efforts: Sequence[str], rows: Sequence[tuple[str, Sequence[Result]]]) -> list[str]:
    """Return the lines of a table in Markdown: decibels, and seconds behind them."""
    lines = [f"# Accuracy methods, {preset}, no search", "", f"{platform.machine()}, onnxq on all cores", ""]
    lines += ["SQNR in dB of the worst output on unseen samples / seconds of the whole command", ""]
    lines.append("| model | " + " | ".join(efforts) + " |")
    lines.append("|---" * (len(efforts) + 1) + "|")
    for name, found in rows:
        cells = ["failed" if one.failure else f"{one.sqnr:.1f} / {one.seconds:.0f}" for one in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Kept by the last effort:", ""]
    lines += [f"- {name}: {found[-1].failure or found[-1].kept or 'nothing'}" for name, found in rows]
    return lines


def _lines(name: str, efforts: Sequence[str], found: Sequence[Result]) -> Iterator[str]:
    for effort, one in zip(efforts, found, strict=True):
        yield f"{name} {effort}: {one.failure or f'{one.sqnr:.1f} dB, {one.seconds:.0f} s'} {one.kept}"


if __name__ == "__main__":
    main()
