from __future__ import annotations

import numpy as np
import pytest

from onnxq.evidence.entropy import Entropy
from onnxq.evidence.observer import observe
from onnxq.evidence.ranges import MinMax, expected_errors


@pytest.mark.parametrize("outlier", [25.0, -25.0])
def test_a_far_tail_is_clipped_and_the_squared_error_falls(outlier: float) -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    values[0] = outlier
    seen = observe(values)
    wide, found = MinMax()(seen), Entropy()(seen)
    assert max(-found[0], found[1]) < 0.3 * max(-wide[0], wide[1])
    before, after = expected_errors(seen, *np.array([wide, found]).T, 256)
    assert after < 0.6 * before


@pytest.mark.parametrize("freedom", [2, 3, 5])
def test_a_heavy_tail_is_not_min_max(freedom: int) -> None:
    seen = observe(np.random.default_rng(0).standard_t(freedom, size=100_000))
    assert Entropy()(seen)[1] < 0.9 * MinMax()(seen)[1]


def test_an_even_distribution_is_kept() -> None:
    low, high = Entropy()(observe(np.linspace(-1, 1, 100_001)))
    assert (low, high) == pytest.approx((-1, 1), abs=0.02)


def test_what_is_never_negative_stays_so() -> None:
    values = np.maximum(np.random.default_rng(0).standard_t(2, size=100_000), 0)
    low, high = Entropy()(observe(values))
    assert low == 0
    assert 0 < high < values.max()


def test_the_spike_at_zero_does_not_decide() -> None:
    values = np.abs(np.random.default_rng(0).normal(size=100_000))
    spiked = np.concatenate([values, np.zeros(1_000_000)])
    assert Entropy()(observe(spiked)) == pytest.approx((0, Entropy()(observe(values))[1]), rel=0.1)


def test_values_far_from_zero_are_kept_in_bounded_memory() -> None:
    values = 1e6 + np.random.default_rng(0).random(1000)
    low, high = Entropy()(observe(values))
    assert (low, high) == (values.min(), values.max())


def test_coarser_levels_clip_more() -> None:
    seen = observe(np.random.default_rng(0).laplace(size=200_000))
    assert Entropy(16)(seen)[1] < Entropy(128)(seen)[1]
