from __future__ import annotations

import random
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from onnxq.errors import DataError
from onnxq.evidence.entropy import Entropy
from onnxq.evidence.histogram_search import HistogramSearch
from onnxq.evidence.observer import observe
from onnxq.evidence.range_table import Auto
from onnxq.evidence.ranges import (
    Fixed,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Percentile,
    RangeMethod,
    expected_errors,
)
from onnxq.evidence.tensor_statistics import EMPTY, merge

NORMAL = np.random.default_rng(0).normal(size=100_000)
FLOATS = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
METHODS: list[RangeMethod] = [
    MinMax(),
    Percentile(),
    Percentile(50),
    MeanSquaredError(),
    MeanSquaredError(4),
    MovingAverage(),
    Entropy(),
    Entropy(8),
    HistogramSearch(),
    Auto(),
]


def squared_error(values: NDArray[np.float64], low: float, high: float, levels: int) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (levels - 1)
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(values / scale) + zero, 0, levels - 1)
    return float(np.mean(((codes - zero) * scale - values) ** 2))


@settings(max_examples=60)
@given(FLOATS, st.sampled_from(METHODS))
def test_every_range_is_ordered_and_within_the_extremes(values: NDArray[np.float32], method: RangeMethod) -> None:
    seen = observe(values, sample=0)
    low, high = method(seen)
    inner = MinMax()(seen)
    assert inner[0] <= low <= high <= inner[1]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_constant_is_its_own_range(method: RangeMethod) -> None:
    assert method(observe(np.zeros(5), sample=0)) == (0, 0)
    low, high = method(observe(np.full(5, 3.0), sample=0))
    assert high == 3.0
    assert low == 3.0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_elements_have_no_range(method: RangeMethod) -> None:
    with pytest.raises(DataError, match="no elements in any sample"):
        method(EMPTY)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mask_constants_do_not_widen_a_range(method: RangeMethod) -> None:
    masked = np.concatenate([NORMAL, np.full(50_000, -3.4e38)])
    assert method(observe(masked, sample=0)) == method(observe(NORMAL, sample=0))


def test_min_max_is_exact() -> None:
    assert MinMax()(observe(NORMAL)) == (NORMAL.min(), NORMAL.max())


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0, 99.9])
def test_a_percentile_cuts_half_of_the_rest_on_either_side(percent: float) -> None:
    low, high = Percentile(percent)(observe(NORMAL))
    tail = (100 - percent) / 2
    assert (low, high) == pytest.approx(np.percentile(NORMAL, [tail, 100 - tail]), abs=2 * observe(NORMAL).width)


def test_the_whole_is_min_max() -> None:
    assert Percentile(100)(observe(NORMAL)) == MinMax()(observe(NORMAL))


def test_a_percentile_is_interpolated_inside_a_bin() -> None:
    seen = observe(np.repeat([0.0, 1024.0], [900, 100]))
    low, high = Percentile(80)(seen)
    assert low == pytest.approx(seen.width / 9)
    assert high == 1024.0


@pytest.mark.parametrize("levels", [16, 256])
def test_mse_clips_a_heavy_tail_and_lowers_the_error(levels: int) -> None:
    values = np.random.default_rng(1).standard_t(3, size=100_000)
    low, high = MeanSquaredError(levels)(observe(values))
    assert high < values.max()
    assert squared_error(values, low, high, levels) < 0.8 * squared_error(values, values.min(), values.max(), levels)


def test_mse_is_close_to_the_best_of_a_fine_search() -> None:
    values = np.abs(NORMAL)
    low, high = MeanSquaredError(16)(observe(values))
    best = min(squared_error(values, 0, end, 16) for end in np.linspace(1, values.max(), 400))
    assert squared_error(values, low, high, 16) <= 1.02 * best


def test_mse_keeps_the_ends_of_a_uniform_distribution() -> None:
    values = np.linspace(-1, 1, 50_001)
    low, high = MeanSquaredError()(observe(values))
    assert (low, high) == pytest.approx((-1, 1), abs=1 / 64)


PUBLISHED = [
    [
        [-0.059, 1.1674, 0.7119, -1.127],
        [-1.3974, 0.5077, -0.5601, 0.0683],
        [-0.0929, 0.9473, 0.7159, -0.4574],
    ],
    [[-0.0236, -0.7599, 1.029, 0.8914], [-1.1727, -1.2556, -0.2271, 0.9568], [-0.25, 1.4579, 1.4707, 0.4043]],
]


def test_a_moving_average_is_that_of_pytorch_on_its_published_example() -> None:
    seen = reduce(merge, (observe(np.float32(values), sample=index) for index, values in enumerate(PUBLISHED)))
    low, high = MovingAverage()(seen)
    assert (high - low) / 255 == pytest.approx(0.010064372792840004, rel=1e-6)
    assert round(-low / ((high - low) / 255)) == 139


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8), st.randoms())
def test_a_moving_average_goes_by_the_index_of_the_samples_and_not_by_their_arrival(
    values: list[float], order: random.Random
) -> None:
    parts = [observe(np.float32([value, 0]), sample=index) for index, value in enumerate(values)]
    expected = np.float64([min(values[0], 0), max(values[0], 0)])
    for value in values[1:]:
        expected += 0.5 * (np.float64([min(value, 0), max(value, 0)]) - expected)
    order.shuffle(parts)
    assert MovingAverage(0.5)(reduce(merge, parts)) == tuple(expected)


def test_a_moving_average_needs_to_tell_samples_apart() -> None:
    with pytest.raises(DataError, match="do not tell samples apart"):
        MovingAverage()(observe(NORMAL))


def test_a_fixed_range_asks_nobody() -> None:
    assert Fixed(-1, 2)(EMPTY) == (-1, 2)


@pytest.mark.parametrize("levels", [16, 256])
def test_expected_errors_are_close_to_those_of_the_elements(levels: int) -> None:
    ends = np.array([1.0, 2.5, 4.0])
    seen = observe(NORMAL)
    found = expected_errors(seen, -ends, ends, levels) * max(-seen.minimum, seen.maximum) ** 2
    assert found == pytest.approx([squared_error(NORMAL, -end, end, levels) for end in ends], rel=0.02)
