"""Arrays that hold one sample or several."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.data.files import as_sample, sample_shape, stack_size
from onnxq.data.inputs import Input

FLOAT = np.dtype(np.float32)
BATCHED, PLAIN = Input("x", FLOAT, ("N", 2)), Input("x", FLOAT, (3, 2))


@pytest.mark.parametrize(
    ("entry", "shape", "count"),
    [
        (BATCHED, (1, 2), None),
        (BATCHED, (5, 2), 5),
        (BATCHED, (5, 1, 2), 5),
        (PLAIN, (3, 2), None),
        (PLAIN, (4, 3, 2), 4),
    ],
)
def test_an_axis_more_or_a_batch_counts_samples(entry: Input, shape: tuple[int, ...], count: int | None) -> None:
    assert stack_size({"x": shape}, [entry]) == count
    each = sample_shape(shape, entry, count)
    assert len(each) == 2
    if count is not None:
        assert as_sample(np.zeros(shape)[0], entry).shape == each
