"""Samples that come only once, or slowly: chosen, and kept in a temporary folder as they come."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.errors import DataError
from onnxq.extensions import blamed
from onnxq.samples.files import Part, files_below, spooled_part
from onnxq.samples.images import ImageOptions
from onnxq.samples.inputs import Input, check_sample
from onnxq.samples.rows import samples_of
from onnxq.samples.sources.source import Source
from onnxq.samples.sources.table import does_take
from onnxq.samples.stores import Location
from onnxq.samples.stretches import even_places, picked

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
        with zipfile.ZipFile(path, "w") as archive:
            for name, value in sample.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    plain = value.astype(str) if value.dtype.hasobject else value
                    np.lib.format.write_array(stream, np.asarray(plain), allow_pickle=False)
        parts.append(spooled_part(path, where, sequence, inputs, sequence if of_files else ""))
    return parts


def from_rows(
    rows: Iterable[Any], inputs: Sequence[Input], share: int | None, where: str, *, as_given: bool = False
) -> Iterator[Named]:
    """Yield the samples of rows, and where their number is known, of some from all over.

    Args:
        rows: what `samples_of` takes.
        inputs: what the model wants.
        share: how many samples are wanted; None takes all.
        where: what errors call them, and what the samples continue.
        as_given: whether dictionaries of arrays are samples as they are, to which nothing is added or left out.
    """
    chosen, each = rows, None
    if share is not None and isinstance(rows, Sized) and len(rows):
        places = even_places(len(rows), share)
        each = math.ceil(share / len(places))
        chosen = map(rows.__getitem__, places) if hasattr(rows, "__getitem__") else picked(rows, places)
    for number, row in enumerate(chosen):
        found = iter([row]) if as_given and is_sample(row) else samples_of(row, inputs, f"{where}, row {number}")
        yield from ((where, sample) for sample in islice(found, each))


def from_source(
    source: Source, given: object, inputs: Sequence[Input], images: ImageOptions, share: int | None, where: str
) -> Iterator[Named]:
    """Yield the samples of a file or object that a source takes, see `from_rows`.

    Raises:
        DataError: it cannot be read, or the source, which may be a user's, fails.
    """
    with blamed(f"{where}: source {type(source).__name__}", DataError):
        yield from from_rows(source.rows(given, inputs, images), inputs, share, where)


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
        yield from islice(from_source(source, file, inputs, images, each, str(file)), each)


def is_sample(row: object) -> bool:
    """Whether a row is a sample already, which is then checked as it is."""
    return isinstance(row, Mapping) and all(isinstance(value, np.ndarray | np.generic) for value in row.values())
