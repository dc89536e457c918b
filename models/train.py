"""Train the four Fashion-MNIST classifiers and write them, with their data, beside this file.

Usage: python models/train.py [--data DIR] [--output DIR] [NAME ...]

Needs what the toolkit itself never needs: torch==2.13.0, onnx and onnxruntime, and Debian's package
dataset-fashion-mnist. Each model is seeded and trained on one thread, so two runs on one machine give the same weights.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networks
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
SEED = 2017
BATCH = 128
CALIBRATION_SAMPLES = 512
TEST_SAMPLES = 2_500
OPSET = 17
IDX_HEADER = {1: 8, 3: 16}

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Recipe:
    """How one model is built and trained; ``folds`` lets the exporter fold constants and batch normalization."""

    build: Callable[[], nn.Module]
    epochs: int
    learning_rate: float
    weight_decay: float = 0.05
    channels_last: bool = False
    folds: bool = True


RECIPES = {
    "resnet": Recipe(networks.residual_network, epochs=12, learning_rate=4e-3, channels_last=True, folds=False),
    "mobilenet": Recipe(networks.mobile_network, epochs=9, learning_rate=6e-3, channels_last=True),
    "vit": Recipe(networks.VisionTransformer, epochs=10, learning_rate=2e-3),
    "gru": Recipe(networks.RecurrentClassifier, epochs=12, learning_rate=3e-3),
}


@dataclass(frozen=True)
class Split:
    """Images float32 [N, 1, 28, 28] in 0..1 and their labels uint8 [N]."""

    images: Images
    labels: Labels


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes, of one or three dimensions."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=IDX_HEADER[dimensions]).reshape(shape)


def read_split(folder: Path, prefix: str) -> Split:
    """Read the images and labels whose file names start with ``prefix``: train or t10k."""
    pixels = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
    images = pixels[:, None].astype(np.float32) / np.float32(255)
    return Split(images, read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz"))


def write_data(train: Split, test: Split, folder: Path) -> None:
    """Write calibration images drawn from the training set and the head of the test set with its labels."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = np.random.default_rng(SEED).choice(len(train.images), CALIBRATION_SAMPLES, replace=False)
    np.savez_compressed(folder / "calib.npz", image=train.images[np.sort(chosen)])
    np.savez_compressed(folder / "test.npz", image=test.images[:TEST_SAMPLES])
    np.save(folder / "test-labels.npy", test.labels[:TEST_SAMPLES])


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror half of the images and shift the batch by at most one pixel each way."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return torch.where(mirrored, images.flip(3), images).roll((down, right), (2, 3))


def fit(config: Recipe, train: Split) -> nn.Module:
    """Train a new model with AdamW and one learning-rate cycle; returned in evaluation mode."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model = config.build().to(memory_format=memory_format)
    images, labels = torch.from_numpy(train.images), torch.from_numpy(train.labels.astype(np.int64))
    steps = math.ceil(len(images) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, epochs=config.epochs, steps_per_epoch=steps
    )
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(config.epochs):
        total = 0.0
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            batch = augment(images[chosen], generator).contiguous(memory_format=memory_format)
            optimizer.zero_grad()
            loss = loss_function(model(batch), labels[chosen])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"  epoch {epoch + 1} of {config.epochs}: loss {total / steps:.4f}", flush=True)
    return model.to(memory_format=torch.contiguous_format).eval()


def export(model: nn.Module, folds: bool, path: Path) -> None:
    """Write ``model`` as ONNX with one dynamic axis, ``batch``, and check the file."""
    mode = torch.onnx.TrainingMode.EVAL if folds else torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(
        model,
        (torch.zeros(2, 1, 28, 28),),
        path,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        opset_version=OPSET,
        training=mode,
        do_constant_folding=folds,
        dynamo=False,
    )
    onnx.checker.check_model(path, full_check=True)


def torch_classes(model: nn.Module, images: Images) -> npt.NDArray[np.int64]:
    """Return the class that torch gives to each image."""
    with torch.no_grad():
        logits = [model(batch) for batch in torch.from_numpy(images).split(500)]
    classes: npt.NDArray[np.int64] = torch.cat(logits).argmax(dim=1).numpy()
    return classes


def onnx_classes(path: Path, images: Images) -> npt.NDArray[np.int64]:
    """Return the class that onnxruntime gives to each image."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    logits = [session.run(["logits"], {"image": batch})[0] for batch in np.split(images, len(images) // 500)]
    classes: npt.NDArray[np.int64] = np.concatenate(logits).argmax(axis=1)
    return classes


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion."""
    z = 1.959964
    share = correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half, centre + half


def accuracy(classes: npt.NDArray[np.int64], labels: Labels) -> str:
    """Return accuracy with its interval, in percent."""
    correct = int((classes == labels).sum())
    low, high = wilson(correct, len(labels))
    return f"{correct / len(labels):.2%} ({low:.1%} to {high:.1%})"


def produce(name: str, train: Split, test: Split, folder: Path) -> None:
    """Train, export and measure one model; print its row of README's table."""
    config, path = RECIPES[name], folder / f"{name}.onnx"
    print(name, flush=True)
    start = time.perf_counter()
    model = fit(config, train)
    minutes = (time.perf_counter() - start) / 60
    export(model, config.folds, path)
    by_torch, by_onnx = torch_classes(model, test.images), onnx_classes(path, test.images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    row = (
        f"`{name}.onnx`",
        f"{parameters:,}",
        f"{path.stat().st_size:,}",
        str(config.epochs),
        f"{minutes:.1f}",
        accuracy(by_onnx, test.labels),
        accuracy(by_onnx[:TEST_SAMPLES], test.labels[:TEST_SAMPLES]),
    )
    print("|", " | ".join(row), "|", flush=True)
    print(f"  images that torch and onnxruntime class differently: {(by_torch != by_onnx).sum()}", flush=True)


def main() -> None:
    """Parse the command line, write the data and produce every wanted model."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FASHION_MNIST, metavar="DIR", help="folder of the four IDX files")
    parser.add_argument("--output", type=Path, default=here, metavar="DIR", help="where models and data are written")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models to train: {', '.join(RECIPES)} (default all)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in RECIPES]:
        parser.error(f"no model is called {unknown[0]!r}; choose from {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    train, test = read_split(arguments.data, "train"), read_split(arguments.data, "t10k")
    write_data(train, test, arguments.output / "data")
    for name in arguments.names or RECIPES:
        produce(name, train, test, arguments.output)


if __name__ == "__main__":
    main()
