"""Pipelines of tf.data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input


@dataclass(frozen=True)
class TensorFlowData:
    """``tf.data.Dataset``: elements are dictionaries by input, tuples in the order of the inputs, or one tensor."""

    def takes(self, given: object) -> bool:
        """Return whether it is such a pipeline."""
        return hasattr(given, "as_numpy_iterator")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the elements as arrays."""
        rows: Iterable[object] = given.as_numpy_iterator()
        return rows
