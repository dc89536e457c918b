"""The range of least squared error, for the codes that data gets."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from observations import AFFINE, seen

from onnxq.calibration.methods import Grid, MeanSquaredError, MinMax, bins_of_data, expected_errors
from onnxq.numerics.affine import params_from_range, quantize
from onnxq.numerics.formats import format_named
from onnxq.numerics.spec import QuantSpec

NORMAL = np.random.default_rng(0).normal(size=100_000)
TAILED = np.random.default_rng(1).standard_t(3, size=100_000)


def squared_error(values: NDArray[np.float64], low: float, high: float, levels: int) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (levels - 1)
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(values / scale) + zero, 0, levels - 1)
    return float(np.mean(((codes - zero) * scale - values) ** 2))


@pytest.mark.parametrize("levels", [16, 256])
def test_mse_clips_a_heavy_tail_and_lowers_the_error(levels: int) -> None:
    values = TAILED
    low, high = MeanSquaredError(levels)(seen(values), AFFINE)
    assert high < values.max()
    assert squared_error(values, low, high, levels) < 0.8 * squared_error(values, values.min(), values.max(), levels)


def test_mse_is_close_to_the_best_of_a_fine_search() -> None:
    values = np.abs(NORMAL)
    low, high = MeanSquaredError(16)(seen(values), AFFINE)
    best = min(squared_error(values, 0, end, 16) for end in np.linspace(1, values.max(), 400))
    assert squared_error(values, low, high, 16) <= 1.02 * best


def test_mse_keeps_the_ends_of_a_uniform_distribution() -> None:
    values = np.linspace(-1, 1, 50_001)
    low, high = MeanSquaredError()(seen(values), AFFINE)
    assert (low, high) == pytest.approx((-1, 1), abs=1 / 64)


@pytest.mark.parametrize("levels", [16, 256])
def test_expected_errors_are_close_to_those_of_the_elements(levels: int) -> None:
    ends = np.array([1.0, 2.5, 4.0])
    data = bins_of_data(seen(NORMAL))
    found = expected_errors(data, -ends, ends, Grid(levels)) * max(-data.minimum, data.maximum) ** 2
    assert found == pytest.approx([squared_error(NORMAL, -end, end, levels) for end in ends], rel=0.02)


def noise(values: NDArray[np.float64], ends: tuple[float, float], spec: QuantSpec) -> float:
    """Return the mean squared error of what codes make of values."""
    format = format_named(spec.format)
    parameters = params_from_range(*ends, format, symmetric=spec.symmetric)
    codes = quantize(values.astype(np.float32), parameters, format)
    return float(np.mean((codes.dequantize() - values.astype(np.float32)) ** 2, dtype=np.float64))


SPECS = [
    AFFINE,
    QuantSpec("uint8-7bit", symmetric=False),
    QuantSpec("int8", symmetric=False),
    QuantSpec("int8", symmetric=True),
    QuantSpec("uint4", symmetric=False),
    QuantSpec("uint16", symmetric=False),
    QuantSpec("float8e4m3fn"),
    QuantSpec("nf4"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.format} {spec.symmetric}")
@pytest.mark.parametrize("values", [NORMAL, TAILED, np.abs(TAILED), TAILED.clip(-0.5, 9)], ids=str)
def test_the_error_is_that_of_the_codes_of_the_spec(values: NDArray[np.float64], spec: QuantSpec) -> None:
    tensor = seen(values)
    found, widest = MeanSquaredError()(tensor, spec), MinMax()(tensor, spec)
    assert noise(values, found, spec) <= 1.01 * noise(values, widest, spec)
    low, high = widest
    for share in (0.3, 0.5, 0.8):
        assert noise(values, found, spec) <= 1.05 * noise(values, (share * low, share * high), spec)


@pytest.mark.parametrize(
    "spec", [QuantSpec("int16"), QuantSpec("uint16", symmetric=False), QuantSpec("int32")], ids=lambda spec: spec.format
)
@pytest.mark.parametrize("values", [NORMAL, TAILED, np.abs(TAILED)], ids=["normal", "tailed", "positive"])
def test_fine_codes_keep_a_tail_that_is_not_counted(values: NDArray[np.float64], spec: QuantSpec) -> None:
    tensor = seen(values, elements=1000)
    assert bins_of_data(tensor).counts[-1] == 0
    found = MeanSquaredError()(tensor, spec)
    assert noise(values, found, spec) <= 1.01 * noise(values, MinMax()(tensor, spec), spec)


def test_what_clipping_the_uncounted_ends_costs_is_expected_of_fine_codes() -> None:
    values = np.tile([-0.5, 0.5], 4000)
    values[1] = 8.0
    tensor = seen(values, elements=1000)
    data = bins_of_data(tensor)
    assert (data.counts[-1], data.maximum) == (0, 8.0)
    clipped, whole = expected_errors(data, np.full(2, -0.5), np.array([0.5, 8.0]), Grid(1 << 16))
    assert clipped == pytest.approx((7.5 / 8) ** 2 / data.counts.sum(), rel=1e-3)
    assert whole < 1e-9


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_float_codes_of_a_wide_range_are_not_evenly_spaced(share: float) -> None:
    spec, end = QuantSpec("float8e5m2"), share * float(np.abs(NORMAL).max())
    found = expected_errors(bins_of_data(seen(NORMAL)), np.array([-end]), np.array([end]), Grid.of(spec))
    measured = noise(NORMAL, (-end, end), spec) / np.square(np.abs(NORMAL).max())
    assert found == pytest.approx(measured, rel=0.05)
