"""Burn's arithmetic: halves away from zero, scales rounded up, truncated offsets, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.errors import SchemeError
from onnxq.numbers.burn import Calibration, Offset, encode, half_away, stored_scale, tensor_bytes
from onnxq.numbers.scale_formats import SCALE_FORMATS
from onnxq.numbers.spec import Granularity, Method, Rounding, Spec, Storage

RAMP = np.array([-1.8, -1.0, 0.0, 0.5], np.float32)


def test_halves_go_away_from_zero_and_nothing_else_does() -> None:
    values = np.array([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -0.49999997, 8388607.5, 1e30, np.inf], np.float32)
    assert half_away(values).tolist() == [1, -1, 2, 3, -3, 0, 0, 8388608, np.float32(1e30), np.inf]


def test_codes_differ_from_those_of_onnx_at_ties_alone() -> None:
    # The scale is 1, so that halves stay halves.
    values = np.array([127.0, 0.5, 1.5, -2.5, 3.49], np.float32)
    assert encode(values, Spec("int8-narrow")).codes.tolist() == [127, 1, 2, -3, 3]


def test_the_range_is_not_extended_to_zero_and_needs_not_to_be() -> None:
    scale = encode(np.float32([0.5, 1.8]), Spec("int8-narrow")).parameters.scale
    assert scale.tolist() == [np.float32(3.6) / np.float32(254)]


def test_the_mean_magnitude_gives_ternary_codes() -> None:
    values = np.array([-0.9, -0.3, 0.0, 0.6], np.float32)
    tensor = encode(values, Spec("int2-narrow"), calibration=Calibration.ABS_MEAN)
    assert tensor.parameters.scale.tolist() == [pytest.approx(0.45)]
    assert tensor.codes.tolist() == [-1, -1, 0, 1]


def test_the_mean_magnitude_is_that_of_each_block() -> None:
    values = np.array([[1, -3, 10, -30], [2, 2, 0, 0]], np.float32)
    tensor = encode(values, Spec("int2-narrow", per=(2,)), calibration=Calibration.ABS_MEAN)
    np.testing.assert_allclose(tensor.parameters.scale, [[2, 20], [2, 0.1]])


@pytest.mark.parametrize(("offset", "zero_point"), [(Offset.TRUNCATE, 71), (Offset.ROUND, 72)])
def test_an_offset_is_truncated_as_burn_did(offset: Offset, zero_point: int) -> None:
    tensor = encode(RAMP, Spec("int8", symmetric=False), offset=offset)
    assert tensor.parameters.zero_point is not None
    assert tensor.parameters.zero_point.tolist() == [zero_point]


def test_a_block_lies_along_the_last_axes() -> None:
    values = np.arange(48, dtype=np.float32).reshape(4, 12)
    assert encode(values, Spec("int8-narrow", per=(4,))).parameters.scale.shape == (4, 3)
    assert encode(values, Spec("int8-narrow", per=(2, 4))).parameters.scale.shape == (2, 3)
    assert encode(values[0], Spec("int8-narrow", per=(4,))).parameters.scale.shape == (3,)
    assert encode(values.reshape(2, 2, 3, 4), Spec("int8-narrow", per=(3, 4))).parameters.scale.shape == (2, 2, 1, 1)


def test_scales_below_the_smallest_normal_number_are_kept() -> None:
    assert stored_scale(np.float32([1e-7]), "float16")[0] == np.float32(2 * 2.0**-24)
    assert SCALE_FORMATS["float16"].round_up(np.float32([1e-7]))[0] == 2.0**-14


@pytest.mark.parametrize("spec", [Spec("int8-narrow"), Spec("int4", per=(4,)), Spec("float4e2m1", scale="ue4m3")])
def test_zeros_have_codes_of_zero(spec: Spec) -> None:
    tensor = encode(np.zeros((2, 4), np.float32), spec)
    assert (tensor.dequantize() == 0).all()
    assert (tensor.parameters.scale > 0).all()


def test_two_levels_divide_by_the_product_of_both() -> None:
    values = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    spec = Spec("float4e2m1", per=(16,), scale="ue4m3", two_level=True)
    tensor = encode(values, spec)
    product = tensor.parameters.scale * tensor.parameters.tensor_scale
    np.testing.assert_array_equal(tensor.parameters.effective_scale, product)
    np.testing.assert_array_equal(tensor.codes.view(np.uint8), tensor.format.round(values / product).view(np.uint8))
    assert tensor.parameters.scale.max() == 448


def test_the_record_of_a_tensor_is_codes_then_scales_then_the_second_level() -> None:
    values = np.random.default_rng(1).normal(size=(2, 16)).astype(np.float32)
    spec = Spec("int4-narrow", per=(8,), scale="float16", two_level=True, storage=Storage.WORDS)
    tensor = encode(values, spec)
    record = tensor_bytes(tensor, spec)
    assert len(record) == 16 + 4 * 2 + 4
    assert record[16:24] == tensor.parameters.scale.astype(np.float16).tobytes()
    assert np.frombuffer(record[24:], np.float32)[0] == tensor.parameters.tensor_scale
    native = Spec("int8-narrow")
    assert (
        tensor_bytes(encode(RAMP, native), native)
        == np.int8([-127, -71, 0, 35]).tobytes() + np.float32(0.014173228293657303).tobytes()
    )


@pytest.mark.parametrize(
    ("spec", "calibration", "message"),
    [
        (Spec("int8", per=Granularity.CHANNEL), Calibration.MINMAX, "Burn has no scales per channel"),
        (Spec("int8", method=Method.MSE), Calibration.MINMAX, 'Burn has no method = "mse"'),
        (Spec("int8", scale_rounding=Rounding.NEAREST), Calibration.MINMAX, "Burn has no scale_rounding"),
        (Spec("int8", per=(256,)), Calibration.MINMAX, "Burn has no blocks longer than 255"),
        (Spec("uint8", symmetric=False), Calibration.MINMAX, "Burn has no offsets but of int8 tensors"),
        (
            Spec("int4", per=(4,), scale="ue4m3", two_level=True),
            Calibration.ABS_MEAN,
            "Burn has no two levels of mean magnitudes",
        ),
    ],
)
def test_what_burn_has_not_is_told(spec: Spec, calibration: Calibration, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        encode(np.ones((4, 4), np.float32), spec, calibration=calibration)
    assert str(caught.value).startswith(message)
