"""Pipelines of tf.data are told by what they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples

X = Input("x", np.dtype(np.float32), ("N", 2))


class Pipeline:
    """What `tf.data.Dataset` has."""

    def as_numpy_iterator(self) -> Iterator[tuple[Any, int]]:
        return ((np.full((2, 2), batch, np.float32), batch) for batch in range(3))


def test_its_batches_are_samples() -> None:
    assert [float(sample["x"][0, 0]) for sample in open_samples(Pipeline(), [X])] == [0, 0, 1, 1, 2, 2]


def test_tensorflows_own() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    given = tensorflow.data.Dataset.from_tensor_slices({"x": np.ones((5, 2), np.float32)}).batch(2)
    assert len(open_samples(given, [X])) == 5
