"""Quantization-aware training by PyTorch's prepare_qat and by onnxq, side by side.

    python benchmarks/training_beside_torch.py [--steps 200] [--seeds 3]

A small convolutional network learns what models/resnet.onnx says of 1,762 images of Fashion-MNIST, without labels. From
these float weights both train towards the float network's scores: the same loss, optimiser, batches and steps, 8 bits
of data and one scale a weight (torch's ``qnnpack`` configuration, onnxq's preset ``torch-qnnpack``). Both are
converted, and judged by labels on 1,250 other images, torch's model by its own kernels and onnxq's by onnxruntime.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fashion_mnist import MODELS, answers, wilson
from torch import Tensor, nn
from torch.ao import quantization

import onnxq
from onnxq import Budget, Goal, quantize
from onnxq.runtime.sessions import Array
from onnxq.training import convert, prepare

BATCH = 32
RATE = 1e-4
FLOAT_STEPS, FLOAT_RATE = 800, 3e-3
JUDGED = 1250
Learn = Callable[[nn.Module], None]


class Network(nn.Module):
    """Three convolutions with batch normalization, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(1, 16, 1), (16, 32, 2), (32, 32, 2)]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, stride, 1), nn.BatchNorm2d(other), nn.ReLU())
                for one, other, stride in sizes
            )
        )
        self.pool, self.last = nn.AvgPool2d(7), nn.Linear(32, 10)
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()

    def forward(self, image: Tensor) -> Tensor:
        return self.dequant(self.last(torch.flatten(self.pool(self.blocks(self.quant(image))), 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    calibration, test = (np.load(MODELS / "data" / f"{name}.npz")["image"] for name in ("calib", "test"))
    labels = np.load(MODELS / "data" / "test-labels.npy")[-JUDGED:]
    learned, holdout = np.concatenate([calibration, test[:-JUDGED]]), test[-JUDGED:]
    print("| seed | model | accuracy (95 %) | seconds |\n|---|---|---|---|")
    for seed in range(options.seeds):
        network = float_network(learned, seed)
        with torch.no_grad():
            expected = network(torch.from_numpy(learned))

        def learn(module: nn.Module, seed: int = seed, expected: Tensor = expected) -> None:
            steps(module, torch.from_numpy(learned), expected, options.steps, RATE, seed)

        for name, way in (("float", by_float), ("onnxq, not trained", by_onnxq)):
            show(seed, name, labels, partial(way, network, calibration, holdout, None))
        for name, way in (("torch.ao prepare_qat", by_torch), ("onnxq prepare", by_onnxq)):
            show(seed, name, labels, partial(way, network, calibration, holdout, learn))


def show(seed: int, name: str, labels: Array, way: Callable[[], Array]) -> None:
    """Print a line of the table."""
    start = time.perf_counter()
    right = int((way().argmax(-1) == labels).sum())
    seconds, (low, high) = time.perf_counter() - start, wilson(right, len(labels))
    print(f"| {seed} | {name} | {right / len(labels):.2%} ({low:.1%} to {high:.1%}) | {seconds:.0f} |", flush=True)


def steps(module: nn.Module, images: Tensor, expected: Tensor, count: int, rate: float, seed: int) -> None:
    """Make the squared error of scores small."""
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        places = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(images[places]), expected[places]).backward()
        optimizer.step()


def float_network(images: Array, seed: int) -> Network:
    """Return a network that has learned what a larger one says."""
    torch.manual_seed(seed)
    network = Network()
    network.train()
    expected = torch.from_numpy(scores(MODELS / "resnet.onnx", images))
    steps(network, torch.from_numpy(images), expected, FLOAT_STEPS, FLOAT_RATE, seed)
    network.eval()
    return network


def scores(model: Path, images: Array) -> Array:
    """Return what a model says of images."""
    return np.concatenate([outputs[0] for outputs in answers(model, images)])


def by_float(network: Network, calibration: Array, holdout: Array, learn: Learn | None) -> Array:
    """Return scores of the network as it is."""
    with torch.no_grad():
        found: Array = network(torch.from_numpy(holdout)).numpy()
    return found


def by_torch(network: Network, calibration: Array, holdout: Array, learn: Learn | None) -> Array:
    """Return scores of what torch makes of a network; statistics of batches are frozen, as onnxq folds them."""
    torch.backends.quantized.engine = "qnnpack"
    module = Network()
    module.load_state_dict(network.state_dict())
    module.train()
    for block in module.blocks:
        quantization.fuse_modules_qat(block, ["0", "1", "2"], inplace=True)
    module.qconfig = quantization.get_default_qat_qconfig("qnnpack")
    quantization.prepare_qat(module, inplace=True)
    module.apply(nn.intrinsic.qat.freeze_bn_stats)
    if learn is not None:
        learn(module)
    with torch.no_grad():
        found: Array = quantization.convert(module.eval())(torch.from_numpy(holdout)).numpy()
    return found


def by_onnxq(network: Network, calibration: Array, holdout: Array, learn: Learn | None) -> Array:
    """Return scores of what onnxq makes of a network."""
    with tempfile.TemporaryDirectory(prefix="onnxq-") as folder:
        path, output = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        batch = torch.from_numpy(calibration[:2])
        torch.onnx.export(
            network, (batch,), path, input_names=["image"], dynamic_axes={"image": {0: "N"}}, dynamo=False
        )
        samples = [{"image": one[None]} for one in calibration[:128]]
        budget = Budget("off", "off", latency_seconds=0)
        done = quantize(path, samples, scheme="torch-qnnpack", goal=Goal(force=True), budget=budget)
        module = prepare(path, done.report.plan)
        if learn is not None:
            learn(module)
        onnxq.save(convert(module), output)
        return scores(output, holdout)


if __name__ == "__main__":
    main()
