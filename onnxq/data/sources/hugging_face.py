"""Data sets of Hugging Face's datasets, held or streamed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input


@dataclass(frozen=True)
class HuggingFace:
    """``datasets.Dataset`` and ``IterableDataset``: columns are called as the inputs, others are left out."""

    def takes(self, given: object) -> bool:
        """Return whether it is such a data set."""
        return hasattr(given, "with_format") and hasattr(given, "select_columns")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the records as arrays, of the columns that are inputs alone where the columns are known."""
        known = given.column_names or ()
        columns = [entry.name for entry in inputs if entry.name in known]
        rows: Iterable[object] = (given.select_columns(columns) if columns else given).with_format("numpy")
        return rows
