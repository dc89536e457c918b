"""The training loop: steps of the optimizer, their rates, checkpoints, and the best state."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onnxq.errors import OutputError
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
# Shares of the usual rate, each tried for some steps. An inaccurate model learns best in large steps, a few of which
# destroy a deep network that is accurate already.
_RATE_SHARES, _STEPS_TRIED = (1.0, 1 / 3, 1 / 9, 1 / 27), 12


def default_batch_size(count: int) -> int:
    """Return the number of samples of a step."""
    return min(_BATCH, max(count // _BATCHES_OF_FEW, 1))


def parameter_groups(module: Learner, training: Training) -> Iterator[dict[str, Any]]:
    """Yield the trainable parameters as torch optimizer groups, each with its own rate."""
    biases = {id(one.values) for one in module.modules() if isinstance(one, FakeQuantizedBias)}
    steps = {id(one.values): one.step for one in module.modules() if isinstance(one, FakeQuantizedWeight)}
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


def shuffled_indices(task: Task, training: Training, epoch: int) -> list[int]:
    """Return the order of the samples in an epoch."""
    random = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch)
    found: list[int] = torch.randperm(len(task.training_set), generator=random).tolist()
    return found


def take_step(module: Learner, optimizer: torch.optim.Optimizer, loss: Loss, some: list[Batch], rate: float) -> float:
    """Take a step and return the loss. If the loss or its gradient is not finite, take none and return that value."""
    optimizer.zero_grad()
    count, total = sum(batch.count for batch in some), 0.0
    weights = [one for one in module.modules() if isinstance(one, FakeQuantizedWeight)]
    for weight in weights:
        weight.once = len(some) > 1
    for batch in some:
        found = loss(module.outputs(batch.inputs), batch) * (batch.count / count)
        total += float(found.detach())
        if math.isfinite(total) and found.requires_grad:
            found.backward()
    for weight in weights:
        weight.release()
    if not math.isfinite(total):
        return total
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not math.isfinite(float(nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM))):
        return math.nan
    for group in optimizer.param_groups:
        group["lr"] = group["largest"] * rate
    optimizer.step()
    return total


def choose_rate_share(module: Learner, task: Task, training: Training) -> float:
    """Return the share of the usual rate that does best on the holdout after a few steps.

    Shares are tried from the largest on, until a smaller one does worse. The module is left as it was.
    """
    before, best, least = copy_state(module), _RATE_SHARES[0], math.inf
    for share in _RATE_SHARES:
        score = _score_after_few_steps(module, task, training, share)
        module.load_state_dict(before)
        if score > least:
            break
        if score < least:
            best, least = share, score
    return best


def _score_after_few_steps(module: Learner, task: Task, training: Training, share: float) -> float:
    """Return the holdout score after a few steps of falling rate; infinity if a step fails."""
    optimizer = torch.optim.Adam(list(parameter_groups(module, training)))
    size = training.batch or default_batch_size(len(task.training_set))
    count = min(_STEPS_TRIED, -(-len(task.training_set) // size))
    steps = islice(task.training_set.batches(shuffled_indices(task, training, 0), size), count)
    for number, some in enumerate(steps):
        if not math.isfinite(take_step(module, optimizer, task.loss, some, share * cosine_decay(number / count))):
            return math.inf
    score, _ = task.evaluate(module)
    return math.inf if math.isnan(score) else score


def cosine_decay(share: float) -> float:
    """Return the learning rate, in units of the first, after a share of the training.

    >>> cosine_decay(0.5)
    0.5
    """
    return (1 + math.cos(math.pi * min(share, 1))) / 2


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state of a module."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


# Checkpoints: a killed run resumes from the last epoch, and ends in the same weights.


@dataclass(frozen=True)
class Checkpoint:
    """A file with the state of one training, or of a part of it.

    Attributes:
        path: the file; None saves nothing.
        key: digest of the training; states of another training are ignored.
    """

    path: Path | None
    key: str = ""

    @classmethod
    def of(cls, part: str, folder: Path | None, key: str) -> Checkpoint:
        """Return the checkpoint of a part of a training; without a folder it saves nothing."""
        return cls(None if folder is None else folder / part, key)

    def load(self) -> dict[str, Any] | None:
        """Return the saved state of this training, or None if there is none that can be read."""
        if self.path is None or not self.path.exists():
            return None
        try:
            found: dict[str, Any] = torch.load(self.path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
            return None
        return found["state"] if isinstance(found, dict) and found.get("key") == self.key else None

    def save(self, state: dict[str, Any]) -> None:
        """Replace the saved state, all at once.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is None:
            return
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            self.path.parent.mkdir(exist_ok=True)
            torch.save({"key": self.key, "state": state}, new)
            new.replace(self.path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise OutputError(
                f"the state of training {self.path} cannot be written: {error}; make room there"
            ) from error


def digest_of(parts: Iterable[object]) -> str:
    """Return a digest of tensors by their bytes, and of other objects by their `repr`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.detach().cpu().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return digest.hexdigest()


# The loop: Adam with a cosine schedule; the best state on the holdout is kept.

_DEFAULT_STEPS = 240
_MIN_EPOCHS = 8
# Training ends when more steps than these were undone.
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
    score: float
    noise: float
    epoch: int = 0


@dataclass(eq=False)
class _State:
    """The state of training after an epoch."""

    module: dict[str, Tensor]
    optimizer: dict[str, Any]
    best: _Best
    before: float
    factor: float
    epoch: int = 0
    seconds: float = 0.0
    undone: list[str] = field(default_factory=list)

    @classmethod
    def from_content(cls, kept: dict[str, Any]) -> _State:
        """Undo `content`."""
        return cls(**{**kept, "best": _Best(**kept["best"])})

    @property
    def content(self) -> dict[str, Any]:
        """The state in types that torch saves."""
        return {**vars(self), "best": vars(self.best)}


def train_module(
    module: Learner, task: Task, training: Training, checkpoint: Checkpoint, progress: Progress
) -> TrainingResult:
    """Train a module, and leave it in its best state.

    The steps are Adam's (Kingma and Ba 2015), relative to the size of each tensor, and fall along a cosine. Without a
    given rate, the one of several that does best in a few steps is taken. If the loss of a step is not finite, its
    epoch is undone, and later steps are half as large.

    Args:
        module: the whole model, or a block.
        task: the loss and the samples.
        training: the settings.
        checkpoint: saved after each epoch; training resumes from it.
        progress: called for the stage ``train``.
    """
    size = training.batch or default_batch_size(len(task.training_set))
    steps = -(-len(task.training_set) // size)
    epochs = training.epochs or max(_MIN_EPOCHS, -(-_DEFAULT_STEPS // steps))
    optimizer = torch.optim.Adam(list(parameter_groups(module, training)))
    state = _start(module, optimizer, task, training, checkpoint)
    clock = _Clock(training.minutes, state.seconds)
    while state.epoch < epochs and state.epoch - state.best.epoch < (training.patience or epochs) and clock.share < 1:
        if len(state.undone) > _MAX_UNDONE:
            break
        progress("train", state.epoch, epochs)
        total, count = 0.0, 0
        for number, some in enumerate(task.training_set.batches(shuffled_indices(task, training, state.epoch), size)):
            share = max((state.epoch + number / steps) / epochs, clock.share)
            if number and share >= 1:
                # A part of the samples counts as an epoch.
                break
            lost = take_step(module, optimizer, task.loss, some, state.factor * cosine_decay(share))
            total, count = total + lost, count + 1
            if not math.isfinite(lost):
                state.undone.append(
                    f"step {number + 1} of epoch {state.epoch + 1} had a loss or gradient of {lost} and was undone"
                )
                break
        if math.isfinite(total):
            state.seconds = clock.seconds
            noise = _compare(module, optimizer, task, state)
            if noise > _DIVERGED * state.best.noise and task.loss is task.distillation:
                state.factor /= _STEP_DIVISOR
                state.module = state.best.module
                module.load_state_dict(state.module)
            checkpoint.save(state.content)
            if training.on_progress is not None:
                training.on_progress(TrainingProgress(state.epoch, epochs, total / count, noise))
            continue
        state.factor /= 2
        module.load_state_dict(state.module)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    progress("train", epochs, epochs)
    best = state.best
    module.load_state_dict(best.module)
    return TrainingResult(state.before, best.noise, best.epoch, state.epoch, tuple(state.undone))


class _Clock:
    """The share of the time limit spent, in a run before it was resumed and since."""

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
    module: Learner, optimizer: torch.optim.Optimizer, task: Task, training: Training, checkpoint: Checkpoint
) -> _State:
    kept = checkpoint.load()
    if kept is not None:
        state = _State.from_content(kept)
        module.load_state_dict(state.module)
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        return state
    score, noise = task.evaluate(module)
    share = choose_rate_share(module, task, training) if training.rate is None else 1.0
    now = copy_state(module)
    return _State(now, copy.deepcopy(optimizer.state_dict()), _Best(now, score, noise), noise, share)


def _compare(module: Learner, optimizer: torch.optim.Optimizer, task: Task, state: _State) -> float:
    """Record the state after an epoch, and whether it is the best; return its noise-to-signal ratio."""
    score, noise = task.evaluate(module)
    state.epoch += 1
    state.module, state.optimizer = copy_state(module), copy.deepcopy(optimizer.state_dict())
    if score < state.best.score:
        state.best = _Best(state.module, score, noise, state.epoch)
    return noise
