from __future__ import annotations

import numpy as np
import pytest
from observations import AFFINE, seen

from onnxq.calibration.methods import HistogramSearch, MinMax, searched_range
from onnxq.numerics.spec import Method, QuantSpec


def outlier() -> np.ndarray:
    values = np.random.RandomState(0).standard_normal(2000).astype(np.float32)
    values[0] = 12
    return values


def histogram(values: np.ndarray, bins: int = 2048) -> np.ndarray:
    """Count as torch.histc does."""
    low, high = float(values.min()), float(values.max())
    places = ((values - np.float32(low)) * np.float32(bins) / np.float32(high - low)).astype(np.int64)
    return np.bincount(np.minimum(places, bins - 1), minlength=bins)


def test_the_range_of_an_outlier_is_that_of_pytorch_bit_for_bit() -> None:
    values = outlier()
    found = searched_range(histogram(values), values.min(), values.max(), 256)
    assert found == (-3.046143054962158, 11.992652893066406)
    low, high = found
    assert (high - low) / 255 == pytest.approx(0.058975666761398315, rel=1e-6)
    assert round(-low / ((high - low) / 255)) == 52


def test_an_even_distribution_is_kept() -> None:
    counts = np.full(2048, 10)
    low, high = searched_range(counts, -1.0, 1.0, 256)
    assert (low, high) == pytest.approx((-1, 1), abs=0.01)


def test_our_own_bins_serve_as_well() -> None:
    low, high = HistogramSearch()(seen(outlier()), AFFINE)
    assert low == pytest.approx(-3.046143, abs=0.1)
    assert high == pytest.approx(11.99, abs=0.1)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e-300, 1e300])
def test_magnitudes_beyond_float32_do_not_matter(scale: float) -> None:
    values = outlier().astype(np.float64)
    found = HistogramSearch()(seen(values * scale), AFFINE)
    assert found == pytest.approx(np.multiply(HistogramSearch()(seen(values), AFFINE), scale), rel=0.01)


def test_levels_are_all_of_the_type_though_half_are_used() -> None:
    tensor, half = seen(outlier()), QuantSpec("uint8-7bit", symmetric=False, method=Method.TORCH)
    assert HistogramSearch()(tensor, half) == HistogramSearch(256)(tensor, AFFINE)
    assert HistogramSearch(8)(tensor, half) != HistogramSearch(256)(tensor, AFFINE)


def test_codes_finer_than_the_histogram_get_all_elements() -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=50_000), elements=1000)
    assert HistogramSearch()(tensor, QuantSpec("int16")) == MinMax()(tensor, AFFINE)
    assert HistogramSearch(1 << 16)(tensor, AFFINE) == MinMax()(tensor, AFFINE)
