"""What an SQNR means for a classifier, a detector and a sentence encoder: the share of answers that stay.

    python benchmarks/decibels.py --models DIR --data DIR [--update docs/explanation/sqnr.md]

Each model is quantized by several presets without a search, and both models run on samples that calibration did not
see. SQNR is of the output that the task reads. The answers are:

- classifier (models/mobilenet.onnx, 2,500 images): the class with the greatest logit;
- detector (ddddocr-det): boxes with a score above 0.3 that have the same anchor and an IoU of 0.9 or more;
- encoder (minilm-l3): the nearest of the other sentences.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from onnxq import Budget, Data, Goal, quantize

OWN = Path(__file__).parents[1] / "models"
PRESETS = ("int8-storage", "int8", "float8-e5m2", "mxfp6", "uint4-block32", "int4-block32", "mxfp4", "int2-block16")
MARKERS = "<!-- benchmarks/decibels.py -->\n", "<!-- end -->\n"
STRIDES = (8, 16, 32)
SIDE = 416


@dataclass(frozen=True)
class Task:
    """A model and the answers that are read from one of its outputs."""

    kind: str
    name: str
    model: Path
    calibration: Path
    evaluation: Path
    output: str
    agreement: Callable[[list[np.ndarray], list[np.ndarray]], float]


def same_class(reference: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The share of rows with the same greatest element."""
    return float(np.mean(np.concatenate(reference).argmax(-1) == np.concatenate(other).argmax(-1)))


def same_neighbour(reference: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The share of rows whose nearest other row by cosine is the same."""
    return float(np.mean(neighbours(np.concatenate(reference)) == neighbours(np.concatenate(other))))


def neighbours(rows: np.ndarray) -> np.ndarray:
    """The index of the nearest other row."""
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -1)
    nearest: np.ndarray = cosines.argmax(1)
    return nearest


def same_boxes(reference: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The share of boxes that both models find, of those that either finds."""
    kept = found = 0
    for one, two in zip(reference, other, strict=True):
        first, second = (output[0, :, 4] * output[0, :, 5:].max(-1) > 0.3 for output in (one, two))
        overlap = intersection_over_union(corners(one[0]), corners(two[0])) >= 0.9
        kept += int(np.sum(first & second & overlap))
        found += int(np.sum(first | second))
    return kept / found


def corners(rows: np.ndarray) -> np.ndarray:
    """Boxes of YOLOX, relative to their cells, as left, top, right and bottom in pixels."""
    cells = [np.stack(np.meshgrid(*[np.arange(SIDE // stride)] * 2), -1).reshape(-1, 2) for stride in STRIDES]
    strides = np.concatenate([np.full((len(cell), 1), stride) for cell, stride in zip(cells, STRIDES, strict=True)])
    centres, sizes = (rows[:, :2] + np.concatenate(cells)) * strides, np.exp(rows[:, 2:4]) * strides
    return np.concatenate((centres - sizes / 2, centres + sizes / 2), 1)


def intersection_over_union(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """IoU of boxes, row by row."""
    sides = np.minimum(one[:, 2:], two[:, 2:]) - np.maximum(one[:, :2], two[:, :2])
    both = np.prod(np.maximum(sides, 0), 1)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], 1) for boxes in (one, two)]
    overlap: np.ndarray = both / (areas[0] + areas[1] - both)
    return overlap


def tasks(models: Path, data: Path) -> Iterator[Task]:
    """The three models."""
    images = OWN / "data"
    own = OWN / "mobilenet.onnx"
    yield Task("classifier", "mobilenet", own, images / "calib.npz", images / "test.npz", "logits", same_class)
    for kind, name, output, agreement in (
        ("detector", "ddddocr-det", "output", same_boxes),
        ("encoder", "minilm-l3", "461", same_neighbour),
    ):
        folder = data / name
        yield Task(kind, name, models / f"{name}.onnx", folder / "calib", folder / "eval", output, agreement)


def outputs(model: Path, task: Task) -> list[np.ndarray]:
    """The task's output for every file of samples."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    files = [task.evaluation] if task.evaluation.is_file() else sorted(task.evaluation.glob("*.npz"))
    return [session.run([task.output], dict(np.load(file)))[0] for file in files]


def rows(task: Task) -> Iterator[str]:
    """Lines of the table, by falling SQNR."""
    reference = outputs(task.model, task)
    found = []
    budget = Budget(search="off", accuracy="off", latency_seconds=0)
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            target = Path(folder) / f"{preset}.onnx"
            data = Data(task.calibration)
            quantize(task.model, data, target, scheme=preset, goal=Goal(force=True), budget=budget)
            answers = outputs(target, task)
            signal = sum(float(np.sum(np.square(one, dtype=np.float64))) for one in reference)
            error = sum(
                float(np.sum(np.square(one - two, dtype=np.float64)))
                for one, two in zip(reference, answers, strict=True)
            )
            found.append((10 * np.log10(signal / error), preset, task.agreement(reference, answers)))
    for sqnr, preset, share in sorted(found, reverse=True):
        yield f"| {task.kind} | `{preset}` | {sqnr:.1f} dB | {share:.1%} |"


def main() -> None:
    """Measure, and print or update the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--update", type=Path)
    options = parser.parse_args()
    lines = ["| model | preset | SQNR | answers that stay |", "|---|---|---|---|"]
    for task in tasks(options.models, options.data):
        lines += rows(task)
    table = "\n".join(lines) + "\n"
    print(table)
    if options.update is not None:
        start, end = MARKERS
        before, _, rest = options.update.read_text(encoding="utf-8").partition(start)
        options.update.write_text(before + start + table + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
