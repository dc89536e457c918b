"""Rows of the caller's objects as samples, and samples that are kept in a temporary folder."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import RandomAccess, evenly_spaced_indices
from onnxq.data.files import Labels, SampleFile, as_sample, spooled_part, stack_size
from onnxq.data.inputs import Input, Sample, cast, checked, required
from onnxq.errors import DataError, OutputError
from onnxq.system.plugins import wrap_plugin_errors

LABELS = ("labels", "label")
"""Keys of labels in a row."""


def samples_of_row(
    row: object, inputs: Sequence[Input], where: str, *, as_given: bool = False
) -> Iterator[tuple[Sample, Labels]]:
    """Yield the samples of a row, each with its class numbers: one, or all that are stacked in it.

    A mapping is matched by input name; other keys are left out. A tuple or list gives the inputs in the model's order;
    further values are left out. Anything else is the one input.

    Labels are whole numbers under the key ``labels`` or ``label`` of a mapping, or the one value behind the inputs of a
    tuple or list, one for each sample; other values there are no labels.

    Tensors become arrays of the type of the input, see `onnxq.data.inputs.cast`. A missing batch axis is added.

    Args:
        row: a mapping, a tuple, or an array or tensor.
        inputs: the inputs of the model.
        where: the name of the row in errors.
        as_given: whether a dict of arrays without labels is already a sample.

    Raises:
        DataError: an input has no value, or its value is not an array.

    >>> entry = Input("x", np.dtype(np.float32), ("N", 2))
    >>> pairs = samples_of_row((np.ones((2, 2)), [0, 1]), [entry], "batch 0")
    >>> [(sample["x"].tolist(), labels) for sample, labels in pairs]
    [([[1.0, 1.0]], (0,)), ([[1.0, 1.0]], (1,))]
    """
    if as_given and is_sample(row, inputs):
        yield row, ()
        return
    wanted = {entry.name: entry for entry in inputs}
    arrays = {name: _array(value, wanted[name], where) for name, value in _named(row, inputs, where).items()}
    count, labels = stack_size({name: array.shape for name, array in arrays.items()}, inputs), _labels(row, inputs)
    if count is None:
        yield arrays, labels
        return
    if len(labels) != count:
        labels = ()
    for index in range(count):
        sample = {name: as_sample(array[index], wanted[name]) for name, array in arrays.items()}
        yield sample, labels[index : index + 1]


def is_sample(row: object, inputs: Sequence[Input]) -> TypeGuard[Sample]:
    """Return whether a row is a dict of arrays without labels, which is already a sample."""
    return (
        isinstance(row, Mapping)
        and all(isinstance(value, np.ndarray | np.generic) for value in row.values())
        and not any(name in row for name in _label_names(inputs))
    )


def _labels(row: object, inputs: Sequence[Input]) -> Labels:
    value: Any = None
    if isinstance(row, Mapping):
        value = next((row[name] for name in _label_names(inputs) if name in row), None)
    elif isinstance(row, tuple | list) and len(row) == len(required(inputs)) + 1:
        value = row[-1]
    try:
        array = np.asarray(_without_gradient(value))
    except (TypeError, ValueError):
        return ()
    is_list = array.ndim == 0 or array.size == len(array)
    return tuple(array.reshape(-1).tolist()) if is_list and array.dtype.kind in "iu" else ()


def _label_names(inputs: Sequence[Input]) -> list[str]:
    names = {entry.name for entry in inputs}
    return [name for name in LABELS if name not in names]


def _without_gradient(value: Any) -> Any:
    """Return a tensor of PyTorch on the processor and without its gradient, and anything else as it is."""
    return value.detach().cpu() if hasattr(value, "detach") else value


def _named(row: object, inputs: Sequence[Input], where: str) -> Mapping[str, object]:
    if isinstance(row, Mapping):
        arrays = {entry.name: row[entry.name] for entry in inputs if entry.name in row}
        if lacking := [entry for entry in required(inputs) if entry.name not in arrays]:
            raise DataError(
                f"{where} has {', '.join(map(str, row)) or 'nothing'}, expected also {lacking[0]}; rename what holds it"
            )
        return arrays
    values = row if isinstance(row, tuple | list) else (row,)
    if len(values) < len(required(inputs)):
        raise DataError(
            f"{where} has {len(values)} values, expected one for each of {', '.join(map(str, inputs))}; give them in "
            "this order, or by name"
        )
    return {entry.name: value for entry, value in zip(required(inputs), values, strict=False)}


def _array(value: Any, entry: Input, where: str) -> NDArray[Any]:
    try:
        tensor = _without_gradient(value)
        # TensorFlow tensors convert themselves.
        array = np.asarray(tensor.numpy() if hasattr(tensor, "numpy") else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: {entry.name!r} of type {type(value).__name__} is no array: {str(error)[:200]}; make it one"
        ) from error
    if entry.shape is not None and entry.batched and array.ndim == len(entry.shape) - 1:
        array = array[None]
    return cast(array, entry)


# Map-style data sets: each item is read once, when it is first needed.

# An augmentation that changes every second item goes unnoticed once in 2**8 = 256 times.
_TWICE = 8


@dataclass(frozen=True, eq=False)
class CachedDataset:
    """Items of a map-style object, each of which is one sample.

    Each item is read once, when it is first needed, and kept in a folder for later passes.

    Attributes:
        rows: the object.
        places: the index in the object, by position.
        inputs: checked against each sample.
        folder: an empty folder.
        as_given: whether dicts of arrays are already samples.
    """

    rows: RandomAccess
    places: Sequence[int]
    inputs: Sequence[Input]
    folder: Path
    as_given: bool = False
    # The object may not be thread-safe.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _labels: dict[int, Labels] = field(default_factory=dict, init=False, repr=False)

    def read(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at some positions.

        Raises:
            DataError: an item cannot be read, does not fit, or is not exactly one sample.
            OutputError: the folder has no space left.
        """
        for position in positions:
            with self._lock:
                sample = self._sample(position)
            yield sample

    def labels(self, position: int) -> Labels:
        """Return the class numbers of the sample at a position, which is read if it was not yet."""
        if position not in self._labels:
            with self._lock:
                self._item(position)
        return self._labels[position]

    def stays(self) -> bool:
        """Read some items twice and return whether each is one sample, equal both times."""
        for position in evenly_spaced_indices(len(self.places), _TWICE):
            once, again = self._item(position), self._item(position)
            if len(once) != 1 or len(again) != 1 or not _equal(once[0], again[0]):
                return False
            self._keep(position, once[0])
        return True

    def _sample(self, position: int) -> Sample:
        if (path := self.folder / f"{position}.npz").exists():
            (sample,) = spooled_part(path, "samples", "samples", self.inputs).read([0])
            return sample
        samples = self._item(position)
        if len(samples) != 1:
            raise DataError(
                f"samples, row {position} holds {len(samples)} samples, expected one as in other rows; give an "
                "iterator of the rows instead"
            )
        self._keep(position, samples[0])
        return samples[0]

    def _item(self, position: int) -> list[Sample]:
        """Read one item, which may be a batch of samples."""
        where = f"samples, row {position}"
        with wrap_plugin_errors(where, DataError):
            row = self.rows[self.places[position]]
        items = list(samples_of_row(row, self.inputs, where, as_given=self.as_given))
        self._labels[position] = items[0][1] if items else ()
        samples = [checked(sample, self.inputs, f"samples, sample {position}") for sample, _ in items]
        return [{name: _plain(value) for name, value in sample.items()} for sample in samples]

    def _keep(self, position: int, sample: Sample) -> None:
        try:
            # A sample that is cut off, by a full disk, is not kept.
            write_sample(self.folder / "unfinished", sample)
            (self.folder / "unfinished").rename(self.folder / f"{position}.npz")
        except OSError as error:
            raise OutputError(
                f"samples cannot be stored in {self.folder}: {error.strerror}; free disk space there, or set TMPDIR to "
                "another folder"
            ) from error


def _plain(value: NDArray[Any] | np.generic) -> NDArray[Any]:
    """Return an array without Python objects: strings get a fixed-width dtype."""
    return np.asarray(value.astype(str) if value.dtype.hasobject else value)


def write_sample(path: Path, sample: Mapping[str, NDArray[Any]]) -> None:
    """Write a sample to an ``.npz`` file, array by array."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in sample.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, _plain(value), allow_pickle=False)


def _equal(first: Sample, second: Sample) -> bool:
    return first.keys() == second.keys() and all(
        (value.dtype, value.shape, value.tobytes()) == (second[name].dtype, second[name].shape, second[name].tobytes())
        for name, value in first.items()
    )


# Samples that can be read only once, or slowly: they are written to a temporary folder.

Named = tuple[str, Sample, Labels]
"""The sequence that a sample belongs to, the sample, and its class numbers."""


def spool(
    samples: Iterable[Named], inputs: Sequence[Input], folder: Path, most: int, *, of_files: bool = False
) -> list[SampleFile]:
    """Write at most `most` samples to an empty folder; `of_files` if the sequences are the files that hold them."""
    parts = []
    for index, (sequence, sample, labels) in enumerate(islice(samples, most)):
        where, path = f"{sequence}, sample {index}", folder / f"{index}.npz"
        write_sample(path, checked(sample, inputs, where))
        parts.append(spooled_part(path, where, sequence, inputs, sequence if of_files else "").labelled(labels))
    return parts
