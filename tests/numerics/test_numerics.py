"""Ranges to parameters, values to codes and back: against published vectors, onnxruntime and algebra."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from numerics.ranges_and_formats import (
    INTEGERS,
    LARGEST,
    NARROW,
    QUANTIZED,
    TINY,
    UINT8,
    every_quantized,
    finite,
    formats,
    signed_formats,
)
from onnxq.numerics.formats import FORMATS, Format
from onnxq.numerics.numerics import (
    Parameters,
    dequantize,
    parameters_from_range,
    quantize,
    signal_to_noise,
    weight_range,
)

# --- published values -----------------------------------------------------------------------------------------------


def test_burn_symmetric_8_bit_vector() -> None:
    values = np.array([-1.7999999523162842, -1.0, 0.0, 0.5], np.float32)
    parameters = parameters_from_range(values.min(), values.max(), NARROW, symmetric=True)
    assert parameters.scale == np.float32(0.014173228293657303)
    assert parameters.zero_point is None
    quantized = quantize(values, parameters, NARROW)
    assert quantized.codes.tolist() == [-127, -71, 0, 35]
    expected = np.array([-1.7999999523162842, -1.0062992572784424, 0.0, 0.4960629940032959], np.float32)
    np.testing.assert_array_equal(quantized.dequantize(), expected)


@pytest.mark.parametrize(
    ("minimum", "maximum", "scale", "zero_point"),
    [
        (-1.0, 2.0, 0.011764705882352941, 85),
        (0.0, 6.0, 0.023529411764705882, 0),
        (-3.0, -1.0, 0.011764705882352941, 255),
        (1.0, 4.0, 0.01568627450980392, 0),
    ],
)
def test_torch_affine_8_bit_vectors(minimum: float, maximum: float, scale: float, zero_point: int) -> None:
    parameters = parameters_from_range(minimum, maximum, UINT8, symmetric=False)
    assert parameters.scale == np.float32(scale)
    assert parameters.zero_point == zero_point


@pytest.mark.parametrize(
    ("minimum", "maximum", "scale", "zero_point"),
    [(-1.0, 2.0, 0.023622047244094488, 42), (0.0, 6.0, 0.047244094488188976, 0), (-3.0, -1.0, 0.02362204724409, 127)],
)
def test_torch_affine_7_bit_vectors(minimum: float, maximum: float, scale: float, zero_point: int) -> None:
    parameters = parameters_from_range(minimum, maximum, FORMATS["uint8-7bit"], symmetric=False)
    assert parameters.scale == np.float32(scale)
    assert parameters.zero_point == zero_point


def test_torch_min_max_observer_vector() -> None:
    parameters = parameters_from_range(-1.3974000215530396, 1.4707000255584717, UINT8, symmetric=False)
    np.testing.assert_allclose(parameters.scale, 0.011247451417148113, rtol=1e-6)
    assert parameters.zero_point == 124


@pytest.mark.parametrize(("minimum", "maximum", "scale"), [(-0.5, 1.8, 1.8 / 127.5), (-1.8, 0.5, 1.8 / 127.5)])
def test_the_full_signed_range_is_used_with_half_a_code_of_clipping(
    minimum: float, maximum: float, scale: float
) -> None:
    parameters = parameters_from_range(minimum, maximum, FORMATS["int8"], symmetric=True)
    assert parameters.scale == np.float32(scale)


# --- algebra --------------------------------------------------------------------------------------------------------


@given(finite, finite, signed_formats)
def test_a_symmetric_scale_is_positive_finite_and_normal(a: float, b: float, format: Format) -> None:
    one = parameters_from_range(min(a, b), max(a, b), format, symmetric=True)
    assert np.isfinite(one.scale)
    assert one.scale >= TINY
    assert one.scale.dtype == np.float32
    assert one.zero_point is None


@given(finite, finite, formats)
def test_an_affine_scale_is_normal_and_its_zero_point_is_a_code(a: float, b: float, format: Format) -> None:
    one = parameters_from_range(min(a, b), max(a, b), format, symmetric=False)
    assert np.isfinite(one.scale)
    assert one.scale >= TINY
    assert one.zero_point is not None
    assert format.minimum <= int(one.zero_point) <= format.maximum
    assert one.zero_point.dtype == format.dtype


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 0.0),
        (0.0, 1e-45),
        (-1e-45, 1e-45),
        (-1e-310, 0.0),
        (-LARGEST, LARGEST),
        (0.0, LARGEST),
        (-1e300, 1e300),
        (-1.7e308, 1.7e308),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
@every_quantized
def test_extreme_ranges_give_usable_scales(low: float, high: float, symmetric: bool, format: Format) -> None:
    with np.errstate(over="ignore"):
        one = parameters_from_range(low, high, format, symmetric=symmetric)
    assert np.isfinite(one.scale)
    assert one.scale >= TINY


def test_an_empty_range_gives_scale_one() -> None:
    one = parameters_from_range([0.0, -1.0], [0.0, 1.0], NARROW, symmetric=True)
    assert one.scale[0] == 1.0
    assert one.scale[1] == np.float32(1 / 127)


@given(finite, finite, formats, st.booleans())
def test_zero_is_exact(a: float, b: float, format: Format, symmetric: bool) -> None:
    assume(not symmetric or format.signed)
    parameters = parameters_from_range(min(a, b), max(a, b), format, symmetric=symmetric)
    assert quantize(np.zeros(3, np.float32), parameters, format).dequantize().tolist() == [0.0, 0.0, 0.0]


ranges = st.floats(2.0**-100, 2.0**100, width=32)


@given(st.data(), st.sampled_from(INTEGERS[:-1]), st.booleans())
def test_a_round_trip_errs_by_half_a_scale_at_most(data: st.DataObject, format: Format, symmetric: bool) -> None:
    assume(not symmetric or format.signed)
    magnitude = data.draw(ranges)
    values = magnitude * data.draw(arrays.arrays(np.float32, st.integers(1, 30), elements=st.floats(-1, 1, width=32)))
    parameters = parameters_from_range(values.min(), values.max(), format, symmetric=symmetric)
    error = np.abs(quantize(values, parameters, format).dequantize().astype(np.float64) - values)
    # Dividing in float32 moves ties by parts in 2**24 of the largest code.
    codes = format.maximum - format.minimum
    assert error.max() <= float(parameters.scale) * (0.5 + codes * 2.0**-23)


@given(arrays.arrays(np.float32, 40, elements=st.floats(-100, 100, width=32)), st.sampled_from(QUANTIZED))
def test_quantizing_keeps_order(values: NDArray[np.float32], format: Format) -> None:
    parameters = parameters_from_range(values.min(), values.max(), format, symmetric=False)
    codes = quantize(np.sort(values), parameters, format).codes.astype(np.int64)
    assert (np.diff(codes) >= 0).all()


@given(st.sampled_from(QUANTIZED), st.integers(0, 2**32 - 1))
def test_what_was_quantized_is_quantized_to_the_same_codes(format: Format, seed: int) -> None:
    generator = np.random.default_rng(seed)
    codes = generator.integers(format.minimum, format.maximum, 50).astype(format.dtype)
    zero = np.array(generator.integers(format.minimum, format.maximum), format.dtype)
    parameters = Parameters(np.array(generator.uniform(1e-3, 10), np.float32), zero)
    np.testing.assert_array_equal(quantize(dequantize(codes, parameters, format), parameters, format).codes, codes)


def test_a_large_tensor_is_quantized_in_little_memory() -> None:
    values = np.ones((1024, 2048), np.float32)
    parameters = Parameters(np.ones((1024, 64), np.float32), None, block=(1, 32))
    tracemalloc.start()
    tensor = quantize(values, parameters, FORMATS["int4"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The codes themselves and what one piece takes.
    assert peak < values.nbytes // 4 + 2**20
    tracemalloc.start()
    tensor.dequantize()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes + 2**20


def test_a_range_per_channel_keeps_the_rank() -> None:
    weight = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4)
    low, high = weight_range(weight, (0, 2))
    assert low.shape == high.shape == (1, 3, 1)
    assert low.reshape(-1).tolist() == [-12, -8, -4]
    low, high = weight_range(weight, None)
    assert (low.shape, float(low), float(high)) == ((), -12.0, 11.0)


def test_float64_and_float16_values_are_quantized_in_float32() -> None:
    parameters = Parameters(np.array(0.1, np.float32), None)
    for dtype in (np.float16, np.float64):
        values = np.array([0.05, 0.25, -12.6], dtype)
        expected = quantize(values.astype(np.float32), parameters, NARROW).codes
        np.testing.assert_array_equal(quantize(values, parameters, NARROW).codes, expected)


def test_signal_to_noise_at_its_ends() -> None:
    assert signal_to_noise(1.0, 0.0) == np.inf
    assert signal_to_noise(0.0, 0.0) == np.inf
    assert signal_to_noise(0.0, 1.0) == -np.inf
    assert signal_to_noise(1000.0, 1.0) == pytest.approx(30.0)


def test_the_reference_opset_reads_every_format() -> None:
    for format in FORMATS.values():
        schema = onnx.defs.get_schema("DequantizeLinear", format.opset)
        stored = f"uint{format.bits}" if format.codebook is not None else format.name
        name = f"tensor({stored.split('-')[0]})"
        assert name in next(one.allowed_type_strs for one in schema.type_constraints if one.type_param_str[0] == "T")
