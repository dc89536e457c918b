"""Losses: the error beside the float model's outputs, the cross entropy of labels, or a function of the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onnxq.errors import DataError, SchemeError, did_you_mean
from onnxq.evaluation.probabilities import are_shares
from onnxq.system.plugins import describe_error, import_plugin
from onnxq.training.module import Block, FakeQuantizedModel
from onnxq.training.training_set import Batch, TrainingSet

Learner = FakeQuantizedModel | Block
"""The whole model, or a block of it."""

Loss = Callable[[Mapping[str, Tensor], Batch], Tensor]
"""Takes outputs and their batch, and returns the mean over its samples as a scalar."""

# Below, a logarithm of float32 has no gradient that means anything.
_LEAST = 1e-30
# Samples that are evaluated in one run.
_TOGETHER = 32
_FORM = "FILE.py:FUNCTION or MODULE:FUNCTION"


@dataclass(frozen=True, eq=False)
class Distillation:
    """The sum of the noise-to-signal ratios of all float outputs.

    Probabilities are compared by their logarithms minus the mean of each row: the inputs of the Softmax.

    Attributes:
        signals: mean energy of a sample, by float output.
        probabilities: the outputs that are probabilities.
    """

    signals: Mapping[str, float]
    probabilities: frozenset[str] = frozenset()

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Distillation:
        """Return the loss in units of the signal of these samples.

        Raises:
            DataError: no output is a float that is not zero.
        """
        floats = [name for name, tensor in batches[0].expected.items() if tensor.is_floating_point()]
        rows = frozenset(name for name in floats if all(are_shares(batch.expected[name].numpy()) for batch in batches))
        totals, count = dict.fromkeys(floats, 0.0), sum(batch.count for batch in batches)
        for batch in batches:
            for name in floats:
                totals[name] += float(_compared(batch.expected[name], name in rows).square().sum())
        signals = {name: total / count for name, total in totals.items() if 0 < total < math.inf}
        if not signals:
            raise DataError("no output of the model is a float that is not zero, so there is nothing to learn from")
        return cls(signals, rows)

    def nsr_by_output(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Return the noise-to-signal ratio of each output."""
        ratios = {}
        for name, signal in self.signals.items():
            rows = name in self.probabilities
            error = _compared(outputs[name], rows) - _compared(batch.expected[name].to(outputs[name].device), rows)
            ratios[name] = error.square().sum() / (batch.count * signal)
        return ratios

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the sum over outputs."""
        return torch.stack(list(self.nsr_by_output(outputs, batch).values())).sum()


def _compared(values: Tensor, probabilities: bool) -> Tensor:
    if not probabilities:
        return values
    logarithms = values.clamp(min=_LEAST).log()
    return logarithms - logarithms.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The cross entropy between labels and the first output.

    Attributes:
        output: name of the output.
        probabilities: True if the output is probabilities, False if it is logits.
    """

    output: str
    probabilities: bool

    @classmethod
    def of(cls, *some: Sequence[Batch]) -> CrossEntropy:
        """Return the loss of samples with labels.

        Raises:
            DataError: the first output is not one row of scores a sample, or a label is not one of its classes.
        """
        name, expected = next(iter(some[0][0].expected.items()))
        if not expected.is_floating_point() or expected.ndim != 2 or expected.shape[0] != 1:
            raise DataError(
                f"output {name!r} has shape {list(expected.shape)} for a sample, expected one row of scores of "
                "classes, which labels are about; give a --loss of your own"
            )
        labels = [int(batch.labels) for batch in chain(*some) if batch.labels is not None]
        if min(labels) < 0 or max(labels) >= expected.shape[1]:
            raise DataError(
                f"labels lie in {min(labels)}..{max(labels)}, expected 0..{expected.shape[1] - 1}, for output {name!r} "
                f"has {expected.shape[1]} classes"
            )
        return cls(name, all(are_shares(batch.expected[name].numpy()) for batch in chain(*some)))

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean over samples."""
        assert batch.labels is not None, "the samples have labels"
        scores, labels = outputs[self.output], batch.labels.to(outputs[self.output].device)
        if self.probabilities:
            return torch.nn.functional.nll_loss(scores.clamp(min=_LEAST).log(), labels)
        return torch.nn.functional.cross_entropy(scores, labels)


def load_loss(text: str) -> Loss:
    """Import the loss function that a user names.

    This runs the user's module or file, and nothing else.

    Args:
        text: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; see `Training`.

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
            value: Any = function(dict(outputs), batch.expected, batch.inputs)
        except Exception as error:
            raise DataError(f"loss {text!r} failed: {describe_error(error)}") from error
        if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
            raise DataError(f"loss {text!r} returned {type(value).__name__}, expected a scalar tensor of floats")
        if any(tensor.requires_grad for tensor in outputs.values()) and not value.requires_grad:
            raise DataError(
                f"loss {text!r} has no gradient, expected one towards the outputs; replace argmax, round and "
                "comparisons in it by functions with gradients"
            )
        return value

    return loss


@dataclass(frozen=True, eq=False)
class Task:
    """A loss with its samples.

    Attributes:
        loss: the loss to minimize.
        training_set: samples to train on.
        holdout: samples to compare states on.
        distillation: the error beside the float model.
    """

    loss: Loss
    training_set: TrainingSet
    holdout: TrainingSet
    distillation: Distillation

    def on(self, device: torch.device) -> Task:
        """Return the task with samples that run on a device."""
        train, holdout = (replace(some, device=device) for some in (self.training_set, self.holdout))
        return replace(self, training_set=train, holdout=holdout)

    def held(self, memory: int) -> Task:
        """Return the task with its samples on their device, if they fit in `memory` bytes."""
        return replace(self, training_set=self.training_set.held(memory), holdout=self.holdout.held(memory))

    def evaluate(self, module: Learner) -> tuple[float, float]:
        """Return a state's score (lower is better) and the worst noise-to-signal ratio of an output, on the holdout."""
        results, count = list[tuple[int, Tensor | None, dict[str, Tensor]]](), 0
        with torch.no_grad():
            for some in self.holdout.batches(range(len(self.holdout)), _TOGETHER if self.holdout.stacked else 1):
                for batch in some:
                    outputs = module.outputs(batch.inputs)
                    count += batch.count
                    score = self.loss(outputs, batch) if self.loss is not self.distillation else None
                    results.append((batch.count, score, self.distillation.nsr_by_output(outputs, batch)))
        # Numbers are read when all batches are on their way.
        total = sum(float(score) * size for size, score, _ in results if score is not None)
        sums = {name: sum(float(nsr[name]) * size for size, _, nsr in results) for name in self.distillation.signals}
        worst = max(math.inf if math.isnan(nsr) else nsr / count for nsr in sums.values())
        return (worst if self.loss is self.distillation else total / count), worst
