"""Ranges are exact, and know the part below the magnitude of masks."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import statistic

from onnxq.calibration.accumulators import Range

VALUES = st.lists(st.one_of(st.floats(-1e5, 1e5, width=32), st.sampled_from([8192.0, -8192.0, -3e38])), max_size=8)


def observed(values: object) -> Range:
    found = statistic(values, "range")
    assert isinstance(found, Range)
    return found


@given(st.lists(VALUES, max_size=4), st.data())
def test_any_split_in_any_order_gives_what_one_observation_gives(parts: list[list[float]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(parts))
    merged = reduce(Range.merge, (observed(np.float32(part)) for part in shuffled), Range())
    assert merged == observed(np.float32([value for part in parts for value in part]))
    assert Range.restored(merged.arrays()) == merged


def test_the_part_below_the_mask_and_what_is_nearest_to_it_are_kept() -> None:
    found = observed(np.float32([1, -2, -9000, -1e4, 8192, 5]))
    assert (found.count, found.minimum, found.maximum) == (6, -1e4, 8192)
    assert (found.unmasked_count, found.unmasked_minimum, found.unmasked_maximum) == (3, -2, 5)
    assert (found.below, found.above) == (-9000, 8192)
    assert observed(np.float32([-9000, -1e4])).unmasked_count == 0


def test_the_sign_of_a_zero_extreme_does_not_depend_on_the_order() -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0]):
        assert math.copysign(1, observed(np.array(values)).minimum) == 1


@pytest.mark.parametrize(
    ("counts", "ends"),
    [
        ([2, 3], [0, 1, 0, 1, -np.inf, np.inf]),
        ([2, 2], [2, 1, 2, 1, -np.inf, np.inf]),
        ([2, 2], [0, np.nan, 0, 1, -np.inf, np.inf]),
        ([2, 2], [0, 1, -1, 1, -np.inf, np.inf]),
        ([2, 2], [-np.inf, np.inf, 0, 1, -np.inf, np.inf]),
        ([0, 0], [0, 1, np.inf, -np.inf, -np.inf, np.inf]),
        ([2, 0], [0, 1, 0, 1, -np.inf, np.inf]),
        ([2, 2], [0, 1, 0, 1, np.nan, np.inf]),
        ([2, 2], [0, 1, 0, 1, -np.inf, 2]),
    ],
)
def test_contradictions_are_refused(counts: list[int], ends: list[float]) -> None:
    with pytest.raises(ValueError, match="contradict"):
        Range.restored({"counts": np.int64(counts), "ends": np.float64(ends)})
