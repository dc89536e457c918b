"""What is learned from: samples as tensors, with what the float model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onnxq.errors import DataError, OnnxqError
from onnxq.execution.spool import Activations
from onnxq.runtime import open_session, output_names, run
from onnxq.samples.arrays import npy_array
from onnxq.samples.inputs import Sample, SampleSource
from onnxq.samples.selection import Selection
from onnxq.training.module import FakeQuantized
from onnxq.training.settings import MEMORY

Tensors = dict[str, Tensor]
# Stacked samples differ from single ones by rounding alone.
_SAME = 1e-4
_TRIED = 2
_CPU = torch.device("cpu")


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

    def on(self, device: torch.device) -> Batch:
        """Return the same on a device."""
        inputs, expected = (
            {name: one.to(device) for name, one in some.items()} for some in (self.inputs, self.expected)
        )
        return Batch(inputs, expected, None if self.labels is None else self.labels.to(device), self.count)


@dataclass(frozen=True, eq=False)
class Lessons:
    """Samples to learn from or to judge by.

    Attributes:
        single: each sample by itself.
        stacked: whether several can be run as one.
        device: where they are run.
    """

    single: Sequence[Batch]
    stacked: bool = False
    device: torch.device = _CPU

    def __len__(self) -> int:
        return len(self.single)

    def batches(self, places: Sequence[int], size: int) -> Iterator[list[Batch]]:
        """Yield the samples of each step: one batch that holds them all, or each by itself where they do not stack."""
        for first in range(0, len(places), size):
            some = [self.single[place] for place in places[first : first + size]]
            yield [one.on(self.device) for one in ([_stack(some)] if self.stacked and len(some) > 1 else some)]


@dataclass(frozen=True, eq=False)
class Read(Sequence[Batch]):
    """Samples with what the float model gives, each read from where it is held when it is asked for.

    Attributes:
        inputs: what samples hold.
        expected: what the float model gives.
        classes: of the samples; None where they have none.
        places: by which these samples are known there.
    """

    inputs: Activations
    expected: Activations
    classes: NDArray[np.integer[Any]] | None
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.places)

    def close(self) -> None:
        """Remove the files."""
        self.inputs.close()
        self.expected.close()

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return replace(self, places=self.places[index])
        place = self.places[index]
        label = None if self.classes is None else torch.tensor([int(self.classes[place])])
        return Batch(as_tensors(self.inputs.of(place)), as_tensors(self.expected.of(place)), label)


def read_lessons(reference: Path, samples: SampleSource, labels: Path | None = None, memory: int = MEMORY) -> Read:
    """Run the float model on samples, and hold both.

    Args:
        reference: file of the float model.
        samples: the samples.
        labels: a ``.npy`` file of a class for each of all samples that these were selected from.
        memory: bytes of both that stay in memory; what is beyond is in files, until what is returned is closed.

    Raises:
        DataError: a sample does not run, or holds what is no number, or labels are none of these samples.
        OutputError: the disk has no room for what is beyond.
    """
    classes = None if labels is None else _classes(labels, samples)
    session = open_session(reference)
    names, (inputs, expected) = output_names(session), (Activations(memory // 2) for _ in range(2))
    for place, sample in enumerate(samples):
        outputs = dict(zip(names, run(session, sample, names, index=place), strict=True))
        for held, arrays in ((inputs, sample), (expected, outputs)):
            _check_numbers(arrays, place)
            held.put(place, {name: np.array(array) for name, array in arrays.items()})
    return Read(inputs, expected, classes, range(len(samples)))


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
            found = module.outputs(together.on(module.device).inputs)
            alone = _joined([module.outputs(one.on(module.device).inputs) for one in some])
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


def as_tensors(arrays: Mapping[str, NDArray[Any]]) -> Tensors:
    """Return arrays as tensors, which share their memory."""
    return {name: torch.from_numpy(one) for name, one in arrays.items()}


def _check_numbers(arrays: Sample, place: int) -> None:
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise DataError(
                f"sample {place}: {name!r} holds no numbers, which training needs; leave that output or input out"
            )


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
