"""PyTorch's observers and kernels, on values that PyTorch itself computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.numerics.affine import QuantParams
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.torch_observers import EPSILON, Observer, fixed_parameters, quantize

UINT8 = FORMATS["uint8"]
EIGHT_BITS = st.builds(Observer, st.sampled_from(["int8", "uint8"]), st.booleans())


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [(2.0, 2.0, 0.00784314, 0), (-2.0, -2.0, 0.00784314, 255), (0.0, 0.0, EPSILON, 0), (-1.0, 2.0, 0.0117647, 85)],
)
def test_a_range_of_one_value_is_extended_to_zero(low: float, high: float, scale: float, zero_point: int) -> None:
    found = Observer("uint8").parameters([low], [high])
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert found.zero_point is not None
    assert found.zero_point.tolist() == [zero_point]


def test_symmetric_scales_divide_by_half_of_the_codes() -> None:
    weight = Observer("int8", symmetric=True).parameters([-1.8], [0.5])
    assert weight.scale[0] == np.float32(1.8) / np.float32(127.5)
    assert weight.zero_point is None
    data = Observer("uint8", symmetric=True).parameters([-1.8], [0.5])
    assert data.zero_point is not None
    assert data.zero_point.tolist() == [128]
    assert Observer("int8-narrow", symmetric=True).parameters([-1.8], [0.5]).scale[0] == np.float32(1.8) / np.float32(
        127
    )


@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32), EIGHT_BITS)
def test_zero_is_exact_and_no_scale_is_below_the_smallest(a: float, b: float, observer: Observer) -> None:
    found = observer.parameters([min(a, b)], [max(a, b)])
    assert found.scale[0] >= np.float32(EPSILON)
    tensor = quantize(np.zeros(1), found, FORMATS[observer.format])
    assert tensor.dequantize().tolist() == [0.0]


def test_the_zero_point_is_added_before_rounding() -> None:
    three, ties = QuantParams(np.ones((), np.float32), np.array(3, np.uint8)), np.array([0.5, 1.5, 2.5, -0.5])
    assert quantize(ties, three, UINT8).codes.tolist() == [4, 4, 6, 2]


def test_the_inverse_of_the_scale_is_multiplied() -> None:
    value, scale = np.float32([0.273939937]), np.array(0.00214854861, np.float32)
    assert quantize(value, QuantParams(scale, None), UINT8).codes.tolist() == [128]
    assert UINT8.round(value / scale).tolist() == [127]


@pytest.mark.parametrize(("low", "high", "zero_point"), [(0.0, 1.0, 0), (-1.0, 1.0, 128)])
def test_a_fixed_range_is_divided_by_256(low: float, high: float, zero_point: int) -> None:
    found = fixed_parameters(low, high)
    assert found.scale == np.float32((high - low) / 256)
    assert found.zero_point == zero_point
