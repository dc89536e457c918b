from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from onnxq.calibration.ranges import RANGES, MeanSquaredError, MinMax, Percentile, RangeMethod, parse_range
from onnxq.calibration.statistics import EMPTY, observe
from onnxq.errors import DataError, SchemeError

NORMAL = np.random.default_rng(0).normal(size=100_000)
FLOATS = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
METHODS = [MinMax(), Percentile(), Percentile(50), MeanSquaredError(), MeanSquaredError(4)]


def squared_error(values: NDArray[np.float64], low: float, high: float, levels: int) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (levels - 1)
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(values / scale) + zero, 0, levels - 1)
    return float(np.mean(((codes - zero) * scale - values) ** 2))


@settings(max_examples=60)
@given(FLOATS, st.sampled_from(METHODS))
def test_every_range_is_ordered_and_within_the_extremes(values: NDArray[np.float32], method: RangeMethod) -> None:
    low, high = method(observe(values))
    inner = MinMax()(observe(values))
    assert inner[0] <= low <= high <= inner[1]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_constant_is_its_own_range(method: RangeMethod) -> None:
    assert method(observe(np.zeros(5))) == (0, 0)
    low, high = method(observe(np.full(5, 3.0)))
    assert high == 3.0
    assert low == 3.0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_elements_have_no_range(method: RangeMethod) -> None:
    with pytest.raises(DataError, match="no elements in any sample"):
        method(EMPTY)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mask_constants_do_not_widen_a_range(method: RangeMethod) -> None:
    masked = np.concatenate([NORMAL, np.full(50_000, -3.4e38)])
    assert method(observe(masked)) == method(observe(NORMAL))


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


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("minmax", MinMax()),
        ("percentile", Percentile(99.99)),
        ("percentile:99.9", Percentile(99.9)),
        ("mse", MeanSquaredError(256)),
        ("mse:16", MeanSquaredError(16)),
    ],
)
def test_methods_are_parsed(text: str, method: RangeMethod) -> None:
    assert parse_range(text) == method


@pytest.mark.parametrize("name", RANGES)
def test_every_method_is_parsed_by_its_name(name: str) -> None:
    assert isinstance(parse_range(name), RANGES[name])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("percentil", "did you mean 'percentile'"),
        ("", "Range method '' is unknown"),
        ("minmax:3", "'minmax' takes no number, found '3'"),
        ("percentile:high", "'high' for percent, expected a number as in 'percentile:99.99'"),
        ("percentile:0", "Percentile is 0.0, expected above 0"),
        ("percentile:nan", "Percentile is nan"),
        ("percentile:101", "Percentile is 101.0"),
        ("mse:1", "MSE levels are 1, expected at least 2"),
        ("mse:2.5", "'2.5' for levels"),
    ],
)
def test_a_wrong_method_is_told_why(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_range(text)
