"""What a user says of training. Knows no torch, so that reading it costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from onnxq.errors import SchemeError, check_name, check_type

LEARNED = ("weights", "biases", "scales", "zero-points")
"""What can learn."""

BLOCKS = ("no", "first", "only")
"""Whether blocks learn one after the other."""

MEMORY = 1 << 28
"""Bytes of samples, of the float model's outputs and of what flows between blocks that stay in memory."""


RATE = 1e-3
"""The largest first rate of those that are tried where none is given."""


@dataclass(frozen=True)
class Standing:
    """Where training stands after an epoch.

    Attributes:
        epoch: of what learns now, counted from 1.
        epochs: that there are at most.
        loss: mean over the steps of the epoch.
        noise: noise-to-signal ratio of the worst held output.
        block: which block learns, counted from 1; 0 where all learn together.
        blocks: how many there are.
    """

    epoch: int
    epochs: int
    loss: float
    noise: float
    block: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Training:
    """How a quantized model is trained.

    Attributes:
        labels: a ``.npy`` file of one class for each calibration sample, which the first output is to give; None trains
            towards the outputs of the float model.
        loss: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` of three dictionaries of tensors, outputs, the float model's
            outputs and inputs, that returns a scalar tensor; empty for one of the others.
        learn: which of LEARNED change.
        blocks: ``first`` lets blocks of a few weights learn one after the other, each from what the quantized ones
            before it give, what the float model has behind it; then all learn together, which ``no`` does alone, and
            ``only`` does not.
        epochs: how often all samples are seen; None takes as many as make some 240 steps, and 8 at least.
        batch: samples of a step; None takes 32, or an eighth of few samples.
        rate: of a step, how much of its own size, or of four codes where that is more, a weight changes at most at
            first; scales likewise of their size, factors of channels thirty times as much, and zero points by ten
            times as much of a code. None tries RATE and parts of it, down to a 27th, for a few steps each, and takes
            what does best on held-out samples.
        patience: epochs without a better result after which training ends; None runs all, whose last steps are the
            smallest and most often the best.
        seed: of the order of samples.
        minutes: after which it ends; steps become small until then. None lets it take what it takes.
        device: of torch, such as ``cpu`` or ``cuda:1``; empty takes a GPU where there is one.
        memory: bytes of samples, of the float model's outputs and of what flows between blocks that stay in memory;
            what is beyond is in files of a temporary folder. What learns, and its gradients, come on top.
        told: is told where training stands after every epoch.

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
    told: Callable[[Standing], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_type(self.labels, (str, Path, type(None)), "the labels", "a .npy file")
        check_type(self.loss, str, "the loss", "FILE.py:FUNCTION")
        for name in self.learn:
            check_name("what learns", name, LEARNED)
        if not self.learn:
            raise SchemeError(f"nothing learns; name one or more of {', '.join(LEARNED)}")
        check_name("blocks", self.blocks, BLOCKS)
        check_type(self.device, str, "the device", "the name of one of torch's, such as cpu or cuda")
        check_type(self.memory, int, "the memory", "a number of bytes")
        if self.loss and self.labels is not None:
            raise SchemeError("a loss of yours is given no labels; load them in the function, or leave one of both out")
        if self.blocks == "only" and (self.loss or self.labels is not None):
            raise SchemeError("blocks learn from the float model, not from labels or a loss; let them learn first")
        for what, number in (("epochs", self.epochs), ("the batch", self.batch), ("the patience", self.patience)):
            check_type(number, (int, type(None)), what, "a whole number above 0")
            if number is not None and number < 1:
                raise SchemeError(f"{what}: {number}, expected a whole number above 0")
        for what, given in (("the rate", self.rate), ("the time in minutes", self.minutes)):
            check_type(given, (int, float, type(None)), what, "a number above 0")
            if given is not None and not 0 < given < math.inf:
                raise SchemeError(f"{what} is {given}, expected a finite number above 0")
