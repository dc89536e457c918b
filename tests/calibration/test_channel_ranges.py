"""Extremes of channels are exact for any order, split and merge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import one_by_one, statistic

from onnxq.calibration.accumulators import ChannelRanges
from onnxq.errors import DataError


def observed(array: np.ndarray, axis: int) -> ChannelRanges:
    found = statistic(array, "channel-ranges", axis)
    assert isinstance(found, ChannelRanges)
    return found


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_extremes_of_channels_are_exact(axis: int) -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 2, 3).transpose(0, 2, 1)
    whole = observed(array, axis)
    along = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    assert whole.ends.tolist() == [[row.min(), row.max()] for row in along]
    shifted = whole.merge(observed(array + 1, axis))
    assert shifted.ends.tolist() == [[low, high + 1] for low, high in whole.ends]
    assert whole.note == f"ranges of {len(along)} channels"


@given(st.integers(0, 2**32 - 1), st.randoms())
def test_any_order_gives_what_one_observer_gives(seed: int, random: object) -> None:
    arrays = list(np.random.default_rng(seed).normal(size=(4, 2, 3)).astype(np.float32))
    parts = [observed(array, 1) for array in arrays]
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert parts[0].merge(parts[1]).merge(parts[2].merge(parts[3])) == one_by_one(arrays, "channel-ranges", 1)
    assert parts[0].merge(ChannelRanges()) == parts[0] == ChannelRanges().merge(parts[0])


def test_what_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(DataError, match="'t' has 2 axes, expected axis 2 for its channels"):
        observed(np.ones((2, 3), np.float32), 2)
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number"):
        observed(np.ones((2, 3), np.float32), 1).merge(observed(np.ones((2, 2), np.float32), 1))
    with pytest.raises(DataError, match="'t' holds 1 NaN or infinite values of 6"):
        observed(np.float32([[1, 2, 3], [4, np.nan, 6]]), 1)


def test_it_survives_its_arrays() -> None:
    found = observed(np.float32([[1, -2], [3, 4]]), 1)
    assert ChannelRanges.restored(found.arrays()) == found
    assert ChannelRanges.restored(ChannelRanges().arrays()) == ChannelRanges()
    with pytest.raises(ValueError, match="out of order"):
        ChannelRanges.restored({"ends": np.array([[2.0, 1.0]])})
    with pytest.raises(ValueError, match="not finite"):
        ChannelRanges.restored({"ends": np.array([[2.0, np.inf]])})
