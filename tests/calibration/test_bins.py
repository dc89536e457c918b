from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.calibration.accumulators import stride_of
from onnxq.calibration.histogram import BINS, MINIMUM_EXPONENT, add_bins, bin_of, bins_of, exponent_of

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE)
def test_bins_cover_a_range_and_are_not_finer_than_they_must(a: float, b: float) -> None:
    minimum, maximum = min(a, b), max(a, b)
    exponent = exponent_of(minimum, maximum)
    assert 0 <= bin_of(maximum, exponent) - bin_of(minimum, exponent) < BINS
    finest = max(MINIMUM_EXPONENT, math.frexp(max(-minimum, maximum))[1] - 53)
    if exponent > finest and maximum > minimum:
        assert bin_of(maximum, exponent - 1) - bin_of(minimum, exponent - 1) >= BINS


@given(st.lists(FINITE, min_size=1, max_size=20), st.sampled_from([np.float32, np.float64]))
def test_arrays_fall_into_the_bins_of_their_elements(values: list[float], dtype: type[np.floating]) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
    array = array[np.isfinite(array)]
    if array.size:
        minimum, maximum = float(array.min()), float(array.max())
        exponent = exponent_of(minimum, maximum)
        first = bin_of(minimum, exponent)
        assert bins_of(array, exponent, first).tolist() == [bin_of(float(one), exponent) - first for one in array]


@pytest.mark.parametrize(("size", "elements"), [(10, None), (10, 10), (100, 10), (7 * 2**12, 1000), (3**9, 10)])
def test_a_stride_takes_about_as_many_as_wanted_and_shares_no_factor_with_the_size(
    size: int, elements: int | None
) -> None:
    stride = stride_of(size, elements)
    assert math.gcd(stride, size) == 1
    assert len(range(0, size, stride)) <= (elements or size) + 1


@given(
    st.lists(st.integers(0, 2**60), min_size=1, max_size=40),
    st.integers(-(2**52), 2**52 - 40),
    st.one_of(st.integers(0, 6), st.sampled_from([40, 63, 64, 2000])),
)
def test_bins_are_added_to_the_wider_ones_that_they_lie_in(added: list[int], added_first: int, coarser: int) -> None:
    first = (added_first >> coarser) - 1
    counts = np.full(len(added) + 2, 3, np.int64)
    expected = counts.tolist()
    for place, count in enumerate(added, added_first):
        expected[(place >> coarser) - first] += count
    add_bins(counts, np.array(added, np.int64), added_first, coarser, first)
    assert counts.tolist() == expected
