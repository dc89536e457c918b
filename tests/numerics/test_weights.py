"""Scales that leave an int32 accumulator room for the bias, which cannot overflow then."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxq.numerics.formats import FORMATS, Format
from onnxq.numerics.numerics import Parameters, QTensor, parameters_from_range, quantize, weight_range
from onnxq.numerics.weights import quantize_bias, scale_with_room

NARROW = FORMATS["int8-narrow"]
INT8 = FORMATS["int8"]


def quantize_weight(weight: NDArray[np.float32], format: Format, axis: int | None) -> QTensor:
    parameters = parameters_from_range(
        *weight_range(weight, None if axis is None else (1 - axis,)), format, symmetric=True
    )
    return quantize(weight, parameters, format)


def quantize_weight_with_bias(
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    format: Format,
    axis: int,
    input_scale: float,
    *,
    per_channel: bool,
) -> tuple[QTensor, QTensor]:
    first = quantize_weight(weight, format, axis if per_channel else None)
    raised = scale_with_room(first.parameters.scale, bias, input_scale)
    codes = quantize(weight, Parameters(raised, None), format)
    return codes, quantize_bias(bias, codes, input_scale)


channels = st.integers(1, 5)
scales = st.floats(2.0**-60, 2.0**40, width=32)


@settings(max_examples=200)
@given(
    channels,
    st.integers(1, 40),
    scales,
    st.sampled_from([1e-30, 1e-6, 1.0, 1e6]),
    st.sampled_from([0.0, 1e-20, 1.0, 1e9, 1e30]),
    st.booleans(),
    st.sampled_from([NARROW, INT8]),
    st.integers(0, 2**32 - 1),
)
def test_bias_and_products_never_overflow_int32(
    outputs: int,
    terms: int,
    input_scale: float,
    weight_size: float,
    bias_size: float,
    per_channel: bool,
    format: Format,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    weight = (generator.normal(size=(outputs, terms)) * weight_size).astype(np.float32)
    bias = (generator.normal(size=outputs) * bias_size).astype(np.float32)
    codes, bias_codes = quantize_weight_with_bias(weight, bias, format, 0, input_scale, per_channel=per_channel)
    # The largest sum that 255 steps of data can make, whatever the zero point.
    products = 255 * np.abs(codes.codes.astype(np.int64)).sum(axis=1)
    assert np.abs(bias_codes.codes.astype(np.int64)).max() <= 2**30 + 1
    assert (products + np.abs(bias_codes.codes.astype(np.int64))).max() < 2**31
    assert np.isfinite(codes.parameters.scale).all()
    # The kernel knows no scale of the bias: it is the product of the other two.
    product = np.float32(input_scale) * codes.parameters.scale.reshape(bias_codes.parameters.scale.shape)
    np.testing.assert_allclose(bias_codes.parameters.scale, product, rtol=1e-6)
    assert codes.parameters.scale.shape == ((outputs, 1) if per_channel else ())
    assert bias_codes.parameters.scale.shape == ((outputs,) if per_channel and outputs > 1 else ())


@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([0.0, 1.0, 1e8]))
def test_the_integer_kernel_computes_what_the_codes_stand_for(seed: int, per_channel: bool, bias_size: float) -> None:
    generator = np.random.default_rng(seed)
    weight, bias = generator.normal(size=(4, 7)).astype(np.float32), generator.normal(size=4) * bias_size
    data, zero_point = generator.integers(0, 256, (3, 7)), int(generator.integers(0, 256))
    input_scale = float(np.float32(generator.uniform(1e-3, 1e-1)))
    codes, bias_codes = quantize_weight_with_bias(
        weight, bias.astype(np.float32), NARROW, 0, input_scale, per_channel=per_channel
    )
    accumulator = (data - zero_point) @ codes.codes.astype(np.int64).T + bias_codes.codes.astype(np.int64)
    integer = accumulator * np.broadcast_to(bias_codes.parameters.scale, 4).astype(np.float64)
    values = (data - zero_point) * input_scale
    real = values @ codes.dequantize().astype(np.float64).T + bias_codes.dequantize()
    np.testing.assert_allclose(integer, real, rtol=1e-5, atol=1e-5 * np.abs(real).max())


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_an_ordinary_bias_errs_by_half_its_scale_at_most(seed: int, per_channel: bool) -> None:
    generator = np.random.default_rng(seed)
    weight, bias = generator.normal(size=(4, 7)).astype(np.float32), generator.normal(size=4).astype(np.float32)
    codes, bias_codes = quantize_weight_with_bias(weight, bias, NARROW, 0, 0.02, per_channel=per_channel)
    alone = quantize_weight(weight, NARROW, 0 if per_channel else None)
    np.testing.assert_array_equal(codes.codes, alone.codes)
    error = np.abs(bias_codes.dequantize() - bias)
    assert (error <= 0.51 * bias_codes.parameters.scale + 1e-6).all()


def test_a_huge_bias_raises_the_scale_of_its_channel_alone() -> None:
    weight = np.ones((2, 3), np.float32)
    codes, bias_codes = quantize_weight_with_bias(
        weight, np.array([0.1, 1e9], np.float32), NARROW, 0, 1e-3, per_channel=True
    )
    scales = codes.parameters.scale.reshape(-1)
    assert scales[0] == np.float32(1 / 127)
    assert scales[1] > scales[0]
    np.testing.assert_allclose(bias_codes.dequantize(), [0.1, 1e9], rtol=1e-4)


def test_a_huge_bias_raises_the_only_scale() -> None:
    weight = np.ones((2, 3), np.float32)
    bias = np.array([0.1, 1e9], np.float32)
    codes, bias_codes = quantize_weight_with_bias(weight, bias, NARROW, 0, 1e-3, per_channel=False)
    assert codes.parameters.scale > np.float32(1 / 127)
    np.testing.assert_allclose(bias_codes.dequantize()[1], 1e9, rtol=1e-6)


def test_groups_share_the_scales_of_a_weight() -> None:
    weight = np.ones((2, 3), np.float32)
    bias = np.array([0.1, 0.2, -0.3, 1e9], np.float32)
    codes, bias_codes = quantize_weight_with_bias(weight, bias, NARROW, 0, 1e-3, per_channel=True)
    scales = codes.parameters.scale.reshape(-1)
    assert scales[0] == np.float32(1 / 127) < scales[1]
    np.testing.assert_array_equal(bias_codes.parameters.scale, np.float32(1e-3) * scales[[0, 1, 0, 1]])
    np.testing.assert_allclose(bias_codes.dequantize()[[0, 2, 3]], bias[[0, 2, 3]], rtol=1e-4)
