"""Readers that were written for onnxruntime's own quantizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input


@dataclass(frozen=True)
class DataReader:
    """``onnxruntime.quantization.CalibrationDataReader``: ``get_next()`` gives a feed, or None at the end."""

    def takes(self, given: object) -> bool:
        """Return whether it is such a reader."""
        return hasattr(given, "get_next")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the feeds that are left, from the first on where the reader can be rewound."""
        if hasattr(given, "rewind"):
            given.rewind()
        # Readers that have come to their end give nothing, or an empty feed.
        return iter(lambda: given.get_next() or None, None)
