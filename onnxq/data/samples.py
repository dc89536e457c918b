"""Open what ``--calib`` and ``--data`` accept as one data set of checked samples."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np

from onnxq.data.dataset import Origin, RandomAccess, evenly_spaced_indices, is_random_access, picked
from onnxq.data.files import (
    OF_SOURCES,
    Labels,
    SampleFile,
    class_numbers,
    files_below,
    is_read,
    open_file,
    suffixes,
    walk,
)
from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, Sample, SampleSource, model_inputs
from onnxq.data.rows import CachedDataset, Named, is_sample, samples_of_row, spool
from onnxq.data.sources import Source, check_not_removed, does_take, find_source, source_for
from onnxq.data.stores import Location, check_there, location
from onnxq.errors import DataError
from onnxq.system.plugins import wrap_plugin_errors
from onnxq.system.publish import staging

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
        for part, places in groupby(map(self._places.__getitem__, indices), self._part_of):
            yield from self._parts[part].checked([place - self._begins[part] for place in places], self._inputs)

    def origin(self, index: int) -> Origin:
        """Return the origin of a sample."""
        place = self._places[index]
        return Origin(place, self._parts[self._part_of(place)].file)

    def labels(self, index: int) -> Labels:
        """Return the class numbers of a sample, one for each of its rows; empty if there are none."""
        place = self._places[index]
        part = self._part_of(place)
        return self._parts[part].labels(place - self._begins[part])

    def _part_of(self, place: int) -> int:
        """Return the index of the part that holds a place."""
        return bisect_right(self._begins, place) - 1

    @cached_property
    def _begins(self) -> list[int]:
        """The place of the first sample of each part; a part of none has that of the next."""
        return list(accumulate((part.count for part in self._parts[:-1]), initial=0))

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


# Rows joined into batches.


def _single_rows(inputs: Sequence[Input], batch: int) -> tuple[Input, ...]:
    """Return the inputs with a first dimension of 1, for rows that the model will be run with `batch` at a time."""
    single = []
    for entry in inputs:
        if not entry.shape or (isinstance(entry.shape[0], int) and entry.shape[0] != batch):
            raise DataError(
                f"input {entry} cannot be run with {batch} rows, expected an open first dimension or {batch}; leave "
                "the batch out"
            )
        single.append(replace(entry, shape=(1, *entry.shape[1:])))
    return tuple(single)


def in_batches(parts: Sequence[SampleFile], inputs: Sequence[Input], batch: int) -> list[SampleFile]:
    """Join the rows of parts into samples of `batch` rows; each result names the part of its first row.

    The last sample holds the remaining rows. If the first dimensions of the model are fixed, these rows are dropped.

    Args:
        parts: each sample is one row.
        inputs: the inputs of the model.
        batch: rows of a sample.
    """
    count = sum(part.count for part in parts)
    rows = Samples(parts, _single_rows(inputs, batch), range(count))
    is_constant = any(entry.shape is not None and entry.shape[0] == batch for entry in inputs)
    starts = range(0, count - count % batch if is_constant else count, batch)
    batches = []
    for index, begun in groupby(starts, rows._part_of):
        part, joined = parts[index], _Batches(rows, tuple(begun), batch, parts[index].where)
        batches.append(replace(part, count=len(joined.starts), read=joined.read, stacked=True, labels=joined.labels))
    return batches


@dataclass(frozen=True)
class _Batches:
    """Reads samples of `batch` rows that begin at `starts`."""

    rows: Samples
    starts: Sequence[int]
    batch: int
    where: str

    def _span(self, index: int) -> range:
        return range(self.starts[index], min(self.starts[index] + self.batch, len(self.rows)))

    def read(self, indices: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at some indices."""
        return (self._joined(list(self.rows.read_samples(self._span(index)))) for index in indices)

    def labels(self, index: int) -> Labels:
        """Return the class numbers of the rows of a sample."""
        labels = list(map(self.rows.labels, self._span(index)))
        return tuple(chain.from_iterable(labels)) if all(labels) else ()

    def _joined(self, rows: Sequence[Sample]) -> Sample:
        for row in rows:
            if row.keys() != rows[0].keys():
                raise DataError(
                    f"{self.where} lacks inputs that other rows have, expected the same ones in all; add them"
                )
            for name, array in row.items():
                if array.shape != (1, *rows[0][name].shape[1:]):
                    raise DataError(
                        f"{self.where}: rows of {name!r} have shapes {list(rows[0][name].shape)} and "
                        f"{list(array.shape)}, expected one row of the same shape; leave the batch out, or set it to 1"
                    )
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


# The data set that users open.


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
    - an iterable of dicts, or of rows that `onnxq.data.rows.samples_of_row` takes, such as a DataLoader. It is iterated
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
    share, single = None if in_order else limit, inputs
    # One sample more than allowed shows that there are too many, or that some are left out.
    most = limit if limit and not in_order else (limit or MOST_SAMPLES) + 1
    if batch is not None:
        single, share, most = _single_rows(inputs, batch), share and share * batch, most * batch
    with ExitStack() as held:
        opening = _Opening(single, images or ImageOptions(), share, most, batch is None, held)
        where, parts = opening.parts(origin, find_source(source) if isinstance(source, str) else source)
        if batch is not None:
            parts = in_batches(parts, inputs, batch)
        total = sum(part.count for part in parts)
        places = range(total if limit is None else min(limit, total))
        used = places if len(places) == total or in_order else evenly_spaced_indices(total, len(places))
        samples = Samples(parts, inputs, used, truncated=len(used) < total)
        if not len(samples):
            raise DataError(f"{where} holds no samples, expected at least one; add samples")
        if len(samples) > MOST_SAMPLES:
            raise DataError(
                f"{where} holds {len(samples)} samples, expected at most {MOST_SAMPLES}; check which axis counts the "
                "samples, or use some of them, such as --limit 500"
            )
        weakref.finalize(samples, held.pop_all().close)
    return samples


@dataclass(frozen=True)
class _Opening:
    """How an origin of samples is opened.

    Attributes:
        inputs: each sample fits these.
        images: how pixels become the input.
        share: number of samples that are enough, taken evenly spaced; None takes all.
        most: number of samples that are read of an origin without a length.
        as_given: whether dicts of arrays are already samples, and files are run with all of their rows.
        held: holds the temporary folders.
    """

    inputs: Sequence[Input]
    images: ImageOptions
    share: int | None
    most: int
    as_given: bool
    held: ExitStack

    def parts(self, origin: Any, source: Source | None) -> tuple[str, list[SampleFile]]:
        """Return the samples of an origin, which a source reads if one is named or found, and its name in errors."""
        if isinstance(origin, str | Path):
            return str(origin), self._of_place(location(origin), source)
        if taken := source or source_for(origin):
            rows = self._rows_of(taken, origin, "samples")
            return _ITERABLE, replace(self, as_given=False)._of_object(rows, taken)
        if is_random_access(origin):
            return _ITERABLE, self._of_object(origin)
        if isinstance(origin, Mapping) or not isinstance(origin, Iterable):
            raise DataError(
                f"Samples are {type(origin).__name__}, expected a path or an iterable of dicts; "
                "wrap a single sample as [sample]"
            )
        # A subclass of list may override iteration.
        if self.as_given and type(origin) in (list, tuple) and all(is_sample(row, self.inputs) for row in origin):
            return "The list of samples", [_of_list(cast(Sequence[Sample], origin))]
        check_not_removed(origin)
        return _ITERABLE, self._spooled(self._of_rows(origin, "samples"))

    def _of_place(self, place: Location, source: Source | None) -> list[SampleFile]:
        check_there(place)
        if source is None:
            if source_for(place) is None:
                check_not_removed(place)
            if parts := self._files(place):
                return parts
        return self._spooled(self._of_files(source or self._source_below(place), place), of_files=True)

    def _files(self, place: Location) -> list[SampleFile]:
        """Return the samples of the files that need no source."""
        if place.is_file() and not is_read(place) and source_for(place) is not None:
            return []
        files = list(walk(place, self.inputs, self.images))
        # One array file is a data set of rows; of several files, each is one batch for the model.
        together = self.as_given and len(files) > 1
        classes = class_numbers(place, files)
        parts = []
        for file in self._chosen(files):
            is_open = isinstance(file, SampleFile)
            part = file if is_open else open_file(file, self.inputs, self.images, together=together)
            parts.append(part.labelled((classes[Path(part.file).parent.name],)) if classes else part)
        return parts

    def _chosen(self, files: list[Any]) -> list[Any]:
        if self.share is None:
            return files
        return [files[index] for index in evenly_spaced_indices(len(files), self.share)]

    def _of_files(self, source: Source, place: Location) -> Iterator[Named]:
        """Yield the samples of the files below `place` that a source takes."""
        files = [file for file in files_below(place) if does_take(source, file)]
        if not files:
            raise DataError(
                f"{place} holds no files that {source} takes; name another source, complete it, or add samples"
            )
        chosen = self._chosen(files)
        each = None if self.share is None else math.ceil(self.share / len(chosen))
        of_one = replace(self, share=each, as_given=False)
        for file in chosen:
            rows = self._rows_of(source, file, str(file))
            yield from islice(of_one._of_rows(rows, str(file), source), each)

    def _rows_of(self, source: Source, origin: object, where: str) -> Iterable[object]:
        with _wrapped(source, where):
            return source.rows(origin, self.inputs, self.images)

    def _of_rows(self, rows: Any, where: str, source: Source | None = None) -> Iterator[Named]:
        """Yield the samples of rows; with a share and a length, those of evenly spaced rows."""
        with nullcontext() if source is None else _wrapped(source, where):
            chosen, each, share = rows, None, self.share
            if is_random_access(rows):
                # Iteration by index may never raise IndexError.
                chosen = map(rows.__getitem__, range(len(rows)))
            if share is not None and isinstance(rows, Sized) and len(rows):
                places = evenly_spaced_indices(len(rows), share)
                each = math.ceil(share / len(places))
                chosen = map(rows.__getitem__, places) if hasattr(rows, "__getitem__") else picked(chosen, places)
            for number, row in enumerate(chosen):
                samples = samples_of_row(row, self.inputs, f"{where}, row {number}", as_given=self.as_given)
                yield from ((where, sample, labels) for sample, labels in islice(samples, each))

    def _of_object(self, rows: object, source: Source | None = None) -> list[SampleFile]:
        """Return the rows of an object: with random access, each is read when it is first needed.

        Rows are read from the first to the last if they hold several samples, or differ between two reads, as in a data
        set with augmentation.
        """
        if isinstance(rows, RandomAccess) and len(rows):
            places = range(len(rows)) if self.share is None else evenly_spaced_indices(len(rows), self.share)
            kept = CachedDataset(rows, places, self.inputs, self._folder(), self.as_given)
            if kept.stays():
                return [SampleFile("samples", "samples", len(places), kept.read, labels=kept.labels)]
        return self._spooled(self._of_rows(rows, "samples", source))

    def _spooled(self, samples: Iterable[Named], *, of_files: bool = False) -> list[SampleFile]:
        return spool(samples, self.inputs, self._folder(), self.most, of_files=of_files)

    def _folder(self) -> Path:
        return self.held.enter_context(staging(None))

    def _source_below(self, place: Location) -> Source:
        sources = (source_for(file) for file in files_below(place))
        if (source := next(filter(None, sources), None)) is None:
            for file in files_below(place):
                check_not_removed(file)
            raise DataError(
                f"{place} has {suffixes(place)}, expected .npz, .npy, images, input_N.pb, {OF_SOURCES}; add samples "
                "for the inputs " + ", ".join(str(entry) for entry in self.inputs)
            )
        return source


_ITERABLE = "The iterable of samples"


def _wrapped(source: Source, where: str) -> AbstractContextManager[None]:
    return wrap_plugin_errors(f"{where}: source {type(source).__name__}", DataError)


def _of_list(samples: Sequence[Sample]) -> SampleFile:
    count = len(samples)

    def read(indices: Sequence[int]) -> Iterator[Sample]:
        if len(samples) != count:
            raise DataError(f"The list of samples now has {len(samples)}, expected {count} as when opened; keep it so")
        return (samples[index] for index in indices)

    return SampleFile("samples", "samples", count, read)
