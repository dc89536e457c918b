"""The loop: Adam with a cosine schedule, what is kept only where held-out samples say that it is better."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onnxq.progress import Progress
from onnxq.training.blocks import Block
from onnxq.training.checkpoints import Checkpoint
from onnxq.training.lessons import Batch, Lessons
from onnxq.training.losses import Distillation, Loss
from onnxq.training.module import FakeQuantized
from onnxq.training.quantizers import FakeQuantizedBias, FakeQuantizedWeight
from onnxq.training.settings import Standing, Training

Learner = FakeQuantized | Block
"""What learns: all, or a block."""

_STEPS = 240
_FEWEST_EPOCHS = 8
_BATCH = 32
# Of few samples, a step takes so small a part.
_PART = 8
_ZERO_POINTS = 10.0
# A weight of so few codes that this many steps between two are more than its values changes as if they were as large:
# otherwise training of 2 bits would end before a code is another.
_CODES = 4.0
# A tensor of zeros changes as if its values were of this size.
_SMALLEST = 1e-3
# How often steps are undone until training ends.
_MOST_UNDONE = 3
_NORM = 1.0
# An epoch behind which there is so many times the noise of the best state went too far: it is undone, and steps are so
# much shorter from then on. A deep network that is faithful already is far from that after a few steps of all weights.
_FAR, _SHORTER = 1.25, 3.0


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be learned.

    Attributes:
        loss: what becomes small.
        lessons: what is learned from.
        held: what nothing is learned from, by which states are compared.
        noise: how far held outputs are from those of the float model.
    """

    loss: Loss
    lessons: Lessons
    held: Lessons
    noise: Distillation

    def measured(self, module: Learner) -> tuple[float, float]:
        """Return what states are compared by, the smaller the better, and the noise of the worst held output."""
        total, noises, count = 0.0, dict.fromkeys(self.noise.signals, 0.0), 0
        with torch.no_grad():
            for some in self.held.batches(range(len(self.held)), _BATCH if self.held.stacked else 1):
                for batch in some:
                    outputs = module.outputs(batch.inputs)
                    count += batch.count
                    if self.loss is not self.noise:
                        total += float(self.loss(outputs, batch)) * batch.count
                    for name, noise in self.noise.noises(outputs, batch).items():
                        noises[name] += float(noise) * batch.count
        worst = max(math.inf if math.isnan(noise) else noise / count for noise in noises.values())
        return (worst if self.loss is self.noise else total / count), worst


@dataclass(frozen=True)
class Learned:
    """What became of a training; the module holds the best state.

    Attributes:
        before: noise-to-signal ratio of the worst held output without training.
        after: with the best state.
        best: the epoch after which that was found, counted from 1; 0 where training bought nothing.
        epochs: how many were run.
        undone: sentences about steps whose loss was no number.
    """

    before: float
    after: float
    best: int
    epochs: int
    undone: tuple[str, ...] = ()


@dataclass(eq=False)
class _State:
    """Where training stands after an epoch."""

    module: dict[str, Tensor]
    optimizer: dict[str, Any]
    best: dict[str, Tensor]
    score: float
    before: float
    after: float
    epoch: int = 0
    best_epoch: int = 0
    factor: float = 1.0
    seconds: float = 0.0
    undone: list[str] = field(default_factory=list)


def learn(module: Learner, task: Task, training: Training, keep: Checkpoint, progress: Progress) -> Learned:
    """Train a module until its best state stays the best, and leave it in that state.

    Steps of Adam (Kingma and Ba 2015), whose rates fall along a cosine, are relative to the size of each tensor. A step
    whose loss is no number is undone with all others of its epoch, and steps are half as large from then on.

    Args:
        module: to be trained.
        task: the loss and the samples.
        training: how.
        keep: where it stands after each epoch is kept, and what was kept is gone on with.
        progress: told of the stage ``train``.
    """
    size = training.batch or usual_batch(len(task.lessons))
    steps = -(-len(task.lessons) // size)
    epochs = training.epochs or max(_FEWEST_EPOCHS, -(-_STEPS // steps))
    optimizer = torch.optim.Adam(list(parameter_groups(module, training)))
    state = _start(module, optimizer, task, keep)
    clock = _Clock(training.minutes, state.seconds)
    while state.epoch < epochs and state.epoch - state.best_epoch < (training.patience or epochs) and clock.share < 1:
        if len(state.undone) > _MOST_UNDONE:
            break
        progress("train", state.epoch, epochs)
        order = torch.randperm(
            len(task.lessons), generator=torch.Generator().manual_seed(training.seed * 1_000_003 + state.epoch)
        )
        total, count = 0.0, 0
        for number, some in enumerate(task.lessons.batches(order.tolist(), size)):
            share = max((state.epoch + number / steps) / epochs, clock.share)
            if number and share >= 1:
                # What was learned of a part of the samples counts as an epoch.
                break
            rate = state.factor * (1 + math.cos(math.pi * min(share, 1))) / 2
            lost = _step(module, optimizer, task.loss, some, rate)
            total, count = total + lost, count + 1
            if not math.isfinite(lost):
                state.undone.append(
                    f"step {number + 1} of epoch {state.epoch + 1} had a loss or gradient of {lost} and was undone"
                )
                break
        if math.isfinite(total):
            state.seconds = clock.seconds
            noise = _compare(module, optimizer, task, state)
            if noise > _FAR * state.after and task.loss is task.noise:
                state.factor /= _SHORTER
                state.module = state.best
                module.load_state_dict(state.best)
            keep.save(vars(state))
            if training.told is not None:
                training.told(Standing(state.epoch, epochs, total / count, noise))
            continue
        state.factor /= 2
        module.load_state_dict(state.module)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    progress("train", epochs, epochs)
    module.load_state_dict(state.best)
    return Learned(state.before, state.after, state.best_epoch, state.epoch, tuple(state.undone))


class _Clock:
    """How much of the time that there is was spent, before a killed run was gone on with and since."""

    def __init__(self, minutes: float | None, seconds: float) -> None:
        self._limit = math.inf if minutes is None else 60 * minutes
        self._start = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def share(self) -> float:
        return self.seconds / self._limit


def usual_batch(count: int) -> int:
    """Return how many samples of so many a step takes."""
    return min(_BATCH, max(count // _PART, 1))


def parameter_groups(module: Learner, training: Training) -> Iterator[dict[str, Any]]:
    """Yield the parameters that learn, each with its own rate, as optimisers of torch take them."""
    biases = {id(one.values) for one in module.modules() if isinstance(one, FakeQuantizedBias)}
    steps = {id(one.values): one.step for one in module.modules() if isinstance(one, FakeQuantizedWeight)}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = name.rpartition(".")[2]
        if kind in ("values", "factor"):
            what = "biases" if id(parameter) in biases else "weights"
            size = float(parameter.detach().square().mean().sqrt())
            rate = max(size, _CODES * steps.get(id(parameter), 0.0), _SMALLEST)
        else:
            what, rate = ("scales", 1.0) if kind == "log_scale" else ("zero-points", _ZERO_POINTS)
        if what in training.learn:
            yield {"params": [parameter], "lr": 0.0, "largest": rate * training.rate}


def _start(module: Learner, optimizer: torch.optim.Optimizer, task: Task, keep: Checkpoint) -> _State:
    kept = keep.load()
    if kept is not None:
        state = _State(**kept)
        module.load_state_dict(state.module)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        return state
    score, noise = task.measured(module)
    now = _copied(module)
    return _State(now, copy.deepcopy(optimizer.state_dict()), now, score, noise, noise)


def _step(module: Learner, optimizer: torch.optim.Optimizer, loss: Loss, some: list[Batch], rate: float) -> float:
    """Take a step and return the loss, or take none where that, or the gradient, is no number, and return which."""
    optimizer.zero_grad()
    count, total = sum(batch.count for batch in some), 0.0
    for batch in some:
        found = loss(module.outputs(batch.inputs), batch) * (batch.count / count)
        if not math.isfinite(value := float(found.detach())):
            return value
        if found.requires_grad:
            found.backward()
        total += value
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not math.isfinite(float(nn.utils.clip_grad_norm_(parameters, _NORM))):
        return math.nan
    for group in optimizer.param_groups:
        group["lr"] = group["largest"] * rate
    optimizer.step()
    return total


def _compare(module: Learner, optimizer: torch.optim.Optimizer, task: Task, state: _State) -> float:
    """Note where an epoch ended, and whether that is the best place so far; return the noise there."""
    score, noise = task.measured(module)
    state.epoch += 1
    state.module, state.optimizer = _copied(module), copy.deepcopy(optimizer.state_dict())
    if score < state.score:
        state.score, state.after, state.best, state.best_epoch = score, noise, state.module, state.epoch
    return noise


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
