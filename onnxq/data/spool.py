"""Samples that come only once, or slowly: chosen, and kept in a temporary folder as they come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from onnxq.data.files import Part, files_below, spooled_part
from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, check_sample
from onnxq.data.items import Items, Kept, write_sample
from onnxq.data.rows import is_sample, samples_of
from onnxq.data.sources.source import Source
from onnxq.data.sources.table import does_take
from onnxq.data.stores import Location
from onnxq.data.stretches import RandomAccess, even_places, is_random_access, picked
from onnxq.errors import DataError
from onnxq.system.extensions import blamed

Named = tuple[str, Mapping[str, Any]]
"""What a sample continues, and the sample."""


def spool(
    samples: Iterable[Named], inputs: Sequence[Input], folder: Path, most: int, *, of_files: bool = False
) -> list[Part]:
    """Write samples to a folder and return them as parts.

    Args:
        samples: each with what it continues.
        inputs: what they have to fit.
        folder: an empty one.
        most: after so many no more is asked for.
        of_files: whether what they continue are the files that hold them.

    Raises:
        DataError: a sample does not fit.
    """
    parts = []
    for index, (sequence, sample) in enumerate(islice(samples, most)):
        where = f"{sequence}, sample {index}"
        check_sample(sample, inputs, where)
        path = folder / f"{index}.npz"
        write_sample(path, sample)
        parts.append(spooled_part(path, where, sequence, inputs, sequence if of_files else ""))
    return parts


def from_rows(
    rows: Iterable[Any] | RandomAccess,
    inputs: Sequence[Input],
    share: int | None,
    where: str,
    *,
    as_given: bool = False,
) -> Iterator[Named]:
    """Yield the samples of rows, and where their number is known, of some from all over.

    Args:
        rows: what `samples_of` takes.
        inputs: what the model wants.
        share: how many samples are wanted; None takes all.
        where: what errors call them, and what the samples continue.
        as_given: whether dictionaries of arrays are samples as they are, to which nothing is added or left out.
    """
    chosen: Any = rows
    each = None
    if is_random_access(rows):
        # It may never say that it has come to its end.
        chosen = map(rows.__getitem__, range(len(rows)))
    if share is not None and isinstance(rows, Sized) and len(rows):
        places = even_places(len(rows), share)
        each = math.ceil(share / len(places))
        chosen = map(rows.__getitem__, places) if hasattr(rows, "__getitem__") else picked(chosen, places)
    for number, row in enumerate(chosen):
        found = iter([row]) if as_given and is_sample(row) else samples_of(row, inputs, f"{where}, row {number}")
        yield from ((where, sample) for sample in islice(found, each))


def item_parts(
    rows: object, inputs: Sequence[Input], share: int | None, folder: Path, *, as_given: bool = False
) -> list[Part]:
    """Return the rows of an object with random access as a part, each read when it is needed; see `from_rows`.

    None where rows hold several samples or differ each time they are read, as those of a data set that augments do.

    Args:
        rows: the object.
        inputs: see `from_rows`, as for the others.
        share: see there.
        folder: an empty one, where what is read is kept.
        as_given: see there.

    Raises:
        DataError: a row cannot be read or does not fit.
        OutputError: there is no room in the folder.
    """
    if not isinstance(rows, RandomAccess) or not len(rows):
        return []
    places = range(len(rows)) if share is None else even_places(len(rows), share)
    kept = Kept(Items(rows, places, tuple(inputs), "samples", as_given), folder)
    if not kept.stays():
        return []
    return [Part("samples", "samples", len(places), kept, stored=False)]


def rows_of(
    source: Source, given: object, inputs: Sequence[Input], images: ImageOptions, where: str
) -> Iterable[object]:
    """Return the rows of a file or object that a source takes.

    Raises:
        DataError: it cannot be read, or the source, which may be a user's, fails.
    """
    with blamed(f"{where}: source {type(source).__name__}", DataError):
        return source.rows(given, inputs, images)


def from_source(
    source: Source, rows: Iterable[object], inputs: Sequence[Input], share: int | None, where: str
) -> Iterator[Named]:
    """Yield the samples of the rows that a source gives, see `from_rows`.

    Raises:
        DataError: they cannot be read, or the source, which may be a user's, fails.
    """
    with blamed(f"{where}: source {type(source).__name__}", DataError):
        yield from from_rows(rows, inputs, share, where)


def from_files(
    source: Source, place: Location, inputs: Sequence[Input], images: ImageOptions, share: int | None
) -> Iterator[Named]:
    """Yield the samples of the files below a place that a source takes, and where not all are wanted, some of each.

    Raises:
        DataError: it takes none of them, or one cannot be read.
    """
    files = [file for file in files_below(place) if does_take(source, file)]
    if not files:
        raise DataError(f"{place} holds no files that {source} takes; name another source, complete it, or add samples")
    each = None
    if share is not None:
        files = [files[index] for index in even_places(len(files), share)]
        each = math.ceil(share / len(files))
    for file in files:
        rows = rows_of(source, file, inputs, images, str(file))
        yield from islice(from_source(source, rows, inputs, each, str(file)), each)
