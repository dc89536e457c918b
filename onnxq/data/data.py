"""What ``--calib`` and ``--data`` accept, as one re-iterable stream of checked samples."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import cast

from onnxq.data.files import Part, files_below, is_read, suffixes, walk
from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, Sample, SampleSource, model_inputs
from onnxq.data.origins import Origin
from onnxq.data.row_batches import in_batches, single_rows
from onnxq.data.rows import is_sample
from onnxq.data.sources.source import Source
from onnxq.data.sources.table import source_for, source_named
from onnxq.data.spool import Named, from_files, from_rows, from_source, item_parts, rows_of, spool
from onnxq.data.stores import Location, check_there, location
from onnxq.data.stretches import Stretch, even_places, is_random_access, picked
from onnxq.errors import DataError
from onnxq.system.publish import staging

__all__ = ["ImageOptions", "Input", "Sample", "Samples", "evenly", "model_inputs", "open_samples"]

MOST_SAMPLES = 1_000_000
"""How many samples are taken for meant; more would run for hours, and most often mean that an axis is not the batch."""


class Samples:
    """A re-iterable stream of checked samples; each iteration reads the same ones again, in the same order.

    Attributes:
        leaves_out: whether there are samples behind those that are used; known where they are used in order.
    """

    def __init__(
        self, parts: Sequence[Part], inputs: Sequence[Input], places: Sequence[int], *, leaves_out: bool = False
    ) -> None:
        """Take the samples at these places, which rise, of those that the parts hold."""
        self.leaves_out = leaves_out
        self._parts = tuple(parts)
        self._inputs = tuple(inputs)
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sample]:
        return chain.from_iterable(self.stretches(range(len(self))))

    def __getitem__(self, index: int) -> Sample:
        """Read one sample and no other.

        Raises:
            IndexError: There is none with this index.
            DataError: It cannot be read, or does not fit.
        """
        (stretch,) = self.stretches([range(len(self))[index]])
        (sample,) = stretch
        return sample

    def stretches(self, indices: Sequence[int]) -> Iterator[Stretch]:
        """Yield the samples with these indices, which rise, in a stretch for each origin; nothing is read yet."""
        first = done = 0
        for part in self._parts:
            end = bisect_left(indices, first + part.count, lo=done, key=self._places.__getitem__)
            if end > done:
                inside = indices[done:end]
                places = [self._places[index] - first for index in inside]
                yield Stretch(inside, first, part.read, self._inputs, part.where, part.stacked, part.stored, places)
            first, done = first + part.count, end

    def origin(self, index: int) -> Origin:
        """Return where a sample comes from."""
        place = self._places[index]
        return Origin(place, self._parts[bisect_right(self._ends, place)].file)

    @cached_property
    def _ends(self) -> list[int]:
        """The indices behind the last sample of each part."""
        return list(accumulate(part.count for part in self._parts))

    def sequences(self) -> Iterator[str]:
        """Yield for each sample what it continues: the file it shares with others, else the folder its file lies in."""
        counted = (repeat(part.sequence, part.count) for part in self._parts)
        return picked(chain.from_iterable(counted), self._places)


def evenly(samples: SampleSource, most: int) -> Iterator[Sample]:
    """Yield at most `most` samples, evenly spaced, without holding them; no others are read where that can be.

    >>> [sample["x"] for sample in evenly([{"x": index} for index in range(10)], 4)]
    [0, 3, 6, 9]
    """
    return picked(samples, even_places(len(samples), most))


def leaves_out(samples: SampleSource) -> bool:
    """Return whether a limit has left out samples behind those that there are; a list has no limit.

    >>> leaves_out([{"x": 0}])
    False
    """
    return bool(getattr(samples, "leaves_out", False))


def open_samples(
    given: object,
    inputs: Sequence[Input],
    *,
    images: ImageOptions | None = None,
    limit: int | None = None,
    source: str | Source | None = None,
    in_order: bool = False,
    batch: int | None = None,
) -> Samples:
    """Open calibration or evaluation samples for a model with `inputs`.

    A path with a protocol, such as ``s3://bucket/calib``, is read by fsspec. Accepted files:

    - ``.npz``: keys are input names. One sample; or N stacked samples when every array has one axis more than its
      input, or when the first dimension of every input counts samples and every array has the same N > 1 there. It does
      where it is 1, or is called ``batch``, ``batch_size`` or ``N``, or says nothing (``?``, ``s0``, ``unk__12``) and
      all inputs and outputs of the model begin with an open dimension; see `onnxq.data.batches.open_batch`. Where
      that is a length instead, store ``array[None]``: an axis more always counts samples. Of several files each is one
      sample as it is, if the first dimension is open: the model is run with the rows that a file holds. A file above
      `LARGEST_BATCH` is a stack all the same.
    - ``.npy``: for models with one input; stacked in the same way.
    - ``.png``, ``.jpg`` and other images: for models with one image input; needs Pillow.

    Accepted folders, nested at will, read in natural order of the names (``2`` before ``10``), other files ignored:

    - a folder of such files, each holding whole samples;
    - a folder with ``input_0.pb``, ``input_1.pb``, ... is one sample in ONNX's test data layout: matched by tensor
      name where all names are inputs of the model, else by position;
    - for models with several inputs, a folder with ``NAME.npy`` or image files ``NAME.png`` is one sample, one file
      per input;
    - else a folder of what one of the sources reads, such as ``.parquet``; see `onnxq.data.sources`.

    An iterable yields one sample per dict, or rows as `onnxq.data.rows.samples_of` takes them, such as those of a
    DataLoader. A list or tuple of dicts of arrays stays as it is. An object with a length whose rows are asked for by
    place, and that cannot be iterated or is given by a source, is asked for each row when it is first needed, where
    rows are single samples and stay the same. Anything else, which may shuffle, draw at random or end after one pass,
    and what sources read, is iterated once. All that was read is kept in a temporary folder that is removed with the
    returned object.

    Args:
        given: A file, a folder, an iterable, or an object that a source takes.
        inputs: See `model_inputs`.
        images: How pixels become the input; None takes the defaults.
        limit: Use at most `limit` samples, evenly spaced: of files and of what has a length from all over, else the
            first ones.
        source: What reads files or an object, or its name with options such as ``audio:rate=8000``; None finds it.
        in_order: Whether samples continue each other, or labels count on their order; the first ones are taken then.
        batch: How many rows the model is run with. Rows of all files are then taken so many at a time, in their order,
            and the last sample may hold fewer. None runs several files with the rows of each, and else single rows.

    Raises:
        DataError: Nothing usable was found, or more than `MOST_SAMPLES`, or names, dtypes or shapes in a header do not
            fit. Values are checked, and samples without headers too, when they are iterated.
        OutputError: There is no room for the temporary folder.
    """
    if limit is not None and limit < 1:
        raise DataError(f"Sample limit is {limit}, expected at least 1")
    if not inputs:
        raise DataError("The model has no inputs, expected at least one; there is nothing to feed samples to")
    images, share, wanted = images or ImageOptions(), None if in_order else limit, inputs
    if batch is not None:
        inputs, share = single_rows(inputs, batch), share and share * batch
    named = source_named(source) if isinstance(source, str) else source
    with ExitStack() as held:

        def spooled(samples: Iterable[Named], *, of_files: bool = False) -> list[Part]:
            # One more than there may be is enough to say so, where there is no end, and that some are left out.
            most = limit if limit and not in_order else (limit or MOST_SAMPLES) + 1
            most *= batch or 1
            return spool(samples, inputs, held.enter_context(staging(None)), most, of_files=of_files)

        def asked(rows: object, *, as_given: bool = False) -> list[Part]:
            return item_parts(rows, inputs, share, held.enter_context(staging(None)), as_given=as_given)

        where = "The iterable of samples"
        if isinstance(given, str | Path):
            place, where = location(given), str(given)
            check_there(place)
            parts = [] if named is not None else _file_parts(place, inputs, images, share, together=batch is None)
            if not parts:
                source_of = named or _source_below(place, inputs)
                parts = spooled(from_files(source_of, place, inputs, images, share), of_files=True)
        elif taken := named or source_for(given):
            rows = rows_of(taken, given, inputs, images, "samples")
            parts = asked(rows) or spooled(from_source(taken, rows, inputs, share, "samples"))
        elif is_random_access(given):
            own = batch is None
            parts = asked(given, as_given=own) or spooled(from_rows(given, inputs, share, "samples", as_given=own))
        elif isinstance(given, Mapping) or not isinstance(given, Iterable):
            raise DataError(
                f"Samples are {type(given).__name__}, expected a path or an iterable of dicts; "
                "wrap a single sample as [sample]"
            )
        # A subclass may iterate as it likes.
        elif batch is None and type(given) in (list, tuple) and all(map(is_sample, given)):
            where, parts = "The list of samples", [_given(cast(Sequence[Sample], given))]
        else:
            parts = spooled(from_rows(given, inputs, share, "samples", as_given=batch is None))
        if batch is not None:
            parts = in_batches(parts, wanted, batch)
        total = sum(part.count for part in parts)
        places = range(total if limit is None else min(limit, total))
        used = places if len(places) == total or in_order else even_places(total, len(places))
        samples = Samples(parts, wanted, used, leaves_out=len(used) < total)
        if not len(samples):
            raise DataError(f"{where} holds no samples, expected at least one; add samples")
        if len(samples) > MOST_SAMPLES:
            raise DataError(
                f"{where} holds {len(samples)} samples, expected at most {MOST_SAMPLES}; check which axis counts the "
                "samples, or use some of them, such as --limit 500"
            )
        weakref.finalize(samples, held.pop_all().close)
    return samples


def _given(samples: Sequence[Sample]) -> Part:
    return Part("samples", "samples", len(samples), partial(_read_list, samples, len(samples)), stored=False)


def _read_list(samples: Sequence[Sample], count: int, indices: Sequence[int]) -> Iterator[Sample]:
    if len(samples) != count:
        raise DataError(f"The list of samples now has {len(samples)}, expected {count} as when opened; keep it so")
    return (samples[index] for index in indices)


def _file_parts(
    path: Location, inputs: Sequence[Input], images: ImageOptions, share: int | None, *, together: bool
) -> list[Part]:
    """Return the parts of a file or folder, of so many files at most; none where sources read what is there."""
    if path.is_file() and not is_read(path) and source_for(path) is not None:
        return []
    found = list(walk(path, inputs, images))
    chosen = found if share is None else [found[index] for index in even_places(len(found), share)]
    # One array file is a data set of rows; several files are what the model is run with.
    return [opened(together and len(found) > 1) for opened in chosen]


def _source_below(place: Location, inputs: Sequence[Input]) -> Source:
    """Return the source of the first file that any takes."""
    known = (source_for(file) for file in files_below(place))
    if (found := next(filter(None, known), None)) is None:
        raise DataError(
            f"{place} has {suffixes(place)}, expected .npz, .npy, image or input_N.pb files, or those of a source; add "
            "samples for the inputs " + ", ".join(str(entry) for entry in inputs)
        )
    return found
