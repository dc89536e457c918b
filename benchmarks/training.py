"""What training gives back: the committed classifiers in few bits, and real models without labels.

    python benchmarks/training.py [--output results/training.json] [MODEL:PRESET ...]
    python benchmarks/training.py --models DIR --data DIR [--output results/training.json] MODEL:PRESET ...

Each row is one model in one preset without a search: after post-training quantization, with scales and zero points
learned, and with weights and biases learned as well, all by distillation from the float model on its calibration
samples. The classifiers are judged on the 2,500 committed test images, models of DIR on DIR/MODEL/eval, by decibels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from fashion_mnist import MODELS, answers, correct, wilson

from onnxq import Budget, Goal, compare_files
from onnxq.training import Training
from onnxq.training.pipeline import train

USUAL = (
    "mobilenet:torch-qnnpack",
    "mobilenet:int2-block16",
    "resnet:int2-block16",
    "vit:int2-block16",
    "gru:int2-block16",
)
STEPS = {"scales": ("scales", "zero-points"), "scales and weights": ("weights", "biases", "scales", "zero-points")}
HEADER = ("model", "preset", "learned", "decibels before", "decibels", "accuracy (95 %)", "seconds")


@dataclass(frozen=True)
class Row:
    """One training; decibels are of the worst output, on samples that nothing was learned from or chosen by."""

    model: str
    preset: str
    learned: str
    before: float
    decibels: float
    accuracy: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder of models; those of models/ otherwise")
    parser.add_argument("--data", type=Path, help="folder of MODEL/calib and MODEL/eval")
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("wanted", nargs="*", default=USUAL, metavar="MODEL:PRESET")
    options = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    rows = []
    for wanted in options.wanted:
        name, _, preset = wanted.partition(":")
        for row in trained(name, preset, options.models, options.data):
            rows.append(row)
            cells = (row.model, row.preset, row.learned, f"{row.before:.1f}", f"{row.decibels:.1f}", row.accuracy)
            print("| " + " | ".join((*cells, f"{row.seconds:.0f}")) + " |", flush=True)
    if options.output:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def trained(name: str, preset: str, models: Path | None, data: Path | None) -> Iterator[Row]:
    """Yield a row for each step of what learns."""
    model = (models or MODELS) / f"{name}.onnx"
    calibration = MODELS / "data" / "calib.npz" if data is None else data / name / "calib"
    judging = MODELS / "data" / "test.npz" if data is None else data / name / "eval"
    accuracy = accuracy_of if data is None else lambda path: "-"
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        before = 0.0
        for learned, what in {"nothing": (), **STEPS}.items():
            output, start = Path(folder) / "trained.onnx", time.perf_counter()
            # A step that changes nothing leaves what post-training quantization has found.
            training = Training(learn=what) if what else Training(learn=("scales",), epochs=1, rate=1e-30)
            budget = Budget("off", latency=0)
            train(model, calibration, output, scheme=preset, goal=Goal(force=True), budget=budget, training=training)
            seconds, decibels = time.perf_counter() - start, compare_files(model, output, judging).worst_sqnr
            before = before or decibels
            yield Row(name, preset, learned, before, decibels, accuracy(output), seconds)


def accuracy_of(model: Path) -> str:
    """Return the share of the committed test images that a classifier gets right, with its interval."""
    images, labels = np.load(MODELS / "data" / "test.npz")["image"], np.load(MODELS / "data" / "test-labels.npy")
    right = correct(answers(model, images), labels)
    low, high = wilson(right, len(labels))
    return f"{right / len(labels):.2%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
