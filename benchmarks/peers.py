"""Quantize models with other tools' defaults beside onnxq's, and judge all of them alike on unseen samples.

    python benchmarks/peers.py --models DIR --data DIR [--peers DIR] [--json FILE] [--update README.md] [NAME ...]

MODELS/NAME.onnx is calibrated with DATA/NAME/calib and tested on DATA/NAME/eval, each of them a folder of .npz files of
one sample. Each of the others runs in an environment of its own, PEERS/TOOL, which is made if it is missing. A result
is useful if it loads, has 20 dB or more at its worst output and is at least 1.05 times as fast as float. ``--update``
puts the table of tools between the markers of that file. Ten models of 1 to 70 MB take some 20 minutes on two cores.
"""

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
import venv
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime
from processes import keep_bytecode

from onnxq.data.inputs import model_inputs
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import LoadError, OnnxqError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.latency import measure_latency
from onnxq.ir import load
from onnxq.onnx_api import weightless_model

RUNTIME = f"onnxruntime=={onnxruntime.__version__}"
# The tools ask for versions that exclude one another, so each has an environment. Quark does not ask for torch.
PACKAGES = {
    "onnxruntime": (RUNTIME, "onnx", "sympy"),
    "nncf": ("nncf", RUNTIME, "onnx"),
    "quark": ("amd-quark", "torch", RUNTIME, "onnx", "sympy"),
    "aimet": ("aimet-onnx",),
    "modelopt": ("nvidia-modelopt[onnx]",),
    "onnxsim": ("onnxsim", RUNTIME, "onnx"),
}
CACHE = Path.home() / ".cache" / "onnxq-benchmarks" / "quantizers"
MARKERS = "<!-- benchmarks/peers.py -->\n", "<!-- end -->\n"
TIMED_SAMPLES = 4
USEFUL_SQNR, USEFUL_SPEED = 20.0, 1.05

SAMPLES = """
import sys
from pathlib import Path
import numpy as np
source, calib, target = sys.argv[1:]
def samples():
    for path in sorted(Path(calib).glob("*.npz")):
        with np.load(path) as arrays:
            yield dict(arrays)
"""
STATIC = """
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
class Reader(CalibrationDataReader):
    def __init__(self):
        self.left = samples()
    def get_next(self):
        return next(self.left, None)
prepared = target + ".prepared.onnx"
try:
    quant_pre_process(source, prepared)
except Exception:
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
try:
    quantize_static(prepared, target, Reader(), per_channel=True)
except ValueError:
    # Biases of some models end its scales by channel in an exception.
    quantize_static(prepared, target, Reader())
"""
DYNAMIC = """
from onnxruntime.quantization import quantize_dynamic
quantize_dynamic(source, target, per_channel=True)
"""
NNCF = """
import nncf, onnx
onnx.save(nncf.quantize(onnx.load(source), nncf.Dataset(list(samples()))), target)
"""
QUARK = """
from quark.onnx import ModelQuantizer, QConfig
class Reader:
    def __init__(self):
        self.left = samples()
    def get_next(self):
        return next(self.left, None)
ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(source, target, Reader())
"""
AIMET = """
import onnx
from aimet_onnx import QuantizationSimModel
options = {"dummy_input": next(samples()), "param_type": "int8", "activation_type": "int8"}
simulation = QuantizationSimModel(onnx.load(source), **options)
simulation.compute_encodings(list(samples()))
onnx.save(simulation.to_onnx_qdq(), target)
"""
MODELOPT = """
from modelopt.onnx.quantization import quantize
class Reader:
    def __init__(self):
        self.left = samples()
    def get_next(self):
        return next(self.left, None)
    def get_first(self):
        return next(samples())
    def rewind(self):
        self.left = samples()
options = {"calibration_eps": ["cpu"], "high_precision_dtype": "fp32"}
quantize(source, "int8", calibration_data_reader=Reader(), output_path=target, **options)
"""
ONNXSIM = """
import onnx, onnxsim
onnx.save(onnxsim.quantize_static(onnx.load(source), list(samples())), target)
"""
PEERS = {
    "onnxruntime static": STATIC,
    "onnxruntime dynamic": DYNAMIC,
    "nncf": NNCF,
    "quark": QUARK,
    "aimet": AIMET,
    "modelopt": MODELOPT,
    "onnxsim": ONNXSIM,
}


@dataclass(frozen=True)
class Row:
    """What a tool made of a model.

    Attributes:
        model: its name.
        tool: who quantized it.
        sqnr: of the worst output on eval, in decibels.
        speed: against float, with one thread.
        size: share of the float file.
        seconds: of the process.
        failure: why there is no result.
    """

    model: str
    tool: str
    sqnr: float = math.nan
    speed: float = math.nan
    size: float = math.nan
    seconds: float = math.nan
    failure: str = ""

    @property
    def useful(self) -> bool:
        """Whether it is accurate and faster."""
        return not self.failure and self.sqnr >= USEFUL_SQNR and self.speed >= USEFUL_SPEED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", type=Path, default=CACHE, help="environments of the others")
    parser.add_argument("--tools", nargs="+", choices=["onnxq", *PEERS], default=["onnxq", *PEERS])
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each latency comparison; 0 skips it")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a tool may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update", type=Path, help="file to put the table of tools into")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    models = [
        path.resolve()
        for path in sorted(options.models.glob("*.onnx"))
        if not options.names or path.stem in options.names
    ]
    cases = [(path, data) for path in models if (data := samples_of(options.data.resolve(), path.stem)) is not None]
    if not cases:
        sys.exit(f"there are no such models in {options.models}, or no samples of them in {options.data}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keep_bytecode(Path(folder), "onnxq.cli.progress_bars", "onnxq.search.search")
        for model, data in cases:
            for tool in options.tools:
                command = command_of(tool, options.peers.absolute(), model, data / "calib")
                rows.append(verifier(tool, command, model, data / "eval", options))
                print(rows[-1], file=sys.stderr, flush=True)
    print(f"{by_model(rows)}\n\n{by_tool(rows)}")
    if options.update:
        update(options.update, by_tool(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def samples_of(data: Path, name: str) -> Path | None:
    """Return the folder of a model's samples: the longest name that its own begins with."""
    known = [folder for folder in data.iterdir() if folder.is_dir() and name.startswith(folder.name)]
    return max(known, key=lambda folder: len(folder.name), default=None)


def environment(folder: Path, name: str) -> Path:
    """Return the Python of a tool's environment, which is made if it is missing."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
    return python


def command_of(tool: str, peers: Path, model: Path, calib: Path) -> list[str]:
    """Return the command by which a tool quantizes a model, without the name of the file to write."""
    if tool == "onnxq":
        return [sys.executable, "-m", "onnxq", "quantize", str(model), "--calib", str(calib), "-o"]
    return [str(environment(peers, tool.split()[0])), "-c", SAMPLES + PEERS[tool], str(model), str(calib)]


def verifier(tool: str, command: Sequence[str], model: Path, data: Path, options: argparse.Namespace) -> Row:
    """Run a tool and judge what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "quantized.onnx"
        start = time.perf_counter()
        try:
            # Some tools leave files in the current folder.
            run = subprocess.run(
                [*command, str(target)],
                capture_output=True,
                text=True,
                check=False,
                timeout=options.timeout,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return Row(model.stem, tool, failure=f"no answer in {options.timeout:.0f} s")
        took = time.perf_counter() - start
        if run.returncode:
            message = run.stderr.strip().splitlines() or [f"exit {run.returncode}"]
            return Row(model.stem, tool, seconds=took, failure=message[-1][:120])
        try:
            agreement = compare_files(model, target, data)
            speed = speed_of(model, target, data, options.seconds) if options.seconds else math.nan
        except LoadError:
            return Row(model.stem, tool, seconds=took, failure="not loaded by onnxruntime")
        except OnnxqError as error:
            return Row(model.stem, tool, seconds=took, failure=str(error)[:120])
        if math.isinf(agreement.worst_sqnr):
            return Row(model.stem, tool, seconds=took, failure="left in float")
        size = target.stat().st_size / model.stat().st_size
        return Row(model.stem, tool, agreement.worst_sqnr, speed, size, took)


def speed_of(model: Path, target: Path, data: Path, seconds: float) -> float:
    """How many times as fast a result is as the float model, by turns with one thread."""
    timed = list(evenly(open_samples(data, model_inputs(weightless_model(load(model)))), TIMED_SAMPLES))
    return measure_latency(model, target, timed, seconds=seconds, threads=1).speed


def by_model(rows: Sequence[Row]) -> str:
    """Return a table of models by tools."""
    tools, models = list(dict.fromkeys(row.tool for row in rows)), list(dict.fromkeys(row.model for row in rows))
    found = {(row.model, row.tool): row for row in rows}
    lines = [
        "| dB / speed beside float | " + " | ".join(tools) + " |",
        "|---|" + "---|" * len(tools),
    ]
    lines += [f"| {model} | " + " | ".join(_cell(found[model, tool]) for tool in tools) + " |" for model in models]
    return "\n".join(lines)


def by_tool(rows: Sequence[Row]) -> str:
    """Return a table of the tools over all models, as README shows it."""
    models = len({row.model for row in rows})
    lines = [
        f"| with its defaults | results of {models} | {USEFUL_SQNR:.0f} dB or more "
        f"| and {USEFUL_SPEED:.2f}x as fast or more | speed beside float | size | time | no result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tool in dict.fromkeys(row.tool for row in rows):
        tried = [row for row in rows if row.tool == tool]
        done = [row for row in tried if not row.failure]
        if not done:
            lines.append(f"| {tool} | 0 | | | | | | {why(tried)} |")
            continue
        figures = [row.speed for row in done], [row.size for row in done], [row.seconds for row in done]
        means = [statistics.geometric_mean(values) for values in figures]
        accurate, useful = sum(row.sqnr >= USEFUL_SQNR for row in done), sum(row.useful for row in done)
        speed, size, seconds = means
        cells = [
            str(len(done)),
            str(accurate),
            str(useful),
            f"{speed:.2f}x",
            f"{size:.2f}",
            f"{seconds:.0f} s",
            why(tried),
        ]
        lines.append(f"| {tool} | " + " | ".join(cells) + " |")
    message = f"{platform.machine()}, {os.cpu_count()} cores, onnxruntime {onnxruntime.__version__}, one thread"
    message += f", on {time.strftime('%Y-%m-%d')}"
    by = "`python benchmarks/peers.py --models DIR --data DIR --update README.md`, on the models of `models/zoo.toml`"
    how = "judged on samples that no tool saw"
    return "\n".join(
        [
            *lines,
            "",
            f"By {by}, {how}. {message}. Means are geometric, of the results.",
            "Olive and Optimum call onnxruntime's quantizer.",
        ]
    )


def why(rows: Sequence[Row]) -> str:
    """Say why models have no result."""
    failures = Counter(row.failure for row in rows if row.failure)
    return "; ".join(f"{count}: {failure}" for failure, count in failures.items())


def update(path: Path, table: str) -> None:
    """Put a table between the markers of a file."""
    text, (start, end) = path.read_text(encoding="utf-8"), MARKERS
    before, _, rest = text.partition(start)
    if end not in rest:
        sys.exit(f"{path} has no place for the table, expected {start.strip()} and {end.strip()} in lines of their own")
    path.write_text(f"{before}{start}{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def _cell(row: Row) -> str:
    if row.failure:
        return "failed"
    message = f"{row.sqnr:.1f} / {row.speed:.2f}"
    return f"**{message}**" if row.useful else message


if __name__ == "__main__":
    main()
