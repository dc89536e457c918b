"""Open what ``--calib`` and ``--data`` accept as one data set of checked samples."""

from __future__ import annotations

import math
import threading
import weakref
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from typing import Any, TypeAlias
from typing import cast as typed

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import Origin, RandomAccess, evenly_spaced_indices, is_random_access, picked
from onnxq.data.files import (
    TEXT_ADVICE,
    SampleFile,
    as_sample,
    class_numbers,
    files_below,
    is_read,
    open_file,
    spooled_part,
    stack_size,
    suffixes,
    walk,
    with_labels,
)
from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, Sample, SampleSource, cast, checked, model_inputs, required
from onnxq.data.sources import Source, check_not_removed, does_take, find_source, has_suffix, source_for
from onnxq.data.stores import Location, check_there, location
from onnxq.errors import DataError, OutputError
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.publish import staging

Labels: TypeAlias = tuple[int, ...]
"""The class numbers of a sample, one for each of its rows; empty if there are none."""

LABELS = ("labels", "label")
"""Keys of labels in a row."""


def samples_of(row: object, inputs: Sequence[Input], where: str) -> Iterator[Sample]:
    """Yield the samples of a row: one, or all that are stacked in it.

    A mapping is matched by input name; other keys are left out. A tuple or list gives the inputs in the model's order;
    further values are left out. Anything else is the one input. `labelled_samples_of` also returns labels.

    Tensors become arrays of the type of the input, see `onnxq.data.inputs.cast`. A missing batch axis is added.

    Args:
        row: a mapping, a tuple, or an array or tensor.
        inputs: the inputs of the model.
        where: the name of the row in errors.

    Raises:
        DataError: an input has no value, or its value is not an array.

    >>> entry = Input("x", np.dtype(np.float32), ("N", 2))
    >>> [sample["x"].tolist() for sample in samples_of((np.ones((2, 2)), [0, 1]), [entry], "batch 0")]
    [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    return (sample for sample, _ in labelled_samples_of(row, inputs, where))


def labelled_samples_of(row: object, inputs: Sequence[Input], where: str) -> Iterator[tuple[Sample, Labels]]:
    """Yield the samples of a row, see `samples_of`, each with its class numbers.

    Labels are whole numbers under the key ``labels`` or ``label`` of a mapping, or the one value behind the inputs of a
    tuple or list, one for each sample; other values there are no labels.

    Raises:
        DataError: see `samples_of`.
    """
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


def _labels(row: object, inputs: Sequence[Input]) -> Labels:
    value: Any = None
    if isinstance(row, Mapping):
        value = next((row[name] for name in _label_names(inputs) if name in row), None)
    elif isinstance(row, tuple | list) and len(row) == len(required(inputs)) + 1:
        value = row[-1]
    value = value.detach().cpu() if hasattr(value, "detach") else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return ()
    is_list = array.ndim == 0 or array.size == len(array)
    return tuple(array.reshape(-1).tolist()) if is_list and array.dtype.kind in "iu" else ()


def _label_names(inputs: Sequence[Input]) -> list[str]:
    names = {entry.name for entry in inputs}
    return [name for name in LABELS if name not in names]


def is_sample(row: object, inputs: Sequence[Input]) -> bool:
    """Return whether a row is a dict of arrays without labels, which is already a sample."""
    return (
        isinstance(row, Mapping)
        and all(isinstance(value, np.ndarray | np.generic) for value in row.values())
        and not any(name in row for name in _label_names(inputs))
    )


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
        # PyTorch tensors, also on other devices and with gradients; TensorFlow tensors convert themselves.
        value = value.detach().cpu() if hasattr(value, "detach") else value
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: {entry.name!r} of type {type(value).__name__} is no array: {str(error)[:200]}; make it one"
        ) from error
    if entry.shape is not None and entry.batched and array.ndim == len(entry.shape) - 1:
        array = array[None]
    return cast(array, entry)


# Rows joined into batches.


def _single_rows(inputs: Sequence[Input], batch: int) -> tuple[Input, ...]:
    """Return the inputs with a first dimension of 1, for rows that the model will be run with `batch` at a time."""
    rows = []
    for entry in inputs:
        if not entry.shape or (isinstance(entry.shape[0], int) and entry.shape[0] != batch):
            raise DataError(
                f"input {entry} cannot be run with {batch} rows, expected an open first dimension or {batch}; leave "
                "the batch out"
            )
        rows.append(replace(entry, shape=(1, *entry.shape[1:])))
    return tuple(rows)


def in_batches(parts: Sequence[SampleFile], inputs: Sequence[Input], batch: int) -> list[SampleFile]:
    """Join the rows of parts into samples of `batch` rows; each result names the part of its first row.

    The last sample holds the remaining rows. If the first dimensions of the model are fixed, these rows are dropped.

    Args:
        parts: each sample is one row.
        inputs: the inputs of the model.
        batch: rows of a sample.
    """
    rows = sum(part.count for part in parts)
    is_constant = any(entry.shape is not None and entry.shape[0] == batch for entry in inputs)
    end = rows - rows % batch if is_constant else rows
    batches, begun, behind = [], 0, 0
    for place, part in enumerate(parts):
        behind += part.count
        last = min(behind, end)
        count = -((begun - last) // batch)
        if count <= 0:
            continue
        first, spanned, spanned_rows = begun - (behind - part.count), [part], part.count
        while spanned_rows < min(first + count * batch, end - behind + part.count):
            spanned.append(parts[place + len(spanned)])
            spanned_rows += spanned[-1].count
        read = _Rows(tuple(spanned), first, batch)
        batches.append(SampleFile(part.where, part.sequence, count, read, file=part.file, labels=read.labels))
        begun += count * batch
    return batches


@dataclass(frozen=True)
class _Rows:
    """Reads samples of `batch` rows; `first` is the row of `parts` at which the first sample begins."""

    parts: tuple[SampleFile, ...]
    first: int
    batch: int

    def __call__(self, indices: Sequence[int]) -> Iterator[Sample]:
        for index in indices:
            yield self._joined(self.first + index * self.batch)

    def labels(self, index: int) -> Labels:
        """Return the class numbers of the rows of a sample."""
        spans = list(self._spans(self.first + index * self.batch))
        labels = [part.labels(place) for part, inside in spans for place in inside]
        return tuple(chain.from_iterable(labels)) if all(labels) else ()

    def _joined(self, start: int) -> Sample:
        rows = list(chain.from_iterable(part.read(inside) for part, inside in self._spans(start)))
        where = self.parts[0].where
        for row in rows:
            if row.keys() != rows[0].keys():
                raise DataError(f"{where} lacks inputs that other rows have, expected the same ones in all; add them")
            for name, array in row.items():
                if array.shape != (1, *rows[0][name].shape[1:]):
                    raise DataError(
                        f"{where}: rows of {name!r} have shapes {list(rows[0][name].shape)} and {list(array.shape)}, "
                        "expected one row of the same shape; leave the batch out, or set it to 1"
                    )
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _spans(self, start: int) -> Iterator[tuple[SampleFile, range]]:
        before = 0
        for part in self.parts:
            if before >= start + self.batch:
                break
            inside = range(max(start - before, 0), min(start - before + self.batch, part.count))
            if inside:
                yield part, inside
            before += part.count


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
        where: the name of the object in errors.
        as_given: whether dicts of arrays are already samples.
        folder: an empty folder; None keeps nothing.
    """

    rows: RandomAccess
    places: Sequence[int]
    inputs: tuple[Input, ...]
    where: str = "samples"
    as_given: bool = False
    folder: Path | None = None
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
        if self.folder is not None and (path := self.folder / f"{position}.npz").exists():
            (sample,) = spooled_part(path, self.where, self.where, self.inputs).read([0])
            return sample
        samples = self._item(position)
        if len(samples) != 1:
            raise DataError(
                f"{self.where}, row {position} holds {len(samples)} samples, expected one as in other rows; give "
                "an iterator of the rows instead"
            )
        self._keep(position, samples[0])
        return samples[0]

    def _item(self, position: int) -> list[Sample]:
        """Read one item, which may be a batch of samples."""
        where = f"{self.where}, row {position}"
        with wrap_plugin_errors(where, DataError):
            row = self.rows[self.places[position]]
        is_given = self.as_given and is_sample(row, self.inputs)
        items = [(row, ())] if is_given else list(labelled_samples_of(row, self.inputs, where))
        self._labels[position] = items[0][1] if items else ()
        samples = [checked(sample, self.inputs, f"{self.where}, sample {position}") for sample, _ in items]
        return [{name: plain(value) for name, value in sample.items()} for sample in samples]

    def _keep(self, position: int, sample: Sample) -> None:
        if self.folder is None:
            return
        try:
            # A sample that is cut off, by a full disk, is not kept.
            write_sample(self.folder / "unfinished", sample)
            (self.folder / "unfinished").rename(self.folder / f"{position}.npz")
        except OSError as error:
            raise OutputError(
                f"samples cannot be stored in {self.folder}: {error.strerror}; free disk space there, or set TMPDIR to "
                "another folder"
            ) from error


def plain(value: NDArray[Any] | np.generic) -> NDArray[Any]:
    """Return an array without Python objects: strings get a fixed-width dtype."""
    return np.asarray(value.astype(str) if value.dtype.hasobject else value)


def write_sample(path: Path, sample: Mapping[str, NDArray[Any]]) -> None:
    """Write a sample to an ``.npz`` file, array by array."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in sample.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, plain(value), allow_pickle=False)


def _equal(first: Sample, second: Sample) -> bool:
    return first.keys() == second.keys() and all(
        (value.dtype, value.shape, value.tobytes()) == (second[name].dtype, second[name].shape, second[name].tobytes())
        for name, value in first.items()
    )


# Samples that can be read only once, or slowly: they are written to a temporary folder.

Named = tuple[str, Mapping[str, Any], Labels]
"""The sequence that a sample belongs to, the sample, and its class numbers."""


def _spool(
    samples: Iterable[Named], inputs: Sequence[Input], folder: Path, most: int, *, of_files: bool = False
) -> list[SampleFile]:
    """Write at most `most` samples to an empty folder; `of_files` if the sequences are the files that hold them."""
    parts = []
    for index, (sequence, sample, labels) in enumerate(islice(samples, most)):
        where = f"{sequence}, sample {index}"
        path = folder / f"{index}.npz"
        write_sample(path, checked(sample, inputs, where))
        part = spooled_part(path, where, sequence, inputs, sequence if of_files else "")
        parts.append(with_labels(part, labels))
    return parts


def _from_rows(
    rows: Iterable[Any] | RandomAccess,
    inputs: Sequence[Input],
    share: int | None,
    where: str,
    *,
    as_given: bool = False,
) -> Iterator[Named]:
    """Yield the samples of rows, see `samples_of`; with `share` and a length, those of evenly spaced rows.

    Dicts of arrays are already samples if `as_given`.
    """
    chosen: Any = rows
    each = None
    if is_random_access(rows):
        # Iteration by index may never raise IndexError.
        chosen = map(rows.__getitem__, range(len(rows)))
    if share is not None and isinstance(rows, Sized) and len(rows):
        places = evenly_spaced_indices(len(rows), share)
        each = math.ceil(share / len(places))
        chosen = map(rows.__getitem__, places) if hasattr(rows, "__getitem__") else picked(chosen, places)
    for number, row in enumerate(chosen):
        is_given = as_given and is_sample(row, inputs)
        samples = iter([(row, ())]) if is_given else labelled_samples_of(row, inputs, f"{where}, row {number}")
        yield from ((where, sample, labels) for sample, labels in islice(samples, each))


def _item_parts(
    rows: object, inputs: Sequence[Input], share: int | None, folder: Path, *, as_given: bool = False
) -> list[SampleFile]:
    """Return the rows of an object with random access as a part; each row is read when it is first needed.

    The list is empty if rows hold several samples or differ between two reads, as in a data set with augmentation.
    """
    if not isinstance(rows, RandomAccess) or not len(rows):
        return []
    places = range(len(rows)) if share is None else evenly_spaced_indices(len(rows), share)
    kept = CachedDataset(rows, places, tuple(inputs), as_given=as_given, folder=folder)
    if not kept.stays():
        return []
    return [SampleFile("samples", "samples", len(places), kept.read, labels=kept.labels)]


def _rows_of(
    source: Source, origin: object, inputs: Sequence[Input], images: ImageOptions, where: str
) -> Iterable[object]:
    with wrap_plugin_errors(f"{where}: source {type(source).__name__}", DataError):
        return source.rows(origin, inputs, images)


def _from_source(
    source: Source, rows: Iterable[object], inputs: Sequence[Input], share: int | None, where: str
) -> Iterator[Named]:
    with wrap_plugin_errors(f"{where}: source {type(source).__name__}", DataError):
        yield from _from_rows(rows, inputs, share, where)


def _from_files(
    source: Source, place: Location, inputs: Sequence[Input], images: ImageOptions, share: int | None
) -> Iterator[Named]:
    """Yield the samples of the files below `place` that a source takes; with `share`, some of evenly spaced files."""
    files = [file for file in files_below(place) if does_take(source, file)]
    if not files:
        raise DataError(f"{place} holds no files that {source} takes; name another source, complete it, or add samples")
    each = None
    if share is not None:
        files = [files[index] for index in evenly_spaced_indices(len(files), share)]
        each = math.ceil(share / len(files))
    for file in files:
        rows = _rows_of(source, file, inputs, images, str(file))
        yield from islice(_from_source(source, rows, inputs, each, str(file)), each)


# The data set that users open.

__all__ = ["ImageOptions", "Input", "Sample", "Samples", "evenly", "model_inputs", "open_samples"]

MOST_SAMPLES = 1_000_000
"""Maximum number of samples. More would run for hours, and usually mean that an axis is not the batch axis."""


class Samples:
    """A re-iterable stream of checked samples, with the same samples in the same order in each iteration.

    Attributes:
        truncated: whether a limit left samples out.
    """

    def __init__(
        self, parts: Sequence[SampleFile], inputs: Sequence[Input], places: Sequence[int], *, truncated: bool = False
    ) -> None:
        """Take the samples of `parts` at rising `places`."""
        self.truncated = truncated
        self._parts = tuple(parts)
        self._inputs = tuple(inputs)
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sample]:
        return self.read_samples(range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        """Read one sample and no other.

        Raises:
            IndexError: There is no sample with this index.
            DataError: The sample cannot be read, or does not fit.
        """
        (sample,) = self.read_samples([range(len(self))[index]])
        return sample

    def read_samples(self, indices: Sequence[int]) -> Iterator[Sample]:
        """Read and check the samples at rising `indices`, one by one.

        Raises:
            DataError: A sample cannot be read or does not fit, or a file has become shorter.
        """
        first = done = 0
        for part in self._parts:
            end = bisect_left(indices, first + part.count, lo=done, key=self._places.__getitem__)
            if end > done:
                yield from part.checked([self._places[index] - first for index in indices[done:end]], self._inputs)
            first, done = first + part.count, end

    def origin(self, index: int) -> Origin:
        """Return the origin of a sample."""
        place = self._places[index]
        return Origin(place, self._parts[bisect_right(self._ends, place)].file)

    def labels(self, index: int) -> Labels:
        """Return the class numbers of a sample, one for each of its rows; empty if there are none."""
        place = self._places[index]
        part = bisect_right(self._ends, place)
        return self._parts[part].labels(place - (self._ends[part] - self._parts[part].count))

    @cached_property
    def _ends(self) -> list[int]:
        """The index after the last sample of each part."""
        return list(accumulate(part.count for part in self._parts))

    def sequences(self) -> Iterator[str]:
        """Yield the sequence of each sample: the file that it shares with others, else the folder of its file."""
        counted = (repeat(part.sequence, part.count) for part in self._parts)
        return picked(chain.from_iterable(counted), self._places)


def evenly(samples: SampleSource, most: int) -> Iterator[Sample]:
    """Yield at most `most` evenly spaced samples one by one; with random access, no others are read.

    >>> [sample["x"] for sample in evenly([{"x": index} for index in range(10)], 4)]
    [0, 3, 6, 9]
    """
    return picked(samples, evenly_spaced_indices(len(samples), most))


def is_truncated(samples: SampleSource) -> bool:
    """Return whether a limit left samples out; a list has no limit.

    >>> is_truncated([{"x": 0}])
    False
    """
    return bool(getattr(samples, "truncated", False))


def open_samples(
    origin: object,
    inputs: Sequence[Input],
    *,
    images: ImageOptions | None = None,
    limit: int | None = None,
    source: str | Source | None = None,
    in_order: bool = False,
    batch: int | None = None,
) -> Samples:
    """Open calibration or evaluation samples for a model with `inputs`.

    fsspec reads a path with a protocol, such as ``s3://bucket/calib``. Accepted files:

    - ``.npz``: keys are input names. A file holds N stacked samples in two cases: every array has one axis more than
      its input, or the first dimension of every input counts samples and every array has the same N > 1 there. Any
      other file is one sample. A first dimension counts samples if it is 1 or is called ``batch``, ``batch_size`` or
      ``N``. It also does if it is unnamed (``?``, ``s0``, ``unk__12``) and all inputs and outputs of the model begin
      with an open dimension; see `onnxq.data.inputs.open_batch`. If an unnamed dimension is a length instead, store
      ``array[None]``: an additional axis always counts samples. Of several files, each is one sample if the first
      dimension is open: the model is run with all rows of the file. A file above `LARGEST_BATCH` is always a stack.
    - ``.npy``: for models with one input; stacked in the same manner.
    - ``.png``, ``.jpg`` and other images: for models with one image input; needs Pillow.

    Accepted folders, with any nesting, read in natural order of the names (``2`` before ``10``), other files ignored:

    - a folder of these files, each with whole samples;
    - a folder with ``input_0.pb``, ``input_1.pb``, ... is one sample in ONNX's test data layout. It is matched by
      tensor name if all names are inputs of the model, else by position;
    - for models with several inputs, a folder with ``NAME.npy`` or image files ``NAME.png`` is one sample, one file
      per input;
    - else a folder of files that a source reads, such as ``.wav``; see `onnxq.data.sources`.

    Accepted objects:

    - a list or tuple of dicts of arrays is used unchanged;
    - an iterable of dicts, or of rows that `onnxq.data.samples.samples_of` takes, such as a DataLoader. It is iterated
      once, because it may shuffle, draw at random or end after one pass. So are the rows of a source;
    - an object with ``__len__`` and ``__getitem__`` that cannot be iterated, or that a source returns. Each row is read
      when it is first needed, if rows are single samples and stay the same.

    Samples of iterables, sources and objects with ``__getitem__`` are kept in a temporary folder. It is removed with
    the returned object.

    Args:
        origin: A file, a folder, an iterable, or an object that a source takes.
        inputs: See `model_inputs`.
        images: How pixels become the input; None takes the defaults.
        limit: Use at most `limit` samples. They are evenly spaced over files and objects with a length, else the first.
        source: What reads files or an object, or its name with options such as ``audio:rate=8000``; None finds it.
        in_order: Take the first samples, because samples continue each other or labels depend on the order.
        batch: How many rows the model is run with. Rows of all files are joined in order; the last sample may hold
            fewer. None runs several files with all rows of each, else single rows.

    Raises:
        DataError: Nothing usable was found, or more than `MOST_SAMPLES`, or names, dtypes or shapes in a header do not
            fit. Values, and samples without headers, are checked when they are iterated.
        OutputError: There is no space for the temporary folder.
    """
    if limit is not None and limit < 1:
        raise DataError(f"Sample limit is {limit}, expected at least 1")
    if not inputs:
        raise DataError("The model has no inputs, expected at least one; there is nothing to feed samples to")
    images, share, wanted = images or ImageOptions(), None if in_order else limit, inputs
    if batch is not None:
        inputs, share = _single_rows(inputs, batch), share and share * batch
    named = find_source(source) if isinstance(source, str) else source
    with ExitStack() as held:

        def spooled(samples: Iterable[Named], *, of_files: bool = False) -> list[SampleFile]:
            # One sample more than allowed shows that there are too many, or that some are left out.
            most = limit if limit and not in_order else (limit or MOST_SAMPLES) + 1
            most *= batch or 1
            return _spool(samples, inputs, held.enter_context(staging(None)), most, of_files=of_files)

        def opened_already(rows: object, *, as_given: bool = False) -> list[SampleFile]:
            return _item_parts(rows, inputs, share, held.enter_context(staging(None)), as_given=as_given)

        where = "The iterable of samples"
        if isinstance(origin, str | Path):
            place, where = location(origin), str(origin)
            check_there(place)
            if named is None and source_for(place) is None:
                check_not_removed(place)
            parts = [] if named is not None else _file_parts(place, inputs, images, share, together=batch is None)
            if not parts:
                source_of = named or _source_below(place, inputs)
                parts = spooled(_from_files(source_of, place, inputs, images, share), of_files=True)
        elif taken := named or source_for(origin):
            rows = _rows_of(taken, origin, inputs, images, "samples")
            parts = opened_already(rows) or spooled(_from_source(taken, rows, inputs, share, "samples"))
        elif is_random_access(origin):
            own = batch is None
            parts = opened_already(origin, as_given=own) or spooled(
                _from_rows(origin, inputs, share, "samples", as_given=own)
            )
        elif isinstance(origin, Mapping) or not isinstance(origin, Iterable):
            raise DataError(
                f"Samples are {type(origin).__name__}, expected a path or an iterable of dicts; "
                "wrap a single sample as [sample]"
            )
        # A subclass of list may override iteration.
        elif batch is None and type(origin) in (list, tuple) and all(is_sample(row, inputs) for row in origin):
            where, parts = "The list of samples", [_given(typed(Sequence[Sample], origin))]
        else:
            check_not_removed(origin)
            parts = spooled(_from_rows(origin, inputs, share, "samples", as_given=batch is None))
        if batch is not None:
            parts = in_batches(parts, wanted, batch)
        total = sum(part.count for part in parts)
        places = range(total if limit is None else min(limit, total))
        used = places if len(places) == total or in_order else evenly_spaced_indices(total, len(places))
        samples = Samples(parts, wanted, used, truncated=len(used) < total)
        if not len(samples):
            raise DataError(f"{where} holds no samples, expected at least one; add samples")
        if len(samples) > MOST_SAMPLES:
            raise DataError(
                f"{where} holds {len(samples)} samples, expected at most {MOST_SAMPLES}; check which axis counts the "
                "samples, or use some of them, such as --limit 500"
            )
        weakref.finalize(samples, held.pop_all().close)
    return samples


def _given(samples: Sequence[Sample]) -> SampleFile:
    return SampleFile("samples", "samples", len(samples), partial(_read_list, samples, len(samples)))


def _read_list(samples: Sequence[Sample], count: int, indices: Sequence[int]) -> Iterator[Sample]:
    if len(samples) != count:
        raise DataError(f"The list of samples now has {len(samples)}, expected {count} as when opened; keep it so")
    return (samples[index] for index in indices)


def _file_parts(
    path: Location, inputs: Sequence[Input], images: ImageOptions, share: int | None, *, together: bool
) -> list[SampleFile]:
    if path.is_file() and not is_read(path) and source_for(path) is not None:
        return []
    rows = list(walk(path, inputs, images))
    chosen = rows if share is None else [rows[index] for index in evenly_spaced_indices(len(rows), share)]
    # One array file is a data set of rows; of several files, each is one batch for the model.
    together = together and len(rows) > 1
    classes = class_numbers(path, rows)

    def opened(file: Location | SampleFile) -> SampleFile:
        part = file if isinstance(file, SampleFile) else open_file(file, inputs, images, together=together)
        return with_labels(part, (classes[Path(part.file).parent.name],)) if classes else part

    return [opened(file) for file in chosen]


def _source_below(place: Location, inputs: Sequence[Input]) -> Source:
    sources = (source_for(file) for file in files_below(place))
    if (source := next(filter(None, sources), None)) is None:
        for file in files_below(place):
            check_not_removed(file)
        advice = "add samples for the inputs " + ", ".join(str(entry) for entry in inputs)
        if any(has_suffix(file, ".txt") for file in files_below(place)):
            advice = TEXT_ADVICE
        raise DataError(f"{place} has {suffixes(place)}, expected .npz, .npy, image or input_N.pb files; {advice}")
    return source
