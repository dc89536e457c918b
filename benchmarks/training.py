"""What training gives back: the committed classifiers in few bits, and real models without labels.

    python benchmarks/training.py [--fashion DIR] [--count 2048] [--output results/training.json] [MODEL:PRESET ...]
    python benchmarks/training.py --models DIR --data DIR [--output results/training.json] MODEL:PRESET ...
    python benchmarks/training.py --minutes 5 [--goal 26] [--models DIR --data DIR] MODEL:PRESET ...

Each row is one model in one preset without a search: after post-training quantization, with scales and zero points
learned, and with weights and biases learned as well, together or block by block first, all by distillation from the
float model on its calibration samples. The classifiers are judged on the 2,500 committed test images. With the folder
of Debian's dataset-fashion-mnist they learn from its first training images and are judged on all 10,000 test images.
Models of DIR are judged on DIR/MODEL/eval, by decibels. With minutes, each row is a search instead, without training
and with so much of it, from the same node times, after which both models are timed side by side. The last lines say
how long a step of training takes beside one of the same module without fake quantization.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import torch
from fashion_mnist import MODELS, answers, correct, wilson
from numpy.typing import NDArray

from onnxq import Budget, Goal, Quantized, compare_files, quantize
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import open_samples
from onnxq.evaluation.latency import measure_latency
from onnxq.training import Training, disable_fake_quant, enable_fake_quant, prepare
from onnxq.training.pipeline import quantize_and_train, train
from onnxq.training.quantizers import FakeQuantizedWeight

ROUNDS = 5

USUAL = (
    "mobilenet:torch-qnnpack",
    "mobilenet:int4-block32",
    "resnet:int4-block32",
    "mobilenet:int2-block16",
    "resnet:int2-block16",
    "vit:int2-block16",
    "gru:int2-block16",
)
ALL = ("weights", "biases", "scales", "zero-points")
STEPS = {
    # A step that changes nothing leaves what post-training quantization has found.
    "nothing": Training(learn=("scales",), blocks="no", epochs=1, rate=1e-30),
    "scales": Training(learn=("scales", "zero-points"), blocks="no"),
    "scales and weights": Training(learn=ALL, blocks="no"),
    "blocks only": Training(learn=ALL, blocks="only"),
    "blocks first": Training(learn=ALL, blocks="first"),
}
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
    parser.add_argument("--fashion", type=Path, help="folder of the four IDX files of Fashion-MNIST")
    parser.add_argument("--count", type=int, default=2048, help="training images of --fashion to learn from")
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("--minutes", type=float, help="of training, for a faster plan of a search")
    parser.add_argument("--goal", type=float, default=20.0, help="decibels that the plan of a search is to have")
    parser.add_argument("wanted", nargs="*", default=USUAL, metavar="MODEL:PRESET")
    options = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        images = Images() if options.fashion is None else Images.of(options.fashion, options.count, Path(folder))
        run([Place.of(wanted, options.models, options.data, images) for wanted in options.wanted], options)


def run(places: list[Place], options: argparse.Namespace) -> None:
    """Print and write the rows of all places."""
    rows = []
    for place in places:
        for row in trained(place) if options.minutes is None else searched(place, options.minutes, options.goal):
            rows.append(row)
            cells = (row.model, row.preset, row.learned, f"{row.before:.1f}", f"{row.decibels:.1f}", row.accuracy)
            print("| " + " | ".join((*cells, f"{row.seconds:.0f}")) + " |", flush=True)
    if options.output:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    for place in places:
        print(f"{place.name}:{place.preset}: a step takes {step_cost(place):.2f} times as long as in float", flush=True)


@dataclass(frozen=True)
class Images:
    """Files of images of Fashion-MNIST to learn from and to judge by, and the classes of the latter."""

    calibration: Path = MODELS / "data" / "calib.npz"
    holdout: Path = MODELS / "data" / "test.npz"
    labels: Path = MODELS / "data" / "test-labels.npy"

    @classmethod
    def of(cls, source: Path, count: int, folder: Path) -> Images:
        """Return the first training images and all test images, which are put into a folder."""
        found = cls(folder / "calib.npz", folder / "test.npz", folder / "labels.npy")
        for path, name, most in ((found.calibration, "train", count), (found.holdout, "t10k", None)):
            images = numbers(source / f"{name}-images-idx3-ubyte.gz")[:most, None]
            np.savez(path, image=images.astype(np.float32) / np.float32(255))
        np.save(found.labels, numbers(source / "t10k-labels-idx1-ubyte.gz"))
        return found


def numbers(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a gzipped IDX file, whose fourth byte says how many axes they have."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">u4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


@dataclass(frozen=True)
class Place:
    """A model, a preset, and where its samples are."""

    name: str
    preset: str
    model: Path
    calibration: Path
    holdout: Path
    labels: Path

    @classmethod
    def of(cls, wanted: str, models: Path | None, data: Path | None, images: Images) -> Place:
        """Return what MODEL:PRESET stands for."""
        name, _, preset = wanted.partition(":")
        calibration = images.calibration if data is None else data / name / "calib"
        holdout = images.holdout if data is None else data / name / "eval"
        return cls(name, preset or "int8", (models or MODELS) / f"{name}.onnx", calibration, holdout, images.labels)

    def row(self, learned: str, before: float | None, output: Path, start: float) -> Row:
        """Return the row of a model that is written."""
        seconds, decibels = time.perf_counter() - start, compare_files(self.model, output, self.holdout).worst_sqnr
        accuracy = self.accuracy_of(output) if MODELS in self.model.parents else "-"
        return Row(self.name, self.preset, learned, decibels if before is None else before, decibels, accuracy, seconds)

    def accuracy_of(self, model: Path) -> str:
        """Return the share of the judging images that a classifier gets right, with its interval."""
        images, labels = np.load(self.holdout)["image"], np.load(self.labels)
        right = correct(answers(model, images), labels)
        low, high = wilson(right, len(labels))
        return f"{right / len(labels):.2%} ({low:.1%} to {high:.1%})"


def trained(place: Place) -> Iterator[Row]:
    """Yield a row for the float model, and one for each way to learn."""
    if MODELS in place.model.parents:
        yield Row(place.name, place.preset, "float", math.inf, math.inf, place.accuracy_of(place.model), 0.0)
    before = None
    for learned, training in STEPS.items():
        with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
            output, start = Path(folder) / "trained.onnx", time.perf_counter()
            goal, budget = Goal(force=True), Budget("off", latency_seconds=0)
            train(
                place.model,
                place.calibration,
                output,
                scheme=place.preset,
                goal=goal,
                budget=budget,
                training=training,
            )
            row = place.row(learned, before, output, start)
            before = row.before
            yield row


def searched(place: Place, minutes: float, goal: float) -> Iterator[Row]:
    """Yield a row for what a search finds, and one for what it finds with training, both from the same node times."""
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        without, output, start = Path(folder) / "searched.onnx", Path(folder) / "trained.onnx", time.perf_counter()
        budget, training = Budget(cache=Path(folder) / "times.json"), Training(minutes=minutes)
        given = place.model, place.calibration
        done = quantize(*given, without, scheme=place.preset, goal=goal, budget=budget)
        first = place.row(f"search, {speed_of(done)}", None, without, start)
        yield first
        start = time.perf_counter()
        done = quantize_and_train(*given, output, scheme=place.preset, goal=goal, budget=budget, training=training)
        seconds = time.perf_counter() - start
        taken = any(gain.method == "training" for gain in done.report.encoding.gains)
        message = done.report.samples.warnings[-1:]
        if taken:
            beside = measure_latency(without, output, inputs_of(place, 4), seconds=10)
            low, high = beside.interval
            message = (f"{beside.speed:.2f} times as fast side by side ({low:.2f} to {high:.2f})",)
        row = place.row("; ".join((f"search and training, {speed_of(done)}", *message)), first.before, output, start)
        yield replace(row, seconds=seconds)


def inputs_of(place: Place, count: int) -> list[Sample]:
    """Return the first calibration samples."""
    return list(islice(open_samples(place.calibration, model_inputs(onnx.load(place.model))), count))


def speed_of(done: Quantized) -> str:
    """Return how fast a model is beside float, in words."""
    latency = done.report.performance.latency
    return "no time" if latency is None else f"{latency.speed:.2f} times as fast as float"


def step_cost(place: Place) -> float:
    """Return how many times as long a step takes as one of the same module without fake quantization."""
    samples = inputs_of(place, 32)
    budget = Budget("off", "off", latency_seconds=0)
    done = quantize(place.model, samples, scheme=place.preset, goal=Goal(force=True), budget=budget)
    module = prepare(place.model, done.report.plan)
    weights = [one for one in module.modules() if isinstance(one, FakeQuantizedWeight)]
    # As in training, embeddings stay, and a step of a classifier takes all of them as one.
    for table in module.embeddings:
        table.requires_grad_(requires_grad=False)
    some = samples[:8]
    if MODELS in place.model.parents:
        some = [{name: np.concatenate([one[name] for one in samples]) for name in samples[0]}]
    fed = [{name: torch.from_numpy(np.array(array)) for name, array in sample.items()} for sample in some]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    # By turns, so that what else runs here counts for both.
    for turn in range(2 * ROUNDS):
        quantized = turn % 2 == 0
        module.apply(enable_fake_quant if quantized else disable_fake_quant)
        start = time.perf_counter()
        for weight in weights:
            weight.once = quantized
        for sample in fed:
            outputs = (one for one in module.outputs(sample).values() if one.requires_grad)
            torch.stack([one.square().sum() for one in outputs]).sum().backward()
        for weight in weights:
            weight.release()
        seconds[quantized].append(time.perf_counter() - start)
    return median(seconds[True]) / median(seconds[False])


if __name__ == "__main__":
    main()
