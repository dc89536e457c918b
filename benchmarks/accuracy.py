"""What each accuracy method buys: decibels on unseen samples, all nodes as the preset says, and the time it takes.

    python benchmarks/accuracy.py --models DIR --data DIR [--preset NAME ...] [--effort NAME ...] [NAME ...]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib and tested on DATA/NAME/eval; a model without a data folder of its
own name takes the one whose name its own starts with. The project's own models/ are judged on labelled test images that
calibration has not seen. There is no search: every node that can be is quantized, faithful or not. A column is what
``--accuracy`` is given: nothing, one method alone with all effort, or all of them, fast or full. Seconds are of whole
processes that calibrate, choose and write. In the end stands of each bar that was measured whether it is met: of
decibels, and of seconds beside those of a process that runs the float model over the same samples. The command fails
where one is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from processes import inference_seconds, keep_bytecode

from onnxq.config.effort import METHODS
from onnxq.evaluation.agreement import compare_files

OWN = Path(__file__).parents[1] / "models"
EFFORTS = ("off", *METHODS, "fast", "full")
EVALUATED = 512
PRESETS = ("int8", "int4-block32")
# Decibels with all effort, by preset and model.
BARS = {
    "int8": {
        "silero-vad-ifless": 22.0,
        "magika": 39.0,
        "minilm-l3": 23.0,
        "effnet-lite0": 25.0,
        "mobilenet": 35.5,
        "ppocr-rec": 20.0,
        "ppocr-det": 14.2,
    },
    "int4-block32": {"minilm-l3": 18.5, "vit": 30.0},
}
# By how many decibels all effort exceeds none in blocks of 4 bits.
GAINS = {"int4-block32": {"resnet": 2.0, "gru": 2.0}}
# Fast may cost so many decibels, by luck.
LOSS = 0.3
# Seconds in units of those of inference, geometric mean over the models of the default preset.
TIMES = {"fast": 4.0, "full": 10.0}


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


Rows = dict[str, dict[str, Result]]
"""What came out, by model and effort."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--preset", nargs="*", default=PRESETS)
    parser.add_argument("--effort", nargs="*", choices=EFFORTS, default=EFFORTS)
    parser.add_argument("--results", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    text: list[str] = []
    missed = False
    with tempfile.TemporaryDirectory() as scratch:
        keep_bytecode(Path(scratch), "onnxq.cli.progress_bars")
        wanted = [case for case in cases(options.models, options.data, Path(scratch)) if is_named(case, options.names)]
        floats = {
            case.name: inference_seconds(case.model, case.calibration) for case in wanted if case.calibration.is_dir()
        }
        for preset in options.preset:
            rows: Rows = {}
            for case in wanted:
                rows[case.name] = {effort: measured(case, preset, effort, Path(scratch)) for effort in options.effort}
                print("\n".join(_lines(case.name, rows[case.name])), file=sys.stderr, flush=True)
            bars = list(holdout(preset, rows, floats))
            missed |= not all(met for met, _ in bars)
            text += [*table(preset, options.effort, rows), ""]
            text += [*(f"- {'met' if met else 'MISSED'}: {bar}" for met, bar in bars), ""]
    print("\n".join(text))
    if options.results is not None:
        options.results.write_text("\n".join(text), encoding="utf-8")
    sys.exit(1 if missed else 0)


def is_named(case: Case, names: Sequence[str]) -> bool:
    """Whether a model was asked for; all are where none is named."""
    return not names or case.name in names


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
    done = subprocess.run(
        [*command, "--search", "off", "--latency-seconds", "0", "--force"], capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        return Result(failure=done.stderr.strip().splitlines()[-1])
    gains = json.loads(report.read_text(encoding="utf-8"))["encoding"]["gains"]
    kept = ", ".join(f"{gain['method']}: {gain['kept']}" for gain in gains if gain["kept"])
    return Result(compare_files(case.model, output, case.evaluation).worst_sqnr, seconds, kept)


def holdout(preset: str, rows: Rows, floats: Mapping[str, float]) -> Iterator[tuple[bool, str]]:
    """Yield whether each bar that was measured is met, and what it says."""
    for name, least in BARS.get(preset, {}).items():
        if "full" in rows.get(name, {}):
            reached = rows[name]["full"].sqnr
            yield reached >= least, f"{name} full {reached:.1f} dB, at least {least} wanted"
    for name, more in GAINS.get(preset, {}).items():
        if {"off", "full"} <= rows.get(name, {}).keys():
            gained = rows[name]["full"].sqnr - rows[name]["off"].sqnr
            yield gained >= more, f"{name} full {gained:+.1f} dB over off, at least {more:+.1f} wanted"
    for name, row in rows.items():
        if {"off", "fast"} <= row.keys():
            lost = row["off"].sqnr - row["fast"].sqnr
            yield lost <= LOSS, f"{name} fast {-lost:+.1f} dB over off, at least {-LOSS} wanted"
    for effort, most in TIMES.items() if preset == PRESETS[0] else ():
        took = [rows[name][effort].seconds / seconds for name, seconds in floats.items() if effort in rows[name]]
        took = [one for one in took if math.isfinite(one)]
        if took:
            mean = statistics.geometric_mean(took)
            yield mean <= most, f"{effort} takes {mean:.1f} times as long as inference, at most {most} wanted"


def table(preset: str, efforts: Sequence[str], rows: Rows) -> list[str]:
    """Return the lines of a table in Markdown: decibels, and seconds behind them."""
    lines = [f"# Accuracy methods, {preset}, no search", "", f"{platform.machine()}, onnxq on all cores", ""]
    lines += ["SQNR in dB of the worst output on unseen samples / seconds of the whole command", ""]
    lines.append("| model | " + " | ".join(efforts) + " |")
    lines.append("|---" * (len(efforts) + 1) + "|")
    for name, found in rows.items():
        cells = ["failed" if one.failure else f"{one.sqnr:.1f} / {one.seconds:.0f}" for one in found.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Kept by the last effort:", ""]
    last = {name: list(found.values())[-1] for name, found in rows.items()}
    return [*lines, *(f"- {name}: {one.failure or one.kept or 'nothing'}" for name, one in last.items())]


def _lines(name: str, found: Mapping[str, Result]) -> Iterator[str]:
    for effort, one in found.items():
        yield f"{name} {effort}: {one.failure or f'{one.sqnr:.1f} dB, {one.seconds:.0f} s'} {one.kept}"


if __name__ == "__main__":
    main()
