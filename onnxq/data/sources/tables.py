"""Tables: DataFrames of pandas, and Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, is_floating, required
from onnxq.data.sources.source import has_suffix, library
from onnxq.errors import DataError

# Rows that are unpacked at a time.
_BATCH = 64


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
                file = parquet.ParquetFile(stream)
                # What all groups need of the file would be read ahead, and kept.
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(_BATCH, row_groups=[group]):
                        for place in range(batch.num_rows):
                            yield {name: _cell(batch[name][place]) for name in batch.schema.names}

        try:
            with given.open("rb") as stream:
                count = parquet.ParquetFile(stream).metadata.num_rows
        except (OSError, ValueError) as error:
            raise DataError(f"{given} cannot be read as Parquet: {str(error)[:200]}; write it again") from error
        return _Records(count, read, tuple(inputs))


def _cell(scalar: Any) -> object:
    """Return a cell: lists of one length as an array, without a Python object for each number.

    Args:
        scalar: of pyarrow, of any type.
    """
    values: Any = getattr(scalar, "values", None)
    shape = list[int]()
    while hasattr(values, "value_lengths"):
        lengths = values.value_lengths().unique()
        if values.null_count or len(lengths) != 1 or not lengths[0].as_py():
            return scalar.as_py()
        shape.append(lengths[0].as_py())
        values = values.flatten()
    if not hasattr(values, "to_numpy") or values.null_count:
        return scalar.as_py()
    return values.to_numpy(zero_copy_only=False).reshape(-1, *shape)


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
