"""What every network shares: seeded weights whose activations stay sane, and made-up samples."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]
Sampler = Callable[[np.random.Generator], Array]
_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclass(frozen=True)
class Network:
    """A module to export, and what it reads.

    Attributes:
        name: of its folder.
        make: the module, its weights seeded, in evaluation mode.
        inputs: name of each input to what makes one sample of it, in the module's order.
        outputs: names.
        dynamic: the axes of an input that may vary, to their names.
        older_opset: of the second TorchScript export: 11, or one without LayerNormalization; None where it makes no
            difference, and the third form is what the newer exporter writes before it optimises.
        longest: largest length of the axes that may vary.
        scripted: whether the older exporter is given the module's source, so that loops stay loops.
        branches: whether it goes on as its own data says, which the newer exporter cannot write.
        finish: what is added to either export.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Sampler]
    outputs: tuple[str, ...]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    older_opset: int | None = 14
    longest: int = 64
    scripted: bool = False
    branches: bool = False
    finish: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda model: model

    def sample(self, seed: int) -> dict[str, Array]:
        random = np.random.default_rng(seed)
        return {name: draw(random) for name, draw in self.inputs.items()}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a module whose weights keep variances through products, and whose norms scale a little.

    Args:
        make: the module's class.
        seed: of its weights.

    Returns:
        The module in evaluation mode.
    """
    torch.manual_seed(seed)
    module = make()
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.xavier_normal_(part.weight)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.5)
        elif isinstance(part, _BATCH_NORMS | nn.LayerNorm | nn.GroupNorm):
            nn.init.uniform_(part.weight, 0.7, 1.3)
        elif isinstance(part, nn.LSTM | nn.GRU | nn.LSTMCell):
            for parameter in part.parameters():
                nn.init.normal_(parameter, std=1.5 * part.hidden_size**-0.5)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.05)
    return module.eval()


def settled(module: nn.Module, *draws: Sampler, runs: int = 8, batch: int = 8) -> nn.Module:
    """Let BatchNormalization see samples, so that its statistics are those of its activations.

    Args:
        module: with its weights; edited in place.
        draws: make a sample of each input.
        runs: how many batches.
        batch: samples in each, joined along the first axis.
    """
    random = np.random.default_rng(0)
    module.train()
    for part in module.modules():
        if isinstance(part, _BATCH_NORMS):
            part.momentum = None  # the average of all runs
    with torch.no_grad():
        for _ in range(runs):
            module(*(torch.from_numpy(np.concatenate([draw(random) for _ in range(batch)])) for draw in draws))
    return module.eval()


def image(channels: int, size: int) -> Sampler:
    """Soft blobs with a little noise, about as large as normalised photographs."""

    def draw(random: np.random.Generator) -> Array:
        coarse = random.normal(size=(1, channels, 8, 8))
        blobs = np.kron(coarse, np.ones((1, 1, size // 8, size // 8)))
        return (blobs + 0.3 * random.normal(size=blobs.shape)).astype(np.float32)

    return draw


def tokens(vocabulary: int, length: int) -> Sampler:
    return lambda random: random.integers(0, vocabulary, size=(1, length), dtype=np.int64)


def padding_mask(length: int) -> Sampler:
    """Ones, and zeros from some place in the last quarter on."""
    return lambda random: (np.arange(length) < random.integers(3 * length // 4, length + 1))[None].astype(np.int64)


def normal(*shape: int) -> Sampler:
    return lambda random: random.normal(size=shape).astype(np.float32)


def uniform(low: float, high: float, *shape: int) -> Sampler:
    return lambda random: random.uniform(low, high, size=shape).astype(np.float32)
