"""Experts of a MoE as onnxruntime's QMoE, beside the float model and beside weights that are stored quantized.

    python benchmarks/experts.py [--update benchmarks/results/experts.md] [PRESET ...]

Each model is one MoE of random weights. It is quantized without a search, once with ``--emit qdq`` and once with
``--emit ort``. Memory is what a process holds more after it has loaded a model and run one token. Times of the three
models are taken in turns with all cores, and the speed is the ratio of medians. Decibels are those beside float.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from onnxq import PRESETS, Budget, Goal, quantize
from onnxq.calibration.provenance import instruction_set
from onnxq.runtime.interleaved_timing import time_interleaved
from onnxq.runtime.sessions import open_session, run

TOKENS = 1, 16, 128
SECONDS = 1.5
MEMORY = """
import sys
import numpy as np, onnxruntime
held = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = held()
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {one.name: np.ones((1, one.shape[1]), np.float32) for one in session.get_inputs()})
print(held() - before)
"""


@dataclass(frozen=True)
class Shape:
    """The extents of a MoE, and how many of its experts each token takes."""

    experts: int
    hidden: int
    inner: int
    chosen: int
    activation: str

    def __str__(self) -> str:
        return f"{self.experts} of {self.hidden}x{self.inner}, {self.chosen} a token, {self.activation}"


SHAPES = (
    Shape(8, 256, 512, 2, "silu"),
    Shape(16, 768, 3072, 1, "relu"),
    Shape(8, 1024, 2048, 2, "silu"),
    Shape(32, 1024, 512, 4, "swiglu"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["int4-block32-rtn", "int8-block32"])
    parser.add_argument("--update", type=Path)
    options = parser.parse_args()
    lines = [
        f"By `python benchmarks/experts.py`, onnxruntime {onnxruntime.__version__}, {instruction_set()}.\n",
        "| experts | form | MB | memory, MB | dB | " + " | ".join(f"{count} tokens" for count in TOKENS) + " |",
        "|---|---|---|---|---|" + "---|" * len(TOKENS),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for preset, shape in product(options.presets, SHAPES):
            lines += rows(shape, preset, Path(folder))
            print(*lines[-2:], sep="\n", file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.update:
        options.update.write_text(text)


def rows(shape: Shape, preset: str, folder: Path) -> Iterator[str]:
    """Yield a line of the table for each form of one MoE."""
    files = {name: folder / f"{name}.onnx" for name in ("float", "stored", "QMoE")}
    onnx.save(moe(shape), files["float"])
    for name, emit in (("stored", "qdq"), ("QMoE", "ort")):
        quantize(
            files["float"],
            [tokens(shape, 16, seed) for seed in range(4)],
            files[name],
            scheme=replace(PRESETS[preset], emit=emit),
            goal=Goal(force=True),
            budget=Budget(search="off", accuracy="off", latency_seconds=0, certificate=False),
        )
    sessions = {name: open_session(file) for name, file in files.items()}
    speeds: dict[str, list[float]] = {name: [] for name in files}
    for count in TOKENS:
        runs = [lambda sample, session=session: run(session, sample) for session in sessions.values()]
        (turns,) = time_interleaved(runs, [tokens(shape, count, 9)], SECONDS)
        medians = [statistics.median(times) for times in zip(*turns, strict=True)]
        for name, seconds in zip(files, medians, strict=True):
            speeds[name].append(medians[0] / seconds)
    sample = tokens(shape, 128, 10)
    (expected,) = run(sessions["float"], sample)
    for name, file in files.items():
        (found,) = run(sessions[name], sample)
        error = np.square(found - expected).sum() / np.square(expected).sum()
        held = int(subprocess.run([sys.executable, "-c", MEMORY, file], check=True, capture_output=True).stdout)
        cells = [
            f"{file.stat().st_size / 1e6:.1f}",
            f"{held / 1e6:.0f}",
            f"{-10 * np.log10(error):.1f}" if error else "",
        ]
        times = (f"{speed:.2f}x" for speed in speeds[name])
        form = name if name == "float" else f"{preset}, {name}"
        yield f"| {' | '.join([str(shape) if name == 'float' else '', form, *cells, *times])} |"


def moe(shape: Shape) -> onnx.ModelProto:
    """Return a model of one MoE whose weights are normally distributed."""
    generator, width = np.random.default_rng(0), shape.inner * (2 if shape.activation == "swiglu" else 1)
    weights = {"w1": (shape.experts, width, shape.hidden), "w2": (shape.experts, shape.hidden, shape.inner)}
    stored = [
        numpy_helper.from_array(generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5), name)
        for name, extents in weights.items()
    ]
    fused: dict[str, Any] = (
        {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0} if width > shape.inner else {}
    )
    node = helper.make_node(
        "MoE", ["x", "r", "w1", "", "w2"], ["y"], "moe", domain="com.microsoft", k=shape.chosen,
        activation_type=shape.activation, normalize_routing_weights=1, **fused,
    )  # fmt: skip
    ends = {name: (name == "r" and shape.experts) or shape.hidden for name in ("x", "r", "y")}
    x, r, y = (helper.make_tensor_value_info(name, 1, ["tokens", extent]) for name, extent in ends.items())
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "moe", [x, r], [y], stored), opset_imports=opsets, ir_version=10)


def tokens(shape: Shape, count: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    generator = np.random.default_rng(seed)
    extents = {"x": shape.hidden, "r": shape.experts}
    return {name: generator.standard_normal((count, extent), np.float32) for name, extent in extents.items()}


if __name__ == "__main__":
    main()
