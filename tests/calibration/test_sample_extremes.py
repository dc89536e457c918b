"""Extremes of samples do not depend on the order in which these come."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import statistic

from onnxq.calibration.accumulators import SampleExtremes


def observed(values: list[float], sample: int) -> SampleExtremes:
    found = statistic(np.float32(values), "sample-extremes", sample=f"{sample:016x}ffff")
    assert isinstance(found, SampleExtremes)
    return found


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.floats(-8, 8, width=32), max_size=4)), max_size=8), st.data())
def test_they_do_not_depend_on_the_order(parts: list[tuple[int, list[float]]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(parts))
    merged, again = (
        reduce(SampleExtremes.merge, (observed(values, index) for index, values in order), SampleExtremes())
        for order in (parts, shuffled)
    )
    assert merged == again
    for index, (low, high) in zip(merged.samples, merged.ends, strict=True):
        values = [value for at, part in parts if at == index for value in part]
        assert (low, high) == (min(values), max(values))
    assert set(merged.samples) == {index for index, values in parts if values}


def test_it_survives_its_arrays() -> None:
    found = observed([1, -2], 3).merge(observed([4], 2**63 + 1))
    assert SampleExtremes.restored(found.arrays()) == found
    assert (found.samples.tolist(), found.note) == ([3, 2**63 + 1], "extremes of 2 samples")
    with pytest.raises(ValueError, match="out of order"):
        SampleExtremes.restored({"samples": found.samples[::-1], "ends": found.ends})
    with pytest.raises(ValueError, match="not finite"):
        SampleExtremes.restored({"samples": found.samples, "ends": found.ends * np.inf})
