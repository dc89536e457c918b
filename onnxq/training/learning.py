"""The training loop: steps of the optimizer, their rates, and the best state."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onnxq.system.resources import Progress
from onnxq.training.losses import Learner, Loss, Task
from onnxq.training.quantizers import FakeQuantizedBias, FakeQuantizedWeight
from onnxq.training.settings import RATE, Training, TrainingProgress
from onnxq.training.training_set import Batch

_BATCH = 32
# Of fewer than 256 samples, a step takes an eighth.
_BATCHES_OF_FEW = 8
# For other parameters, by the end of their names: what --learn calls them, and their rate in units of the general one.
_OTHERS = {"log_scale": ("scales", 1.0), "zero_point": ("zero-points", 10.0), "log_channel_scales": ("scales", 30.0)}
# The rate of a weight is relative to at least so many quantization steps: otherwise training with 2 bits would end
# before any quantized value changes.
_MIN_SIZE_IN_STEPS = 4.0
# Values of a tensor count as at least this large, so that zeros can change.
_MIN_SIZE = 1e-3
_MAX_GRADIENT_NORM = 1.0


def default_batch_size(count: int) -> int:
    """Return the number of samples of a step."""
    return min(_BATCH, max(count // _BATCHES_OF_FEW, 1))


def parameter_groups(module: Learner, training: Training) -> Iterator[dict[str, Any]]:
    """Yield the trainable parameters as torch optimizer groups, each with its own rate."""
    biases = {id(part.values) for part in module.modules() if isinstance(part, FakeQuantizedBias)}
    steps = {id(part.values): part.step for part in module.modules() if isinstance(part, FakeQuantizedWeight)}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = name.rpartition(".")[2]
        if kind == "values":
            what = "biases" if id(parameter) in biases else "weights"
            size = float(parameter.detach().square().mean().sqrt())
            rate = max(size, _MIN_SIZE_IN_STEPS * steps.get(id(parameter), 0.0), _MIN_SIZE)
        else:
            what, rate = _OTHERS[kind]
        if what in training.learn:
            yield {"params": [parameter], "lr": 0.0, "largest": rate * (training.rate or RATE)}


def adam(module: Learner, training: Training) -> torch.optim.Adam:
    """Return the optimizer; on CUDA with one kernel for each group, because a group is one small tensor."""
    groups = list(parameter_groups(module, training))
    return torch.optim.Adam(groups, fused=True if groups[0]["params"][0].device.type == "cuda" else None)


def shuffled_indices(task: Task, training: Training, epoch: int) -> list[int]:
    """Return the order of the samples in an epoch."""
    random = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch)
    indices: list[int] = torch.randperm(len(task.training_set), generator=random).tolist()
    return indices


def take_step(module: Learner, optimizer: torch.optim.Optimizer, loss: Loss, some: list[Batch], rate: float) -> float:
    """Take a step and return the loss. If the loss or its gradient is not finite, take none and return that value."""
    optimizer.zero_grad()
    count, losses = sum(batch.count for batch in some), list[Tensor]()
    weights = [part for part in module.modules() if isinstance(part, FakeQuantizedWeight)]
    for weight in weights:
        weight.once = len(some) > 1
    for batch in some:
        share = loss(module.outputs(batch.inputs), batch) * (batch.count / count)
        losses.append(share.detach())
        if share.requires_grad:
            share.backward()
    for weight in weights:
        weight.release()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
    # Numbers are read last: a GPU computes all of the step before Python waits for it.
    total = sum(float(share) for share in losses)
    if not math.isfinite(total):
        return total
    if not math.isfinite(float(norm)):
        return math.nan
    for group in optimizer.param_groups:
        group["lr"] = group["largest"] * rate
    optimizer.step()
    return total


def cosine_decay(share: float) -> float:
    """Return the learning rate, in units of the first, after a share of the training.

    >>> cosine_decay(0.5)
    0.5
    """
    return (1 + math.cos(math.pi * min(share, 1))) / 2


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state of a module."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


# The loop: Adam with a cosine schedule; the best state on the holdout is kept.

_DEFAULT_STEPS = 240
_MIN_EPOCHS = 8
# Training ends when more epochs than these had a loss that is not finite.
_MAX_UNDONE = 3
# An epoch that ends with 1.25 times the error of the best state is undone, and later steps are a third as large. A deep
# network that is accurate already gets that far after a few steps of all weights.
_DIVERGED, _STEP_DIVISOR = 1.25, 3.0


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training; the module holds the best state.

    Attributes:
        before: noise-to-signal ratio of the worst output on the holdout, before training.
        after: the same ratio with the best state.
        best: the epoch of the best state, counted from 1; 0 if training did not help.
        epochs: number of epochs run.
        undone: sentences about steps whose loss was not finite.
    """

    before: float
    after: float
    best: int
    epochs: int
    undone: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Best:
    """The best state so far, with its score, noise-to-signal ratio and epoch."""

    module: dict[str, Tensor]
    optimizer: dict[str, Any]
    score: float
    nsr: float
    epoch: int = 0

    @classmethod
    def of(cls, module: Learner, optimizer: torch.optim.Optimizer, task: Task, epoch: int) -> _Best:
        """Evaluate the current state."""
        return cls(copy_state(module), copy.deepcopy(optimizer.state_dict()), *task.evaluate(module), epoch)

    def restore(self, module: Learner, optimizer: torch.optim.Optimizer) -> None:
        module.load_state_dict(self.module)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))


def train_module(module: Learner, task: Task, training: Training, progress: Progress) -> TrainingResult:
    """Train a module, and leave it in its best state.

    The steps are Adam's (Kingma and Ba 2015), relative to the size of each tensor, and fall along a cosine. An epoch
    with a loss that is not finite, or after which the error is clearly larger, is undone, and later steps are a third
    as large.

    Args:
        module: the whole model, or a block.
        task: the loss and the samples.
        training: the settings.
        progress: called for the stage ``train``.
    """
    size = training.batch or default_batch_size(len(task.training_set))
    steps = -(-len(task.training_set) // size)
    epochs = training.epochs or max(_MIN_EPOCHS, -(-_DEFAULT_STEPS // steps))
    optimizer = adam(module, training)
    first = best = _Best.of(module, optimizer, task, 0)
    epoch, factor, undone = 0, 1.0, list[str]()
    start, limit = time.monotonic(), math.inf if training.minutes is None else 60 * training.minutes

    def time_share() -> float:
        return (time.monotonic() - start) / limit

    while epoch < epochs and epoch - best.epoch < (training.patience or epochs) and time_share() < 1:
        progress("train", epoch, epochs)
        losses: list[float] = []
        for number, some in enumerate(task.training_set.batches(shuffled_indices(task, training, epoch), size)):
            share = max((epoch + number / steps) / epochs, time_share())
            if number and share >= 1:
                # A part of the samples counts as an epoch.
                break
            losses.append(take_step(module, optimizer, task.loss, some, factor * cosine_decay(share)))
            if not math.isfinite(losses[-1]):
                break
        if not math.isfinite(losses[-1]):
            undone.append(
                f"step {len(losses)} of epoch {epoch + 1} had a loss or gradient of {losses[-1]} and was undone"
            )
            factor /= _STEP_DIVISOR
            best.restore(module, optimizer)
            if len(undone) > _MAX_UNDONE:
                break
            continue
        epoch += 1
        now = _Best.of(module, optimizer, task, epoch)
        if now.score < best.score:
            best = now
        elif now.nsr > _DIVERGED * best.nsr and task.loss is task.distillation:
            factor /= _STEP_DIVISOR
            best.restore(module, optimizer)
        if training.on_progress is not None:
            training.on_progress(TrainingProgress(epoch, epochs, sum(losses) / len(losses), now.nsr))
    progress("train", epochs, epochs)
    best.restore(module, optimizer)
    return TrainingResult(first.nsr, best.nsr, best.epoch, epoch, tuple(undone))
