"""What people are told of evidence."""

from __future__ import annotations

import numpy as np
import pytest
from observations import evidence

from onnxq.calibration.accumulators import Request
from onnxq.calibration.methods import described
from onnxq.calibration.statistics import observe

MASKED = np.concatenate([np.linspace(-1, 1, 500), np.full(100, -1e4)])


@pytest.mark.parametrize(
    ("values", "note"),
    [([1.0, 2.0], ""), ([], "empty"), ([0.0], "all zero"), ([2.0, 2.0], "constant"), (MASKED, "masked with -10000")],
)
def test_a_tensor_has_a_note_where_there_is_something_to_know(values: list[float], note: str) -> None:
    found = described(evidence({"x": np.float32(values)}, "range", "histogram"))
    one = found["tensors"]["x"]
    assert (found["samples"], one["note"], one["elements"]) == (1, note, len(values))
    assert (one["percentile"][0] is None) == (len(values) == 0)


def test_kinds_say_what_they_hold() -> None:
    requests = [Request("x", kind, 1) for kind in ("channel-means", "channel-ranges")]
    one = described(observe({"x": np.ones((2, 3), np.float32)}, requests))["tensors"]["x"]
    assert one["note"] == "means of 3 channels; ranges of 3 channels"
    assert one["minimum"] is one["percentile"][0] is None
