"""The loop: Adam with a cosine schedule, what is kept only where held-out samples say that it is better."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onnxq.system.resources import Progress
from onnxq.training.checkpoints import Checkpoint
from onnxq.training.losses import Learner, Task
from onnxq.training.rates import copied, falling, first_share, order_of, parameter_groups, step, usual_batch
from onnxq.training.settings import Standing, Training

_STEPS = 240
_FEWEST_EPOCHS = 8
# How often steps are undone until training ends.
_MOST_UNDONE = 3
# An epoch behind which there is so many times the noise of the best state went too far: it is undone, and steps are so
# much shorter from then on. A deep network that is faithful already is far from that after a few steps of all weights.
_FAR, _SHORTER = 1.25, 3.0


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


@dataclass(frozen=True, eq=False)
class _Best:
    """The best state so far, what it is compared by, the noise there, and the epoch it was found after."""

    module: dict[str, Tensor]
    score: float
    noise: float
    epoch: int = 0


@dataclass(eq=False)
class _State:
    """Where training stands after an epoch."""

    module: dict[str, Tensor]
    optimizer: dict[str, Any]
    best: _Best
    before: float
    factor: float
    epoch: int = 0
    seconds: float = 0.0
    undone: list[str] = field(default_factory=list)

    @classmethod
    def kept(cls, kept: dict[str, Any]) -> _State:
        """Return what `content` gave."""
        return cls(**{**kept, "best": _Best(**kept["best"])})

    @property
    def content(self) -> dict[str, Any]:
        """The same in types that files of torch hold."""
        return {**vars(self), "best": vars(self.best)}


def learn(module: Learner, task: Task, training: Training, keep: Checkpoint, progress: Progress) -> Learned:
    """Train a module until its best state stays the best, and leave it in that state.

    Steps of Adam (Kingma and Ba 2015), whose rates fall along a cosine, are relative to the size of each tensor; the
    first rate, where none is given, is the one of several that does best in a few steps. A step
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
    state = _start(module, optimizer, task, training, keep)
    clock = _Clock(training.minutes, state.seconds)
    while state.epoch < epochs and state.epoch - state.best.epoch < (training.patience or epochs) and clock.share < 1:
        if len(state.undone) > _MOST_UNDONE:
            break
        progress("train", state.epoch, epochs)
        total, count = 0.0, 0
        for number, some in enumerate(task.lessons.batches(order_of(task, training, state.epoch), size)):
            share = max((state.epoch + number / steps) / epochs, clock.share)
            if number and share >= 1:
                # What was learned of a part of the samples counts as an epoch.
                break
            lost = step(module, optimizer, task.loss, some, state.factor * falling(share))
            total, count = total + lost, count + 1
            if not math.isfinite(lost):
                state.undone.append(
                    f"step {number + 1} of epoch {state.epoch + 1} had a loss or gradient of {lost} and was undone"
                )
                break
        if math.isfinite(total):
            state.seconds = clock.seconds
            noise = _compare(module, optimizer, task, state)
            if noise > _FAR * state.best.noise and task.loss is task.noise:
                state.factor /= _SHORTER
                state.module = state.best.module
                module.load_state_dict(state.module)
            keep.save(state.content)
            if training.told is not None:
                training.told(Standing(state.epoch, epochs, total / count, noise))
            continue
        state.factor /= 2
        module.load_state_dict(state.module)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    progress("train", epochs, epochs)
    best = state.best
    module.load_state_dict(best.module)
    return Learned(state.before, best.noise, best.epoch, state.epoch, tuple(state.undone))


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


def _start(
    module: Learner, optimizer: torch.optim.Optimizer, task: Task, training: Training, keep: Checkpoint
) -> _State:
    kept = keep.load()
    if kept is not None:
        state = _State.kept(kept)
        module.load_state_dict(state.module)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        return state
    score, noise = task.measured(module)
    share = first_share(module, task, training) if training.rate is None else 1.0
    now = copied(module)
    return _State(now, copy.deepcopy(optimizer.state_dict()), _Best(now, score, noise), noise, share)


def _compare(module: Learner, optimizer: torch.optim.Optimizer, task: Task, state: _State) -> float:
    """Note where an epoch ended, and whether that is the best place so far; return the noise there."""
    score, noise = task.measured(module)
    state.epoch += 1
    state.module, state.optimizer = copied(module), copy.deepcopy(optimizer.state_dict())
    if score < state.best.score:
        state.best = _Best(state.module, score, noise, state.epoch)
    return noise
