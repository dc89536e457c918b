"""Tables: DataFrames of pandas, and Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.errors import DataError
from onnxq.samples.images import ImageOptions
from onnxq.samples.inputs import Input, is_floating, required
from onnxq.samples.sources.source import has_suffix, library

# Rows that are unpacked at a time.
_BATCH = 256


@dataclass(frozen=True)
class DataFrames:
    """``pandas.DataFrame``: columns are called as the inputs; or all are numbers, and the one input takes them."""

    def takes(self, given: object) -> bool:
        """Return whether it is a data frame."""
        return hasattr(given, "iloc") and hasattr(given, "columns")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the records."""
        return _Records(
            len(given),
            lambda: (dict(zip(given.columns, row, strict=True)) for row in given.itertuples(index=False, name=None)),
            tuple(inputs),
        )


@dataclass(frozen=True)
class Parquet:
    """``.parquet`` files, read some rows at a time: columns as of a `DataFrames`, lists being arrays."""

    def takes(self, given: object) -> bool:
        """Return whether it is such a file."""
        return has_suffix(given, ".parquet")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the records."""
        parquet = library("pyarrow.parquet", "pyarrow", given)

        def read() -> Iterator[Mapping[str, object]]:
            with given.open("rb") as stream:
                for batch in parquet.ParquetFile(stream).iter_batches(_BATCH):
                    yield from batch.to_pylist()

        try:
            with given.open("rb") as stream:
                count = parquet.ParquetFile(stream).metadata.num_rows
        except (OSError, ValueError) as error:
            raise DataError(f"{given} cannot be read as Parquet: {str(error)[:200]}; write it again") from error
        return _Records(count, read, tuple(inputs))


@dataclass(frozen=True)
class _Records:
    """Records of columns, counted before they are read.

    Attributes:
        count: how many there are.
        read: gives them, mappings from column to value.
        inputs: what the model wants.
    """

    count: int
    read: Any
    inputs: tuple[Input, ...]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[object]:
        wanted = required(self.inputs)
        for record in self.read():
            if len(wanted) > 1 or wanted[0].name in record:
                yield record
            else:
                kind = wanted[0].dtype if is_floating(wanted[0].dtype) else None
                yield np.array(list(record.values()), kind)
