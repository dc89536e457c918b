"""What training makes small: the noise on the float model's outputs, wrong answers, or what a user says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onnxq.errors import DataError, SchemeError, did_you_mean
from onnxq.evaluation.probabilities import are_probabilities
from onnxq.system.plugins import import_plugin
from onnxq.training.blocks import Block
from onnxq.training.lessons import Batch, Lessons
from onnxq.training.module import FakeQuantized

Learner = FakeQuantized | Block
"""What learns: all, or a block."""

Loss = Callable[[Mapping[str, Tensor], Batch], Tensor]
"""Takes outputs and the samples they are of, and returns the mean over these samples as a scalar."""

# Below, a logarithm of float32 has no gradient that means anything.
_LEAST = 1e-30
# Samples that are judged in one run.
_TOGETHER = 32
_FORM = "FILE.py:FUNCTION or MODULE:FUNCTION"


@dataclass(frozen=True, eq=False)
class Distillation:
    """The noise-to-signal ratio of each output beside the float model, added up.

    Probabilities are compared by their logarithms, about the mean of each row, which are what entered the Softmax.

    Attributes:
        signals: mean energy of a sample by output, of those that are floats.
        probabilities: the outputs among them that hold such.
    """

    signals: Mapping[str, float]
    probabilities: frozenset[str] = frozenset()

    @classmethod
    def of(cls, lessons: Sequence[Batch]) -> Distillation:
        """Return the loss whose unit is the signal of these samples.

        Raises:
            DataError: no output is a float.
        """
        floats = [name for name, one in lessons[0].expected.items() if one.is_floating_point()]
        rows = frozenset(
            name for name in floats if all(are_probabilities(one.expected[name].numpy()) for one in lessons)
        )
        totals, count = dict.fromkeys(floats, 0.0), sum(one.count for one in lessons)
        for one in lessons:
            for name in floats:
                totals[name] += float(_compared(one.expected[name], name in rows).square().sum())
        signals = {name: total / count for name, total in totals.items() if 0 < total < math.inf}
        if not signals:
            raise DataError("no output of the model is a float that is not zero, so there is nothing to learn from")
        return cls(signals, rows)

    def noises(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Return the mean noise of a sample by output, in units of the signal."""
        found = {}
        for name, signal in self.signals.items():
            rows = name in self.probabilities
            error = _compared(outputs[name], rows) - _compared(batch.expected[name].to(outputs[name].device), rows)
            found[name] = error.square().sum() / (batch.count * signal)
        return found

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the sum over outputs."""
        return torch.stack(list(self.noises(outputs, batch).values())).sum()


def _compared(values: Tensor, probabilities: bool) -> Tensor:
    if not probabilities:
        return values
    logarithms = values.clamp(min=_LEAST).log()
    return logarithms - logarithms.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The cross entropy of labels beside the first output, be that logits or probabilities.

    Attributes:
        output: its name.
        probabilities: whether it holds such.
    """

    output: str
    probabilities: bool

    @classmethod
    def of(cls, *some: Sequence[Batch]) -> CrossEntropy:
        """Return the loss of samples with labels.

        Raises:
            DataError: the first output has no row of scores for each sample, or a label is none of its classes.
        """
        name, expected = next(iter(some[0][0].expected.items()))
        if not expected.is_floating_point() or expected.ndim != 2 or expected.shape[0] != 1:
            raise DataError(
                f"output {name!r} has shape {list(expected.shape)} for a sample, expected one row of scores of "
                "classes, which labels are about; give a --loss of your own"
            )
        labels = [int(one.labels) for one in chain(*some) if one.labels is not None]
        if min(labels) < 0 or max(labels) >= expected.shape[1]:
            raise DataError(
                f"labels lie in {min(labels)}..{max(labels)}, expected 0..{expected.shape[1] - 1}, for output {name!r} "
                f"has {expected.shape[1]} classes"
            )
        return cls(name, all(are_probabilities(one.expected[name].numpy()) for one in chain(*some)))

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean over samples."""
        assert batch.labels is not None, "the lessons have labels"
        scores, labels = outputs[self.output], batch.labels.to(outputs[self.output].device)
        if self.probabilities:
            return torch.nn.functional.nll_loss(scores.clamp(min=_LEAST).log(), labels)
        return torch.nn.functional.cross_entropy(scores, labels)


def own_text(loss: str) -> str:
    """Return what a file says that a loss of the user's own is in; empty where it is in none."""
    place = Path(loss.rpartition(":")[0])
    return place.read_text(encoding="utf-8") if place.suffix == ".py" and place.is_file() else ""


def user_loss(text: str) -> Loss:
    """Return the loss that a user names.

    A function is code that the user asks to run: importing its module or file runs that, and nothing else is run.

    Args:
        text: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; it takes the outputs, the float model's outputs and the
            inputs, three dictionaries of tensors by name, and returns a scalar tensor, lower being better.

    Raises:
        SchemeError: there is no such function.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise SchemeError(f"loss {text!r} is not written as {_FORM}")
    module = import_plugin(place, f"loss {text!r}")
    function = getattr(module, name, None)
    if not callable(function):
        callables = [each for each, value in vars(module).items() if callable(value)]
        raise SchemeError(
            f"loss {text!r} needs a function, but {place} has none of that name{did_you_mean(name, callables)}"
        )

    def loss(outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        try:
            found: Any = function(dict(outputs), batch.expected, batch.inputs)
        except Exception as error:
            raise DataError(f"loss {text!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, torch.Tensor) or found.ndim or not found.is_floating_point():
            raise DataError(f"loss {text!r} returned {type(found).__name__}, expected a scalar tensor of floats")
        if any(one.requires_grad for one in outputs.values()) and not found.requires_grad:
            raise DataError(
                f"loss {text!r} has no gradient, so nothing can be learned from it; compute it of the outputs by "
                "functions that have one, which argmax, round and comparisons have not"
            )
        return found

    return loss


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
            for some in self.held.batches(range(len(self.held)), _TOGETHER if self.held.stacked else 1):
                for batch in some:
                    outputs = module.outputs(batch.inputs)
                    count += batch.count
                    if self.loss is not self.noise:
                        total += float(self.loss(outputs, batch)) * batch.count
                    for name, noise in self.noise.noises(outputs, batch).items():
                        noises[name] += float(noise) * batch.count
        worst = max(math.inf if math.isnan(noise) else noise / count for noise in noises.values())
        return (worst if self.loss is self.noise else total / count), worst
