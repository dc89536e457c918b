"""What is learned from: samples as tensors, with what the float model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onnxq.errors import DataError, OnnxqError
from onnxq.runtime import open_session, output_names, run
from onnxq.samples.arrays import npy_array
from onnxq.samples.inputs import Sample, SampleSource
from onnxq.samples.selection import Selection
from onnxq.training.module import FakeQuantized

Tensors = dict[str, Tensor]
# Stacked samples differ from single ones by rounding alone.
_SAME = 1e-4
_TRIED = 2


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one run.

    Attributes:
        inputs: by name.
        expected: what the float model gives, by output.
        labels: a class for each sample; None where there are none.
        count: how many samples.
    """

    inputs: Tensors
    expected: Tensors
    labels: Tensor | None = None
    count: int = 1


@dataclass(frozen=True, eq=False)
class Lessons:
    """Samples to learn from or to judge by.

    Attributes:
        single: each sample by itself.
        stacked: whether several can be run as one.
    """

    single: Sequence[Batch]
    stacked: bool = False

    def __len__(self) -> int:
        return len(self.single)

    def batches(self, places: Sequence[int], size: int) -> Iterator[list[Batch]]:
        """Yield the samples of each step: one batch that holds them all, or each by itself where they do not stack."""
        for first in range(0, len(places), size):
            some = [self.single[place] for place in places[first : first + size]]
            yield [_stack(some)] if self.stacked and len(some) > 1 else some


def read_lessons(reference: Path, samples: SampleSource, labels: Path | None = None) -> list[Batch]:
    """Run the float model on samples, and keep both.

    Args:
        reference: file of the float model.
        samples: the samples, all of which are held.
        labels: a ``.npy`` file of a class for each of all samples that these were selected from.

    Raises:
        DataError: a sample does not run, or holds what is no number, or labels are none of these samples.
    """
    classes = None if labels is None else _classes(labels, samples)
    session = open_session(reference)
    names, found = output_names(session), []
    for place, sample in enumerate(samples):
        outputs = dict(zip(names, run(session, sample, names, index=place), strict=True))
        label = None if classes is None else torch.tensor([int(classes[place])])
        found.append(Batch(_tensors(sample, place), _tensors(outputs, place), label))
    return found


def stackable(module: FakeQuantized, lessons: Sequence[Batch]) -> bool:
    """Whether the module gives for stacked samples what it gives for each: found out with two of them."""
    if len({tuple((name, tuple(one.shape)) for name, one in each.inputs.items()) for each in lessons}) != 1:
        return False
    some = list(lessons[:_TRIED])
    if len(some) < _TRIED or any(not one.ndim for one in (*some[0].inputs.values(), *some[0].expected.values())):
        return False
    together = _stack(some)
    with torch.no_grad():
        try:
            found = module.outputs(together.inputs)
            alone = _joined([module.outputs(one.inputs) for one in some])
        except (OnnxqError, RuntimeError):
            return False
    return all(
        found[name].shape == one.shape and bool(((found[name] - one).abs() <= _SAME * (1 + one.abs())).all())
        for name, one in alone.items()
        if one.is_floating_point()
    )


def _stack(some: Sequence[Batch]) -> Batch:
    labels = [one.labels for one in some if one.labels is not None]
    return Batch(
        _joined([one.inputs for one in some]),
        _joined([one.expected for one in some]),
        torch.cat(labels) if labels else None,
        sum(one.count for one in some),
    )


def _joined(some: Sequence[Tensors]) -> Tensors:
    return {name: torch.cat([one[name] for one in some]) for name in some[0]}


def _tensors(sample: Sample, place: int) -> Tensors:
    found = {}
    for name, array in sample.items():
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise DataError(
                f"sample {place}: {name!r} holds no numbers, which training needs; leave that output or input out"
            )
        found[name] = torch.from_numpy(np.array(array))
    return found


def _places(samples: SampleSource) -> tuple[list[int], int]:
    """Return which samples these are of all that they were selected from, and how many those are."""
    if not isinstance(samples, Selection):
        return list(range(len(samples))), len(samples)
    around, count = _places(samples.samples)
    return [around[place] for place in samples.places], count


def _classes(path: Path, samples: SampleSource) -> NDArray[np.integer[Any]]:
    """Return the class of each of some samples, from a file with one for each of all that they were selected from."""
    stored = npy_array(path)
    places, count = _places(samples)
    if stored.dtype.kind not in "iu" or tuple(stored.shape) != (count,):
        raise DataError(
            f"labels {path} are {stored.dtype.name} of shape {list(stored.shape)}, expected one whole number for each "
            f"of {count} samples"
        )
    found: NDArray[np.integer[Any]] = stored.read()[places]
    return found
