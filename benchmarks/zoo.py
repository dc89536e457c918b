"""Quantize every model of a folder through the command line and print what came out, measured on unseen samples.

    python benchmarks/zoo.py --models DIR --data DIR [--plain] [--json FILE] [NAME ...] [-- further options of quantize]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib and tested on DATA/NAME/eval (or calib when there is no eval). A
model without a data folder of its own name takes the one whose name its own starts with. The size allowed is a quarter
of the float weights, and the rest of the file, and 5 %. ``--plain`` adds what every node as static and as dynamic
integers comes to without any search; ``--json`` keeps each model's frontier.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx import TensorProto
from processes import inference_seconds, keep_bytecode

from onnxq.data.inputs import model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.latency import measure_latency
from onnxq.ir import constants, load, onnx_dtype
from onnxq.onnx_api import weightless_model

TIMED_SAMPLES = 4
PLAIN = {"static": "int8", "dynamic": "int8-dynamic"}


@dataclass(frozen=True)
class Plain:
    """What a model without any search comes to, or why there is none."""

    sentence: str = ""
    sqnr: float = math.nan
    speed: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    valid: bool
    sentence: str = ""
    sqnr: float = math.nan
    agreement: float | None = None
    size_ratio: float = math.nan
    size_allowed: float = math.nan
    integer_kernels: int = 0
    float_heavy: int = 0
    speed: tuple[float, ...] = ()
    seconds: float = math.nan
    inference: float = math.nan
    plain: Mapping[str, Plain] = field(default_factory=dict)
    frontier: Sequence[Mapping[str, Any]] = ()


def main() -> None:
    arguments = sys.argv[1:]
    further = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each latency comparison")
    parser.add_argument("--plain", action="store_true", help="also without search: all static, all dynamic")
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments[: len(arguments) - len(further) - bool(further)])
    models = [path for path in sorted(options.models.glob("*.onnx")) if not options.names or path.stem in options.names]
    if not models:
        sys.exit(f"there are no such models in {options.models}")
    threads = sorted({1, len(os.sched_getaffinity(0))})
    print(f"{platform.processor() or platform.machine()}, {_cpu()}, threads {' and '.join(map(str, threads))}\n")
    header = ["model", "valid", "SQNR dB", "same arg max", "size", "allowed", "integer kernels", "float heavy"]
    header += [*(f"speed, {n} thr" for n in threads), "time s", "inference s"]
    header += [f"plain {kind}" for kind in PLAIN] if options.plain else []
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keep_bytecode(Path(folder), "onnxq.cli.progress_bars", "onnxq.search.search")
        for path in models:
            data = _samples(options.data, path.stem)
            row = verifier(path, data, threads, options.seconds, further)
            if options.plain and row.valid:
                row = replace(row, plain=plain(path, data, threads, options.seconds))
            rows.append(row)
            print(_line(row, len(header)), flush=True)
    done = [row for row in rows if row.valid]
    if done:
        print(f"\n{len(done)} valid of {len(rows)}; geometric means: size {_mean([r.size_ratio for r in done]):.2f}")
        print(
            ", ".join(f"speed with {n} threads {_mean([r.speed[i] for r in done]):.2f}" for i, n in enumerate(threads))
        )
        times = [row.seconds / row.inference for row in done]
        print(f"time in units of inference over the same samples: {_mean(times):.1f}, at most {max(times):.1f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def verifier(model: Path, data: Path | None, threads: list[int], seconds: float, further: list[str]) -> Row:
    """Quantize one model through the command line and judge the written file."""
    calib = data / "calib" if data is not None else model.parent
    holdout = data / "eval" if data is not None and (data / "eval").is_dir() else calib
    with tempfile.TemporaryDirectory() as folder:
        output, report = Path(folder) / "quantized.onnx", Path(folder) / "report.json"
        command = [sys.executable, "-m", "onnxq", "quantize", str(model), "--calib", str(calib), "-o", str(output)]
        start = time.perf_counter()
        run = subprocess.run([*command, "--report", str(report), *further], capture_output=True, text=True, check=False)
        took = time.perf_counter() - start
        if run.returncode:
            return Row(model.stem, False, f"exit {run.returncode}: {run.stderr.strip().splitlines()[-1]}", seconds=took)
        written = json.loads(report.read_text())
        agreement = compare_files(model, output, holdout)
        return Row(
            model.stem,
            agreement.sound,
            sqnr=agreement.worst_sqnr,
            agreement=agreement.worst_agreement,
            size_ratio=written["size_ratio"],
            size_allowed=_allowed(model, written["files"]["float_bytes"]),
            integer_kernels=written["performance"]["kernels"]["integer"],
            float_heavy=written["performance"]["kernels"]["heavy_float"],
            speed=_speeds(model, output, holdout, threads, seconds),
            seconds=took,
            inference=inference_seconds(model, calib),
            frontier=written["search"]["frontier"],
        )


def plain(model: Path, data: Path | None, threads: list[int], seconds: float) -> Mapping[str, Plain]:
    """Return what the model comes to without any search."""
    found = {}
    for kind, preset in PLAIN.items():
        row = verifier(
            model, data, threads, seconds, ["--preset", preset, "--search", "off", "--force", "--latency-seconds", "0"]
        )
        found[kind] = Plain(row.sentence, row.sqnr, row.speed)
    return found


def _speeds(model: Path, output: Path, holdout: Path, threads: list[int], seconds: float) -> tuple[float, ...]:
    samples = open_samples(holdout, model_inputs(weightless_model(load(model))))
    timed = list(evenly(samples, TIMED_SAMPLES))
    return tuple(measure_latency(model, output, timed, seconds=seconds, threads=n).speed for n in threads)


def _allowed(model: Path, size: int) -> float:
    """Return the size allowed as a share of the model's."""
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    weights = sum(tensor.nbytes for tensor in constants(load(model)) if onnx_dtype(tensor) in floats)
    return 1.05 * (weights / 4 + size - weights) / size


def _samples(data: Path, name: str) -> Path | None:
    known = [folder for folder in data.iterdir() if folder.is_dir() and name.startswith(folder.name)]
    return max(known, key=lambda folder: len(folder.name), default=None)


def _line(row: Row, columns: int) -> str:
    if not row.valid:
        return f"| {row.model} | no: {row.sentence} |" + " |" * (columns - 2)
    cells = [
        row.model,
        "yes",
        f"{row.sqnr:.1f}",
        "-" if row.agreement is None else f"{row.agreement:.3f}",
        f"{row.size_ratio:.3f}",
        f"{row.size_allowed:.3f}",
        str(row.integer_kernels),
        str(row.float_heavy),
        *(f"{speed:.2f}" for speed in row.speed),
        f"{row.seconds:.1f}",
        f"{row.inference:.2f}",
        *(_plain_cell(found) for found in row.plain.values()),
    ]
    return "| " + " | ".join(cells) + " |"


def _plain_cell(found: Plain) -> str:
    return found.sentence or f"{found.sqnr:.1f} dB, " + " / ".join(f"{speed:.2f}" for speed in found.speed)


def _mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.platform()


if __name__ == "__main__":
    main()
