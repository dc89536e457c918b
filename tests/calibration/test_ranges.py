from __future__ import annotations

import random
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from observations import AFFINE, evidence, seen

from onnxq.calibration.methods import (
    Auto,
    CalibrationMethod,
    Entropy,
    Fixed,
    HistogramSearch,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Percentile,
)
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.errors import DataError

NORMAL = np.random.default_rng(0).normal(size=100_000)
WIDTH = 2**-8
FLOATS = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
METHODS: list[CalibrationMethod] = [
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


@settings(max_examples=60)
@given(FLOATS, st.sampled_from(METHODS))
def test_every_range_is_ordered_and_within_the_extremes(values: NDArray[np.float32], method: CalibrationMethod) -> None:
    tensor = seen(values)
    low, high = method(tensor, AFFINE)
    inner = MinMax()(tensor, AFFINE)
    assert inner[0] <= low <= high <= inner[1]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_constant_is_its_own_range(method: CalibrationMethod) -> None:
    assert method(seen(np.zeros(5)), AFFINE) == (0, 0)
    low, high = method(seen(np.full(5, 3.0)), AFFINE)
    assert high == 3.0
    assert low == 3.0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_elements_have_no_range(method: CalibrationMethod) -> None:
    with pytest.raises(DataError, match="no elements in any sample"):
        method(seen([0.0][:0]), AFFINE)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mask_constants_do_not_widen_a_range(method: CalibrationMethod) -> None:
    masked = np.concatenate([NORMAL, np.full(50_000, -3.4e38)])
    assert method(seen(masked), AFFINE) == method(seen(NORMAL), AFFINE)


def test_min_max_is_exact() -> None:
    assert MinMax()(seen(NORMAL, "range", "histogram"), AFFINE) == (NORMAL.min(), NORMAL.max())


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0, 99.9])
def test_a_percentile_cuts_half_of_the_rest_on_either_side(percent: float) -> None:
    low, high = Percentile(percent)(seen(NORMAL, "range", "histogram"), AFFINE)
    tail = (100 - percent) / 2
    expected = np.percentile(NORMAL, [tail, 100 - tail])
    assert (low, high) == pytest.approx(expected, abs=2 * WIDTH)


def test_the_whole_is_min_max() -> None:
    assert Percentile(100)(seen(NORMAL, "range", "histogram"), AFFINE) == MinMax()(
        seen(NORMAL, "range", "histogram"), AFFINE
    )


def test_a_percentile_is_interpolated_inside_a_bin() -> None:
    low, high = Percentile(80)(seen(np.repeat([0.0, 1024.0], [900, 100])), AFFINE)
    assert low == pytest.approx(0.5 / 9)
    assert high == 1024.0


PUBLISHED = [
    [
        [-0.059, 1.1674, 0.7119, -1.127],
        [-1.3974, 0.5077, -0.5601, 0.0683],
        [-0.0929, 0.9473, 0.7159, -0.4574],
    ],
    [[-0.0236, -0.7599, 1.029, 0.8914], [-1.1727, -1.2556, -0.2271, 0.9568], [-0.25, 1.4579, 1.4707, 0.4043]],
]


def averaged(values: list[Any], order: list[int], constant: float) -> tuple[float, float]:
    """Return the moving average of samples whose digests are their places, when they come in some order."""
    kinds = ("range", "sample-extremes")
    parts = [evidence({"t": values[index]}, *kinds, sample=f"{index:016x}") for index in order]
    return MovingAverage(constant)(reduce(CalibrationStatistics.merge, parts).of("t"), AFFINE)


def test_a_moving_average_is_that_of_pytorch_on_its_published_example() -> None:
    low, high = averaged([np.float32(values) for values in PUBLISHED], [0, 1], 0.01)
    assert (high - low) / 255 == pytest.approx(0.010064372792840004, rel=1e-6)
    assert round(-low / ((high - low) / 255)) == 139


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8), st.randoms())
def test_a_moving_average_goes_by_the_digests_of_the_samples_and_not_by_their_arrival(
    values: list[float], random: random.Random
) -> None:
    expected = np.float64([min(values[0], 0), max(values[0], 0)])
    for value in values[1:]:
        expected += 0.5 * (np.float64([min(value, 0), max(value, 0)]) - expected)
    order = list(range(len(values)))
    random.shuffle(order)
    assert averaged([np.float32([value, 0]) for value in values], order, 0.5) == tuple(expected)


@pytest.mark.parametrize("mask", [-1e4, 1e4])
def test_a_sample_of_nothing_but_masks_does_not_count_in_a_moving_average(mask: float) -> None:
    data = [np.linspace(-end, 2 * end, 9) for end in (1.0, 2.0, 3.0)]
    assert averaged([np.full(9, mask), *data], [0, 1, 2, 3], 0.5) == averaged(data, [0, 1, 2], 0.5)


def test_a_moving_average_needs_to_tell_samples_apart() -> None:
    with pytest.raises(DataError, match="hold no sample-extremes"):
        MovingAverage()(seen(NORMAL, "range", "histogram"), AFFINE)


def test_a_fixed_range_asks_nobody() -> None:
    assert Fixed(-1, 2)(seen([0.0]), AFFINE) == (-1, 2)
