"""What is learned from: samples as tensors, with what the float model makes of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onnxq.calibration.activations import Activations
from onnxq.data.arrays import npy_array
from onnxq.data.dataset import Selection
from onnxq.data.inputs import Sample, SampleSource
from onnxq.errors import DataError, OnnxqError
from onnxq.runtime.sessions import open_session, output_names, run
from onnxq.training.module import FakeQuantized
from onnxq.training.settings import MEMORY

Tensors = dict[str, Tensor]
# Stacked samples differ from single ones by rounding alone.
_SAME = 1e-4
Place = TypeVar("Place")
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
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

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What does not come of the float model."""
        return (*self.inputs.values(), *(() if self.labels is None else (self.labels,)))

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
        stacked: whether several of equal shapes can be run as one.
        device: where they are run.
    """

    single: Sequence[Batch]
    stacked: bool = False
    device: torch.device = _CPU

    def __len__(self) -> int:
        return len(self.single)

    @cached_property
    def _shapes(self) -> tuple[_Shapes, ...]:
        return tuple(_shapes(one) for one in self.single)

    def batches(self, places: Sequence[int], size: int) -> Iterator[list[Batch]]:
        """Yield the samples of each step, those of equal shapes as one batch where they stack, and else by themselves.

        A step has samples of one shape as long as there are enough of them.
        """
        for step in _steps(places, size, self._shapes) if self.stacked else _cut(places, size):
            found = [self.single[place] for place in step]
            yield [one.on(self.device) for one in (_stacks(found) if self.stacked else found)]


@dataclass(frozen=True, eq=False)
class Entries(Sequence[Batch], Generic[Place]):
    """Batches that are read from where they are held when they are asked for.

    Attributes:
        places: what they are known by there.
    """

    places: Sequence[Place]

    @abstractmethod
    def at(self, place: Place) -> Batch:
        """Return the batch at one of the places."""

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        return replace(self, places=self.places[index]) if isinstance(index, slice) else self.at(self.places[index])


@dataclass(frozen=True, eq=False)
class Read(Entries[int]):
    """Samples with what the float model gives.

    Attributes:
        inputs: what samples hold.
        expected: what the float model gives.
        classes: of the samples; None where they have none.
    """

    inputs: Activations
    expected: Activations
    classes: NDArray[np.integer[Any]] | None

    def close(self) -> None:
        """Remove the files."""
        self.inputs.close()
        self.expected.close()

    def at(self, place: int) -> Batch:
        """Return one sample."""
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
    return Read(range(len(samples)), inputs, expected, classes)


def stackable(module: FakeQuantized, lessons: Sequence[Batch]) -> bool:
    """Whether the module gives for stacked samples what it gives for each: found out with two of equal shapes."""
    some = _two_alike(lessons)
    if not some or any(not one.ndim for one in (*some[0].inputs.values(), *some[0].expected.values())):
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


def _two_alike(lessons: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return two samples of equal shapes, or none."""
    seen: dict[_Shapes, Batch] = {}
    for one in lessons:
        if (shapes := _shapes(one)) in seen:
            return seen[shapes], one
        seen[shapes] = one
    return ()


def _shapes(batch: Batch) -> _Shapes:
    return tuple((name, tuple(one.shape)) for name, one in batch.inputs.items())


def _cut(places: Sequence[int], size: int) -> list[Sequence[int]]:
    return [places[first : first + size] for first in range(0, len(places), size)]


def _steps(places: Sequence[int], size: int, shapes: Sequence[_Shapes]) -> list[Sequence[int]]:
    """Return the places of each step, in the order of the first one of each."""
    alike: dict[_Shapes, list[int]] = {}
    for place in places:
        alike.setdefault(shapes[place], []).append(place)
    whole = [step for some in alike.values() for step in _cut(some, size) if len(step) == size]
    left = set(places).difference(*whole)
    turn = {place: number for number, place in enumerate(places)}
    return sorted([*whole, *_cut([place for place in places if place in left], size)], key=lambda step: turn[step[0]])


def _stacks(some: Sequence[Batch]) -> list[Batch]:
    """Return samples as batches of those of equal shapes."""
    alike: dict[_Shapes, list[Batch]] = {}
    for one in some:
        alike.setdefault(_shapes(one), []).append(one)
    return [_stack(each) if len(each) > 1 else each[0] for each in alike.values()]


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
