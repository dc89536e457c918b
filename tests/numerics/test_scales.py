"""Ranges of blocks to scales: roundings, levels, and powers of two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.numerics.formats import FORMATS
from onnxq.numerics.numerics import parameters_from_range
from onnxq.numerics.scales import block_range, spec_parameters
from onnxq.numerics.spec import Granularity, Rounding, Spec

BLOCK = (1,)
finite = st.floats(-1e30, 1e30) | st.sampled_from([0.0, 5e-324, -5e-324, 1e-45])


def scales_of(spec: Spec, *magnitudes: float) -> list[float]:
    high = np.array(magnitudes)
    return spec_parameters(-high, high, spec, BLOCK).scale.tolist()


@given(finite, finite, st.sampled_from([name for name in FORMATS if not FORMATS[name].is_float]), st.booleans())
def test_a_float32_scale_is_that_of_an_activation(a: float, b: float, name: str, symmetric: bool) -> None:
    symmetric = symmetric and FORMATS[name].signed
    low, high = np.array([min(a, b)]), np.array([max(a, b)])
    found = spec_parameters(low, high, Spec(name, symmetric=symmetric), BLOCK)
    expected = parameters_from_range(low, high, FORMATS[name], symmetric=symmetric)
    np.testing.assert_array_equal(found.scale, expected.scale)
    np.testing.assert_array_equal(found.zero_point, expected.zero_point)


def test_the_largest_value_of_a_float_format_is_that_of_the_block() -> None:
    assert scales_of(Spec("float8e4m3fn"), 448.0, 0.0) == [1.0, 1.0]
    assert scales_of(Spec("float4e2m1"), 3.0) == [0.5]


@pytest.mark.parametrize(("rounding", "expected"), [(Rounding.UP, 0.3125), (Rounding.NEAREST, 0.3125)])
def test_scales_come_to_the_grid_of_their_format(rounding: Rounding, expected: float) -> None:
    spec = Spec("float4e2m1", scale="ue4m3", scale_rounding=rounding)
    assert scales_of(spec, 6 * 0.3) == [expected]


def test_rounding_up_clips_nothing_and_the_nearest_may() -> None:
    up, nearest = (Spec("int4-narrow", scale="e8m0", scale_rounding=one) for one in (Rounding.UP, Rounding.NEAREST))
    assert scales_of(up, 7 * 1.1) == [2.0]
    assert scales_of(nearest, 7 * 1.1) == [1.0]


@pytest.mark.parametrize(
    ("name", "exponent"),
    [
        ("float8e4m3fn", 8),
        ("float8e5m2", 15),
        ("float6e2m3", 2),
        ("float6e3m2", 4),
        ("float4e2m1", 2),
        ("int8-narrow", 6),
    ],
)
@pytest.mark.parametrize("magnitude", [1.0, 1.5, 1.9999999, 2.0, 0.3, 1e-20])
def test_the_floor_of_microscaling_is_exact_at_powers_of_two(name: str, exponent: int, magnitude: float) -> None:
    spec = Spec(name, scale="e8m0", scale_rounding=Rounding.FLOOR)
    power = 2.0 ** (np.frexp(magnitude)[1] - 1)
    assert power <= magnitude < 2 * power
    assert scales_of(spec, magnitude) == [power / 2**exponent]


@pytest.mark.parametrize("scale", ["float16", "ue4m3"])
def test_two_levels_bring_the_largest_scale_to_the_end_of_its_format(scale: str) -> None:
    spec = Spec("int8-narrow", per=Granularity.CHANNEL, scale=scale, two_level=True)
    for size in (1e-20, 1.0, 1e30):
        high = np.array([1.8, 0.04, 0.9, 0.0]) * size
        found = spec_parameters(-high, high, spec, BLOCK)
        assert found.tensor_scale is not None
        assert found.scale[0] == {"float16": 65504.0, "ue4m3": 448.0}[scale]
        # Half of the largest is half of it, however the tensor's own scale was rounded.
        assert found.scale[2] == found.scale[0] / 2
        assert found.scale[3] == 1
        assert (found.effective_scale[:3] * 127 >= high[:3] * (1 - 1e-6)).all()


def test_the_range_of_a_block_is_that_of_its_values() -> None:
    values = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)
    low, high = block_range(values, (3, 4))
    assert low.shape == high.shape == (3, 3)
    assert (low[2, 2], high[2, 2]) == (values[6:, 8:].min(), values[6:, 8:].max())
    assert (low.min(), high.max()) == (values.min(), values.max())
    values[0, 0] = np.nan
    assert np.isnan(block_range(values, (3, 4))[0]).tolist() == [[True, False, False], [False] * 3, [False] * 3]
