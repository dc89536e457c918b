"""Quantize the committed classifiers in every way and count how many test images each still gets right.

    python benchmarks/fashion_mnist.py [--update models/README.md] [NAME ...]

Prints a Markdown table; ``--update`` also puts it between the markers of that file. The first row of a quantized model
is what the command gives by default, those behind it are the presets without a search. Speed is beside the float
model, with all threads, for one image.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxq import PRESETS, quantize
from onnxq.evaluation.agreement import Agreement, agreement_of
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.request import Budget
from onnxq.report import Report
from onnxq.runtime.sessions import Array, open_session, output_names, run

MODELS = Path(__file__).parent.parent / "models"
BATCH = 500
SECONDS = 1.0
BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
HEADER = (
    "model",
    "preset",
    "accuracy, 2,500 test images (95 %)",
    "same class as float",
    "SQNR dB",
    "size",
    "speed",
    "integer kernels",
    "convolutions and products in float",
)


@dataclass(frozen=True)
class Row:
    """One model as it is or quantized; agreement and report are None for the float model."""

    model: str
    preset: str
    correct: int
    count: int
    agreement: Agreement | None = None
    report: Report | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, help="file to put the table into")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    models = [path for path in sorted(MODELS.glob("*.onnx")) if not options.names or path.stem in options.names]
    if not models:
        sys.exit(f"there are no such models in {MODELS}")
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    print("\n".join(lines))
    for model in models:
        for row in verifier(model):
            lines.append(as_line(row))
            print(lines[-1], flush=True)
    if options.update:
        update(options.update, "\n".join(lines))


def verifier(model: Path) -> Iterator[Row]:
    """Yield the float model, what quantize gives by default, and every preset as it is."""
    images = np.load(MODELS / "data" / "test.npz")["image"]
    labels = np.load(MODELS / "data" / "test-labels.npy")
    expected = answers(model, images)
    yield Row(model.stem, "float", correct(expected, labels), len(labels))
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        output = Path(folder) / "quantized.onnx"
        for preset, search in (("int8", "fast"), *((preset, "off") for preset in PRESETS)):
            report = quantized(model, output, preset, search=search)
            found = answers(output, images)
            agreement = agreement_of(["logits"], zip(expected, found, strict=True))
            name = "by default" if search == "fast" else preset
            yield Row(model.stem, name, correct(found, labels), len(labels), agreement, report)


def quantized(model: Path, output: Path, preset: str, *, search: str) -> Report:
    """Write the quantized model, below the default accuracy goal as well, and return its report."""
    calibration = MODELS / "data" / "calib.npz"
    return quantize(
        model,
        calibration,
        output,
        scheme=preset,
        goal=Goal(force=True),
        budget=Budget(search=search, latency_seconds=SECONDS),
    ).report


def answers(model: Path, images: Array) -> list[list[Array]]:
    """Return the outputs of a model for each batch of images."""
    session = open_session(model)
    batches = np.split(images, range(BATCH, len(images), BATCH))
    return [run(session, {"image": batch}, output_names(session)) for batch in batches]


def correct(batches: list[list[Array]], labels: Array) -> int:
    """Count the images whose largest logit is their class."""
    logits = np.concatenate([outputs[0] for outputs in batches])
    return int(np.count_nonzero(logits.argmax(axis=-1) == labels))


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion."""
    z = 1.959964
    share, spread = correct / count, z * z / count
    centre = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return (centre - half) / (1 + spread), (centre + half) / (1 + spread)


def as_line(row: Row) -> str:
    low, high = wilson(row.correct, row.count)
    cells = [f"`{row.model}`", row.preset, f"{row.correct / row.count:.2%} ({low:.1%} to {high:.1%})"]
    if row.agreement is None or row.report is None:
        return "| " + " | ".join(cells) + " |" + " |" * (len(HEADER) - len(cells))
    kernels = row.report.performance.kernels
    cells += [f"{row.agreement.worst_agreement:.2%}", f"{row.agreement.worst_sqnr:.1f}", f"{row.report.size_ratio:.3f}"]
    cells.append("-" if row.report.latency is None else f"{row.report.latency.speed:.2f}")
    return "| " + " | ".join([*cells, str(kernels.integer), str(kernels.heavy_float)]) + " |"


def update(path: Path, table: str) -> None:
    """Replace what stands between the markers."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{path} must hold {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
