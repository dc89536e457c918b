"""Rows of samples taken so many at a time, as the model is to be run with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from onnxq.data.files import Part
from onnxq.data.inputs import Input, Sample
from onnxq.errors import DataError


def single_rows(inputs: Sequence[Input], batch: int) -> tuple[Input, ...]:
    """Return the inputs as a model has them that takes one row at a time.

    Args:
        inputs: what the model wants.
        batch: how many rows it is to be run with.

    Raises:
        DataError: the first dimension of an input is fixed at another number, or there is none.

    >>> str(single_rows([Input("x", np.dtype(np.float32), ("n", 3))], 8)[0])
    "'x' float32[1, 3]"
    """
    found = []
    for entry in inputs:
        if not entry.shape or (isinstance(entry.shape[0], int) and entry.shape[0] != batch):
            raise DataError(
                f"input {entry} cannot be run with {batch} rows, expected an open first dimension or {batch}; leave "
                "the batch out"
            )
        found.append(replace(entry, shape=(1, *entry.shape[1:])))
    return tuple(found)


def in_batches(parts: Sequence[Part], inputs: Sequence[Input], batch: int) -> list[Part]:
    """Return parts whose samples are rows of others, so many at a time, each with the part that its first row is of.

    The last sample holds the rows that are left. A model whose first dimensions are fixed is not run with fewer.

    Args:
        parts: each sample is one row.
        inputs: what the model wants.
        batch: how many rows a sample has.
    """
    rows = sum(part.count for part in parts)
    is_fixed = any(entry.shape is not None and entry.shape[0] == batch for entry in inputs)
    end = rows - rows % batch if is_fixed else rows
    found, begun, behind = [], 0, 0
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
        stored = all(one.stored for one in spanned)
        found.append(Part(part.where, part.sequence, count, read, stored=stored, file=part.file))
        begun += count * batch
    return found


@dataclass(frozen=True)
class _Rows:
    """Reads samples of several rows.

    Attributes:
        parts: that hold the rows.
        first: the row of the parts with which the first sample begins.
        batch: rows of a sample; the last may have fewer.
    """

    parts: tuple[Part, ...]
    first: int
    batch: int

    def __call__(self, indices: Sequence[int]) -> Iterator[Sample]:
        for index in indices:
            yield self._joined(self.first + index * self.batch)

    def _joined(self, start: int) -> Sample:
        rows = list(chain.from_iterable(self._read(start)))
        where = self.parts[0].where
        for row in rows:
            if row.keys() != rows[0].keys():
                raise DataError(f"{where} lacks inputs that other rows have, expected the same ones in all; add them")
            for name, array in row.items():
                if array.shape != (1, *rows[0][name].shape[1:]):
                    raise DataError(
                        f"{where}: rows of {name!r} have shapes {list(rows[0][name].shape)} and {list(array.shape)}, "
                        "expected one row of one shape each to be run together; leave the batch out, or give 1"
                    )
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _read(self, start: int) -> Iterator[Iterator[Sample]]:
        """Yield what reads the rows from one on, as many as a sample has."""
        before = 0
        for part in self.parts:
            if before >= start + self.batch:
                break
            inside = range(max(start - before, 0), min(start - before + self.batch, part.count))
            if inside:
                yield part.read(inside)
            before += part.count
