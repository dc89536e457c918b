"""Training samples as tensors, with the outputs of the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onnxq.data.arrays import npy_array
from onnxq.data.dataset import Subset
from onnxq.data.inputs import Sample, SampleSource
from onnxq.errors import DataError, OnnxqError
from onnxq.runtime.sessions import open_session, output_names, run
from onnxq.training.activations import Activations
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.settings import MEMORY

Tensors = dict[str, Tensor]
# Relative difference of outputs: stacked samples differ from single ones by rounding alone.
_SAME = 1e-4
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one run.

    Attributes:
        inputs: tensors by input name.
        expected: the float model's outputs, by name.
        labels: a class for each sample; None without labels.
        count: number of samples.
    """

    inputs: Tensors
    expected: Tensors
    labels: Tensor | None = None
    count: int = 1

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        inputs, expected = (
            {name: tensor.to(device) for name, tensor in some.items()} for some in (self.inputs, self.expected)
        )
        return Batch(inputs, expected, None if self.labels is None else self.labels.to(device), self.count)


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Samples to train on, or to evaluate on.

    Attributes:
        samples: one batch for each sample.
        stacked: True if samples of equal shapes can run as one batch.
        device: the device that runs them.
    """

    samples: Sequence[Batch]
    stacked: bool = False
    device: torch.device = _CPU

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def _shapes(self) -> tuple[_Shapes, ...]:
        return tuple(_shapes(sample) for sample in self.samples)

    def batches(self, indices: Sequence[int], size: int) -> Iterator[list[Batch]]:
        """Yield the batches of each step of `size` samples.

        If samples stack, those of equal shapes are one batch, and a step has samples of one shape while there are
        enough of them.
        """
        for step in _steps(indices, size, self._shapes) if self.stacked else _cut(indices, size):
            batches = [self.samples[index] for index in step]
            yield [batch.to(self.device) for batch in (_stacks(batches) if self.stacked else batches)]

    def held(self, memory: int) -> TrainingSet:
        """Return the set with samples that wait on its device, unless they take more than `memory` bytes there."""
        if self.device == _CPU:
            return self
        batches, size = list[Batch](), 0
        for sample in self.samples:
            size += sum(tensor.nbytes for tensor in (*sample.inputs.values(), *sample.expected.values()))
            if size > memory:
                return self
            batches.append(sample.to(self.device))
        return replace(self, samples=batches)


@dataclass(frozen=True, eq=False)
class StoredBatches(Sequence[Batch]):
    """Batches that are each read when it is used.

    Attributes:
        read: returns the batch of an index.
        indices: of the batches.
        held: what `read` reads from, and `close` closes.
    """

    read: Callable[[int], Batch]
    indices: Sequence[int]
    held: tuple[Activations, ...] = ()

    def close(self) -> None:
        """Remove the temporary files."""
        for held in self.held:
            held.close()

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> Batch: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Batch]: ...
    def __getitem__(self, place: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(place, slice):
            return replace(self, indices=self.indices[place])
        return self.read(self.indices[place])


def run_float_model(
    reference: Path, samples: SampleSource, labels: Path | None = None, memory: int = MEMORY
) -> StoredBatches:
    """Run the float model on samples, and keep both.

    Args:
        reference: file of the float model.
        samples: the samples.
        labels: a ``.npy`` file with a class for each sample of the set that `samples` was selected from.
        memory: bytes kept in memory; the rest is in temporary files until the result is closed.

    Raises:
        DataError: a sample does not run or is not numeric, or the labels do not fit the samples.
        OutputError: the disk has no space for the temporary files.
    """
    classes = None if labels is None else _classes(labels, samples)
    session = open_session(reference)
    names, (inputs, expected) = output_names(session), (Activations(memory // 2) for _ in range(2))
    for place, sample in enumerate(samples):
        outputs = dict(zip(names, run(session, sample, names, index=place), strict=True))
        for held, arrays in ((inputs, sample), (expected, outputs)):
            _check_numbers(arrays, place)
            held.put(place, {name: np.array(array) for name, array in arrays.items()})

    def read(index: int) -> Batch:
        label = None if classes is None else torch.tensor([int(classes[index])])
        return Batch(as_tensors(inputs.of(index)), as_tensors(expected.of(index)), label)

    return StoredBatches(read, range(len(samples)), (inputs, expected))


def can_stack(module: FakeQuantizedModel, batches: Sequence[Batch]) -> bool:
    """Try two samples of equal shapes: return True if stacked they have the same outputs as alone."""
    some = _two_alike(batches)
    if not some or any(not tensor.ndim for tensor in (*some[0].inputs.values(), *some[0].expected.values())):
        return False
    together = _stack(some)
    with torch.no_grad():
        try:
            stacked = module.outputs(together.to(module.device).inputs)
            alone = _joined([module.outputs(batch.to(module.device).inputs) for batch in some])
        except (OnnxqError, RuntimeError):
            return False
    return all(
        stacked[name].shape == tensor.shape
        and bool(((stacked[name] - tensor).abs() <= _SAME * (1 + tensor.abs())).all())
        for name, tensor in alone.items()
        if tensor.is_floating_point()
    )


def _two_alike(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return two samples of equal shapes, or an empty tuple."""
    seen: dict[_Shapes, Batch] = {}
    for batch in batches:
        if (shapes := _shapes(batch)) in seen:
            return seen[shapes], batch
        seen[shapes] = batch
    return ()


def _shapes(batch: Batch) -> _Shapes:
    return tuple((name, tuple(tensor.shape)) for name, tensor in batch.inputs.items())


def _cut(places: Sequence[int], size: int) -> list[Sequence[int]]:
    return [places[first : first + size] for first in range(0, len(places), size)]


def _steps(places: Sequence[int], size: int, shapes: Sequence[_Shapes]) -> list[Sequence[int]]:
    """Return the indices of each step, full steps of one shape where possible."""
    alike: dict[_Shapes, list[int]] = {}
    for place in places:
        alike.setdefault(shapes[place], []).append(place)
    whole = [step for some in alike.values() for step in _cut(some, size) if len(step) == size]
    left = set(places).difference(*whole)
    turn = {place: number for number, place in enumerate(places)}
    return sorted([*whole, *_cut([place for place in places if place in left], size)], key=lambda step: turn[step[0]])


def _stacks(some: Sequence[Batch]) -> list[Batch]:
    """Stack samples of equal shapes."""
    alike: dict[_Shapes, list[Batch]] = {}
    for batch in some:
        alike.setdefault(_shapes(batch), []).append(batch)
    return [_stack(each) if len(each) > 1 else each[0] for each in alike.values()]


def _stack(some: Sequence[Batch]) -> Batch:
    labels = [batch.labels for batch in some if batch.labels is not None]
    return Batch(
        _joined([batch.inputs for batch in some]),
        _joined([batch.expected for batch in some]),
        torch.cat(labels) if labels else None,
        sum(batch.count for batch in some),
    )


def _joined(some: Sequence[Tensors]) -> Tensors:
    return {name: torch.cat([batch[name] for batch in some]) for name in some[0]}


def as_tensors(arrays: Mapping[str, NDArray[Any]]) -> Tensors:
    """Convert arrays to tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check_numbers(arrays: Sample, place: int) -> None:
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise DataError(
                f"sample {place}: {name!r} is not numeric, but training needs numbers; remove this input or output"
            )


def _places(samples: SampleSource) -> tuple[list[int], int]:
    """Return the indices of samples in the set that they were selected from, and the size of that set."""
    if not isinstance(samples, Subset):
        return list(range(len(samples))), len(samples)
    around, count = _places(samples.samples)
    return [around[place] for place in samples.places], count


def _classes(path: Path, samples: SampleSource) -> NDArray[np.integer[Any]]:
    """Read the class of each sample from a file with one for each of the set that they were selected from."""
    stored = npy_array(path)
    places, count = _places(samples)
    if stored.dtype.kind not in "iu" or tuple(stored.shape) != (count,):
        raise DataError(
            f"labels {path} are {stored.dtype.name} of shape {list(stored.shape)}, expected one whole number for each "
            f"of {count} samples"
        )
    classes: NDArray[np.integer[Any]] = stored.read()[places]
    return classes
