"""Settings of training. Imports no torch, so it loads quickly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from onnxq.errors import SchemeError, check_name, check_type

LEARNED = ("weights", "biases", "scales", "zero-points")
"""The kinds of parameters that training can change."""

BLOCKS = ("no", "first", "only")
"""When blocks are trained one after the other: never, before the whole model, or without it."""

MEMORY = 1 << 28
"""Bytes of samples, float outputs and block activations kept in memory; the rest is in temporary files."""

RATE = 1e-3
"""The initial learning rate, relative to the size of a tensor."""


@dataclass(frozen=True)
class TrainingProgress:
    """The state of training after an epoch.

    Attributes:
        epoch: number of the epoch, counted from 1.
        epochs: how many epochs there are at most.
        loss: mean loss over the steps of the epoch.
        nsr_by_output: noise-to-signal ratio of the worst output on holdout samples.
        block: number of the block in training, counted from 1; 0 when the whole model is trained.
        blocks: how many blocks there are.
    """

    epoch: int
    epochs: int
    loss: float
    nsr_by_output: float
    block: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Training:
    """How a quantized model is trained.

    Attributes:
        labels: a ``.npy`` file with one class for each calibration sample, for the first output; None trains towards
            the outputs of the float model.
        loss: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``. The function takes three dictionaries of tensors (outputs,
            the float model's outputs, inputs) and returns a scalar tensor. Empty takes a built-in loss.
        learn: which kinds of LEARNED change.
        blocks: ``first`` trains blocks of a few weights one after the other and then the whole model. Each block gets
            the activations of the quantized blocks before it and learns the float model's. ``no`` trains only the whole
            model, ``only`` trains only the blocks.
        epochs: passes over all samples; None takes about 240 steps, and at least 8 epochs.
        batch: samples of a step; None takes 32, or an eighth of few samples.
        rate: the initial learning rate, relative to the root mean square of each tensor, or to four quantization steps
            if they are larger. Scales use it too, channel scales 30 times as much, and zero points 10 times as much in
            quantization steps. None takes RATE.
        patience: epochs without improvement after which training ends; None runs all, because the last and smallest
            steps are most often the best.
        seed: seed of the order of samples.
        minutes: time limit, over which the learning rate falls to zero; None sets no limit.
        device: a torch device such as ``cpu`` or ``cuda:1``; empty takes the GPU if there is one, else the processor.
        memory: bytes of samples, float outputs and block activations kept in memory; the rest is in temporary files.
            Parameters and gradients come on top.
        on_progress: called with the `TrainingProgress` after every epoch.

    Raises:
        SchemeError: a number is out of range, or names contradict each other.

    >>> Training(learn=("scales",)).learn
    ('scales',)
    """

    labels: str | Path | None = None
    loss: str = ""
    learn: tuple[str, ...] = LEARNED
    blocks: str = "first"
    epochs: int | None = None
    batch: int | None = None
    rate: float | None = None
    patience: int | None = None
    seed: int = 0
    minutes: float | None = None
    device: str = ""
    memory: int = field(default=MEMORY, repr=False)
    on_progress: Callable[[TrainingProgress], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_type(self.labels, (str, Path, type(None)), "the labels", "a .npy file")
        check_type(self.loss, str, "the loss", "FILE.py:FUNCTION")
        for name in self.learn:
            check_name("learn", name, LEARNED)
        if not self.learn:
            raise SchemeError(f"nothing would be trained; name one or more of {', '.join(LEARNED)}")
        check_name("blocks", self.blocks, BLOCKS)
        check_type(self.device, str, "the device", "a torch device such as cpu or cuda")
        check_type(self.memory, int, "the memory", "a number of bytes")
        if self.loss and self.labels is not None:
            raise SchemeError("a loss function is given no labels; load them in the function, or leave one of them out")
        if self.blocks == "only" and (self.loss or self.labels is not None):
            raise SchemeError(
                "blocks are trained towards the float model, not towards labels or a loss; take blocks first"
            )
        for what, number in (("epochs", self.epochs), ("the batch", self.batch), ("the patience", self.patience)):
            check_type(number, (int, type(None)), what, "a whole number above 0")
            if number is not None and number < 1:
                raise SchemeError(f"{what}: {number}, expected a whole number above 0")
        for what, amount in (("the rate", self.rate), ("the time in minutes", self.minutes)):
            check_type(amount, (int, float, type(None)), what, "a number above 0")
            if amount is not None and not 0 < amount < math.inf:
                raise SchemeError(f"{what} is {amount}, expected a finite number above 0")
