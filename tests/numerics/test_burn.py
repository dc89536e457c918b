"""Burn's arithmetic: halves away from zero, scales rounded up, truncated offsets, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.errors import SchemeError
from onnxq.numerics.burn import encode, half_away, stored_scale
from onnxq.numerics.formats import SCALE_FORMATS
from onnxq.numerics.spec import Granularity, Method, QuantSpec, Rounding

RAMP = np.array([-1.8, -1.0, 0.0, 0.5], np.float32)


def test_halves_go_away_from_zero_and_nothing_else_does() -> None:
    values = np.array([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -0.49999997, 8388607.5, 1e30, np.inf], np.float32)
    assert half_away(values).tolist() == [1, -1, 2, 3, -3, 0, 0, 8388608, np.float32(1e30), np.inf]


def test_codes_differ_from_those_of_onnx_at_ties_alone() -> None:
    # The scale is 1, so that halves stay halves.
    values = np.array([127.0, 0.5, 1.5, -2.5, 3.49], np.float32)
    assert encode(values, QuantSpec("int8-narrow")).codes.tolist() == [127, 1, 2, -3, 3]


def test_the_range_is_not_extended_to_zero_and_needs_not_to_be() -> None:
    scale = encode(np.float32([0.5, 1.8]), QuantSpec("int8-narrow")).parameters.scale
    assert scale.tolist() == [np.float32(3.6) / np.float32(254)]


def test_an_offset_is_truncated_as_burn_did() -> None:
    tensor = encode(RAMP, QuantSpec("int8", symmetric=False))
    assert tensor.parameters.zero_point is not None
    # The nearest code is 72.
    assert tensor.parameters.zero_point.tolist() == [71]


def test_a_block_lies_along_the_last_axes() -> None:
    values = np.arange(48, dtype=np.float32).reshape(4, 12)
    assert encode(values, QuantSpec("int8-narrow", per=(4,))).parameters.scale.shape == (4, 3)
    assert encode(values, QuantSpec("int8-narrow", per=(2, 4))).parameters.scale.shape == (2, 3)
    assert encode(values[0], QuantSpec("int8-narrow", per=(4,))).parameters.scale.shape == (3,)
    assert encode(values.reshape(2, 2, 3, 4), QuantSpec("int8-narrow", per=(3, 4))).parameters.scale.shape == (
        2,
        2,
        1,
        1,
    )


def test_scales_below_the_smallest_normal_number_are_kept() -> None:
    assert stored_scale(np.float32([1e-7]), "float16")[0] == np.float32(2 * 2.0**-24)
    assert SCALE_FORMATS["float16"].round_up(np.float32([1e-7]))[0] == 2.0**-14


@pytest.mark.parametrize(
    "spec", [QuantSpec("int8-narrow"), QuantSpec("int4", per=(4,)), QuantSpec("float4e2m1", scale="ue4m3")]
)
def test_zeros_have_codes_of_zero(spec: QuantSpec) -> None:
    tensor = encode(np.zeros((2, 4), np.float32), spec)
    assert (tensor.dequantize() == 0).all()
    assert (tensor.parameters.scale > 0).all()


def test_two_levels_divide_by_the_product_of_both() -> None:
    values = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    spec = QuantSpec("float4e2m1", per=(16,), scale="ue4m3", two_level=True)
    tensor = encode(values, spec)
    product = tensor.parameters.scale * tensor.parameters.tensor_scale
    np.testing.assert_array_equal(tensor.parameters.effective_scale, product)
    np.testing.assert_array_equal(tensor.codes.view(np.uint8), tensor.format.round(values / product).view(np.uint8))
    assert tensor.parameters.scale.max() == 448


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (QuantSpec("int8", per=Granularity.CHANNEL), "Burn has no scales per channel"),
        (QuantSpec("int8", method=Method.MSE), 'Burn has no method = "mse"'),
        (QuantSpec("int8", scale_rounding=Rounding.NEAREST), "Burn has no scale_rounding"),
        (QuantSpec("int8", per=(256,)), "Burn has no blocks longer than 255"),
        (QuantSpec("uint8", symmetric=False), "Burn has no offsets but of int8 tensors"),
    ],
)
def test_what_burn_has_not_is_told(spec: QuantSpec, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        encode(np.ones((4, 4), np.float32), spec)
    assert str(caught.value).startswith(message)
