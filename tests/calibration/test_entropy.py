from __future__ import annotations

import numpy as np
import pytest
from observations import AFFINE, seen

from onnxq.calibration.methods import Entropy, Grid, MinMax, bins_of_data, expected_errors
from onnxq.numerics.formats import format_named
from onnxq.numerics.spec import QuantSpec


@pytest.mark.parametrize("outlier", [25.0, -25.0])
def test_a_far_tail_is_clipped_and_the_squared_error_falls(outlier: float) -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    values[0] = outlier
    tensor = seen(values)
    wide, found = MinMax()(tensor, AFFINE), Entropy()(tensor, AFFINE)
    assert max(-found[0], found[1]) < 0.3 * max(-wide[0], wide[1])
    before, after = expected_errors(bins_of_data(tensor), *np.array([wide, found]).T, Grid(256))
    assert after < 0.6 * before


@pytest.mark.parametrize("freedom", [2, 3, 5])
def test_a_heavy_tail_is_not_min_max(freedom: int) -> None:
    tensor = seen(np.random.default_rng(0).standard_t(freedom, size=100_000))
    assert Entropy()(tensor, AFFINE)[1] < 0.9 * MinMax()(tensor, AFFINE)[1]


def test_an_even_distribution_is_kept() -> None:
    low, high = Entropy()(seen(np.linspace(-1, 1, 100_001)), AFFINE)
    assert (low, high) == pytest.approx((-1, 1), abs=0.02)


def test_what_is_never_negative_stays_so() -> None:
    values = np.maximum(np.random.default_rng(0).standard_t(2, size=100_000), 0)
    low, high = Entropy()(seen(values), AFFINE)
    assert low == 0
    assert 0 < high < values.max()


def test_the_spike_at_zero_does_not_decide() -> None:
    values = np.abs(np.random.default_rng(0).normal(size=100_000))
    spiked = np.concatenate([values, np.zeros(1_000_000)])
    assert Entropy()(seen(spiked), AFFINE) == pytest.approx((0, Entropy()(seen(values), AFFINE)[1]), rel=0.1)


def test_values_far_from_zero_are_kept_in_bounded_memory() -> None:
    values = 1e6 + np.random.default_rng(0).random(1000)
    low, high = Entropy()(seen(values), AFFINE)
    assert (low, high) == (values.min(), values.max())


def test_coarser_levels_clip_more() -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=200_000))
    assert Entropy(16)(tensor, AFFINE)[1] < Entropy(128)(tensor, AFFINE)[1]


@pytest.mark.parametrize(
    ("format", "levels"),
    [("uint8", 128), ("int8", 128), ("uint8-7bit", 64), ("uint4", 8), ("nf4", 8), ("int2", 2), ("int2-narrow", 2)],
)
def test_levels_are_half_of_the_codes(format: str, levels: int) -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=50_000))
    spec = QuantSpec(format, symmetric=format_named(format).signed)
    assert Entropy()(tensor, spec) == Entropy(levels)(tensor, spec)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_the_spike_at_zero_does_not_decide_for_data_of_both_signs(share: float) -> None:
    values = np.random.default_rng(0).normal(0, 0.25, 100_000)
    values[:2] = 1.5, -1.5
    spiked = np.concatenate([values, np.zeros(int(share / (1 - share) * len(values)))])
    assert Entropy()(seen(spiked), AFFINE)[1] > 0.8 * Entropy()(seen(values), AFFINE)[1]


@pytest.mark.parametrize("format", ["uint16", "int16", "int32"])
def test_codes_finer_than_the_histogram_get_all_elements(format: str) -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=50_000), elements=1000)
    assert Entropy()(tensor, QuantSpec(format, symmetric=format != "uint16")) == MinMax()(tensor, AFFINE)
