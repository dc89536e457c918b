"""Affine arithmetic: scales, quantized values and back, against published vectors, onnxruntime and algebra."""

from __future__ import annotations

import math
import tracemalloc
from functools import cache

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxq.errors import SchemeError
from onnxq.numerics.affine import (
    QTensor,
    QuantParams,
    block_range,
    dequantize,
    dequantize_linear,
    params_from_range,
    params_of_blocks,
    quantize,
    quantize_bias,
    raise_scale_for_bias,
    sqnr_db,
    sqnr_of_ratio,
    worst_ratio,
)
from onnxq.numerics.blocks import PIECE
from onnxq.numerics.burn import encode, half_away, stored_scale
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS, QuantDType
from onnxq.numerics.spec import Granularity, Method, QuantSpec, Rounding
from onnxq.numerics.torch_observers import EPSILON, Observer, fixed_parameters
from onnxq.numerics.torch_observers import quantize as quantize_as_torch
from onnxq.runtime.sessions import Session, open_session, run

UINT8 = FORMATS["uint8"]
NARROW = FORMATS["int8-narrow"]
TINY = np.finfo(np.float32).tiny
LARGEST = float(np.finfo(np.float32).max)
# onnxruntime has no QuantizeLinear to int32, and numpy no arrays of the smaller quantized values that it gives.
QUANTIZED = [format for format in FORMATS.values() if not format.is_float and format.bits in (8, 16)]
INTEGERS = [format for format in FORMATS.values() if not format.is_float]
numbers = st.floats(-LARGEST, LARGEST, width=32)

# --- published values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "minimum", "maximum", "scale", "zero_point", "tolerance"),
    [
        # torch, with 8 bits, with 7, and what its observer has seen.
        ("uint8", -1.0, 2.0, 0.011764705882352941, 85, 0),
        ("uint8", 0.0, 6.0, 0.023529411764705882, 0, 0),
        ("uint8", -3.0, -1.0, 0.011764705882352941, 255, 0),
        ("uint8", 1.0, 4.0, 0.01568627450980392, 0, 0),
        ("uint8-7bit", -1.0, 2.0, 0.023622047244094488, 42, 0),
        ("uint8-7bit", 0.0, 6.0, 0.047244094488188976, 0, 0),
        ("uint8-7bit", -3.0, -1.0, 0.02362204724409, 127, 0),
        ("uint8", -1.3974000215530396, 1.4707000255584717, 0.011247451417148113, 124, 1e-6),
        # Burn, with as many integers on both sides.
        ("int8-narrow", -1.7999999523162842, 0.5, 0.014173228293657303, None, 0),
        ("int8-narrow", 0.0, 0.0, 1.0, None, 0),
        # The full signed range is used, with half a step of clipping.
        ("int8", -0.5, 1.8, 1.8 / 127.5, None, 0),
        ("int8", -1.8, 0.5, 1.8 / 127.5, None, 0),
    ],
)
def test_published_ranges_have_their_scales(
    format: str, minimum: float, maximum: float, scale: float, zero_point: int | None, tolerance: float
) -> None:
    parameters = params_from_range(minimum, maximum, FORMATS[format], symmetric=zero_point is None)
    assert parameters.scale == pytest.approx(np.float32(scale), rel=tolerance, abs=0)
    assert parameters.zero_point == zero_point


# --- algebra --------------------------------------------------------------------------------------------------------


extremes = st.sampled_from([0.0, 1e-45, -1e-45, -1e-310, LARGEST, -LARGEST, 1e300, -1e300, 1.7e308, -1.7e308])


@given(numbers | extremes, numbers | extremes, st.sampled_from(INTEGERS), st.booleans())
def test_a_scale_is_positive_finite_and_normal_and_zero_is_exact(
    a: float, b: float, format: QuantDType, symmetric: bool
) -> None:
    assume(not symmetric or format.signed)
    with np.errstate(over="ignore"):
        parameters = params_from_range(min(a, b), max(a, b), format, symmetric=symmetric)
    assert np.isfinite(parameters.scale)
    assert parameters.scale >= TINY
    assert parameters.scale.dtype == np.float32
    assert (parameters.zero_point is None) == symmetric
    if parameters.zero_point is not None:
        assert format.minimum <= int(parameters.zero_point) <= format.maximum
        assert parameters.zero_point.dtype == format.dtype
    assert quantize(np.zeros(3, np.float32), parameters, format).dequantize().tolist() == [0.0, 0.0, 0.0]


ranges = st.floats(2.0**-100, 2.0**100, width=32)


@given(st.data(), st.sampled_from(INTEGERS[:-1]), st.booleans())
def test_a_round_trip_errs_by_half_a_scale_at_most(data: st.DataObject, format: QuantDType, symmetric: bool) -> None:
    assume(not symmetric or format.signed)
    magnitude = data.draw(ranges)
    values = magnitude * data.draw(arrays.arrays(np.float32, st.integers(1, 30), elements=st.floats(-1, 1, width=32)))
    parameters = params_from_range(values.min(), values.max(), format, symmetric=symmetric)
    error = np.abs(quantize(values, parameters, format).dequantize().astype(np.float64) - values)
    # Dividing in float32 moves ties by parts in 2**24 of the largest code.
    quantized = format.maximum - format.minimum
    assert error.max() <= float(parameters.scale) * (0.5 + quantized * 2.0**-23)


def test_a_large_tensor_is_quantized_in_little_memory() -> None:
    values = np.ones((4096, 2048), np.float32)
    parameters = QuantParams(np.ones((4096, 64), np.float32), None, block=(1, 32))
    tracemalloc.start()
    tensor = quantize(values, parameters, FORMATS["int4"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The quantized values themselves and what one piece takes.
    assert peak < values.nbytes // 4 + 9 * PIECE
    tracemalloc.start()
    tensor.dequantize()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes + 9 * PIECE


def test_float64_and_float16_values_are_quantized_in_float32() -> None:
    parameters = QuantParams(np.array(0.1, np.float32), None)
    for dtype in (np.float16, np.float64):
        values = np.array([0.05, 0.25, -12.6], dtype)
        expected = quantize(values.astype(np.float32), parameters, NARROW).values
        np.testing.assert_array_equal(quantize(values, parameters, NARROW).values, expected)


def test_the_reference_opset_reads_every_format() -> None:
    for format in FORMATS.values():
        schema = onnx.defs.get_schema("DequantizeLinear", format.opset)
        stored = f"uint{format.bits}" if format.codebook is not None else format.name
        name = f"tensor({stored.split('-')[0]})"
        assert name in next(one.allowed_type_strs for one in schema.type_constraints if one.type_param_str[0] == "T")


# Codes with a scale for each block.


@pytest.mark.parametrize("format", [one for one in FORMATS.values() if one.bits <= 8], ids=lambda one: one.name)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0, 1e-30, 1e30])
def test_every_code_of_a_small_format_comes_back(format: QuantDType, scale: float) -> None:
    finite = (format.values >= format.minimum) & (format.values <= format.maximum)
    quantized = format.round(format.values[finite])
    parameters = QuantParams(np.full((1,), scale, np.float32), None)
    values = dequantize(quantized, parameters, format)
    np.testing.assert_array_equal(values, format.values[finite] * np.float32(scale))
    assert quantize(values, parameters, format).values.tobytes() == quantized.tobytes()


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150)
@given(shapes, st.data(), st.sampled_from(list(FORMATS.values())), st.integers(0, 2**32 - 1))
def test_a_scale_of_a_block_equals_the_repeated_one(
    shape: tuple[int, ...], data: st.DataObject, format: QuantDType, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    block = tuple(data.draw(st.integers(1, extent + 1)) for extent in shape)
    grid = tuple(-(-extent // length) for extent, length in zip(shape, block, strict=True))
    values = generator.normal(0, 5, shape).astype(np.float32)
    scale = generator.uniform(0.01, 2, grid).astype(np.float32)
    level = np.float32(generator.uniform(0.5, 2)) if data.draw(st.booleans()) else None
    zero = None
    if not format.is_float and data.draw(st.booleans()):
        zero = generator.integers(format.minimum, format.maximum, grid).astype(format.dtype)

    def spread(parameter: NDArray[np.generic]) -> NDArray[np.generic]:
        return parameter[np.ix_(*(np.arange(extent) // length for extent, length in zip(shape, block, strict=True)))]

    repeated = QuantParams(spread(scale * (level or np.float32(1))), None if zero is None else spread(zero))
    even = all(extent % length == 0 for extent, length in zip(shape, block, strict=True))
    one = quantize(values, QuantParams(scale, zero, level, None if even else block), format)
    other = quantize(values, repeated, format)
    np.testing.assert_array_equal(one.values.view(np.uint8), other.values.view(np.uint8))
    np.testing.assert_array_equal(one.dequantize(), other.dequantize())
    plain = format.round(values / repeated.scale) if zero is None else one.values
    np.testing.assert_array_equal(one.values.view(np.uint8), plain.view(np.uint8))


# Codes are those of onnxruntime, and decode as there.


@cache
def session(op: str, onnx_type: int) -> Session:
    stored, real = helper.make_tensor_value_info, TensorProto.FLOAT
    source, result = (real, onnx_type) if op == "QuantizeLinear" else (onnx_type, real)
    inputs = [stored("x", source, None), stored("scale", real, []), stored("zero", onnx_type, [])]
    node = helper.make_node(op, ["x", "scale", "zero"], ["y"])
    graph = helper.make_graph([node], "one", inputs, [stored("y", result, None)])
    return open_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def edge_values(scale: float) -> NDArray[np.float32]:
    """Return ties and their neighbours, all quantized values, values beyond them, and infinities."""
    quantized = np.arange(-300, 300, dtype=np.float64)
    ties = (np.concatenate([quantized, quantized + 0.5]) * scale).astype(np.float32)
    near = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    rest = np.array([0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, np.inf, -np.inf, 7e4 * scale, -7e4 * scale], np.float32)
    return np.concatenate([ties, near, rest])


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda format: format.name)
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.1, 0.0235294122248888, 3.1e-5, 1e30])
def test_codes_are_those_of_onnxruntime(format: QuantDType, scale: float) -> None:
    values = edge_values(scale)
    for zero_point in {0, format.minimum, format.maximum, (format.minimum + format.maximum) // 3}:
        zero = np.array(zero_point, format.dtype)
        with np.errstate(over="ignore"):
            ours = quantize(values, QuantParams(np.array(scale, np.float32), zero), format).values
        # onnxruntime knows whole types only.
        feeds = {"x": values, "scale": np.array(scale, np.float32), "zero": zero}
        theirs = run(session("QuantizeLinear", format.onnx_type), feeds)[0].astype(np.int64)
        np.testing.assert_array_equal(ours, np.clip(theirs, format.minimum, format.maximum))


@pytest.mark.parametrize("format", [*QUANTIZED, FORMATS["int32"]], ids=lambda format: format.name)
def test_every_code_decodes_as_in_onnxruntime(format: QuantDType) -> None:
    few = [-(2**31), -(2**30) - 1, -1, 0, 1, 2**24 + 1, 2**31 - 1]
    quantized = np.array(few if format.bits > 16 else np.arange(format.minimum, format.maximum + 1), format.dtype)
    for scale in (1.0, 0.1, 1.1754944e-38, 1e28):
        for zero_point in {0} if format.bits > 16 else {0, format.minimum, format.maximum}:
            zero = np.array(zero_point, format.dtype)
            feeds = {"x": quantized, "scale": np.array(scale, np.float32), "zero": zero}
            expected = run(session("DequantizeLinear", format.onnx_type), feeds)[0]
            parameters = QuantParams(np.array(scale, np.float32), zero)
            np.testing.assert_array_equal(dequantize(quantized, parameters, format), expected)


# Ranges of blocks to scales: roundings, levels, and powers of two.

BLOCK = (1,)


finite = st.floats(-1e30, 1e30) | st.sampled_from([0.0, 5e-324, -5e-324, 1e-45])


def scales_of(spec: QuantSpec, *magnitudes: float) -> list[float]:
    high = np.array(magnitudes)
    return params_of_blocks(-high, high, spec, BLOCK).scale.tolist()


@given(finite, finite, st.sampled_from([name for name in FORMATS if not FORMATS[name].is_float]), st.booleans())
def test_a_float32_scale_is_that_of_an_activation(a: float, b: float, name: str, symmetric: bool) -> None:
    symmetric = symmetric and FORMATS[name].signed
    low, high = np.array([min(a, b)]), np.array([max(a, b)])
    found = params_of_blocks(low, high, QuantSpec(name, symmetric=symmetric), BLOCK)
    expected = params_from_range(low, high, FORMATS[name], symmetric=symmetric)
    np.testing.assert_array_equal(found.scale, expected.scale)
    np.testing.assert_array_equal(found.zero_point, expected.zero_point)


@pytest.mark.parametrize(
    ("name", "scale", "rounding", "magnitude", "expected"),
    [
        # The largest value of a float format is that of the block.
        ("float8e4m3fn", "float32", Rounding.UP, 448.0, 1.0),
        ("float8e4m3fn", "float32", Rounding.UP, 0.0, 1.0),
        ("float4e2m1", "float32", Rounding.UP, 3.0, 0.5),
        ("float4e2m1", "ue4m3", Rounding.UP, 6 * 0.3, 0.3125),
        ("float4e2m1", "ue4m3", Rounding.NEAREST, 6 * 0.3, 0.3125),
        # Rounding up clips nothing, and the nearest scale may.
        ("int4-narrow", "e8m0", Rounding.UP, 7 * 1.1, 2.0),
        ("int4-narrow", "e8m0", Rounding.NEAREST, 7 * 1.1, 1.0),
    ],
)
def test_scales_come_to_the_grid_of_their_format(
    name: str, scale: str, rounding: Rounding, magnitude: float, expected: float
) -> None:
    assert scales_of(QuantSpec(name, scale=scale, scale_rounding=rounding), magnitude) == [expected]


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
    spec = QuantSpec(name, scale="e8m0", scale_rounding=Rounding.FLOOR)
    power = 2.0 ** (np.frexp(magnitude)[1] - 1)
    assert power <= magnitude < 2 * power
    assert scales_of(spec, magnitude) == [power / 2**exponent]


@pytest.mark.parametrize("scale", ["float16", "ue4m3"])
def test_two_levels_bring_the_largest_scale_to_the_end_of_its_format(scale: str) -> None:
    spec = QuantSpec("int8-narrow", granularity=Granularity.CHANNEL, scale=scale, two_level=True)
    for size in (1e-20, 1.0, 1e30):
        high = np.array([1.8, 0.04, 0.9, 0.0]) * size
        found = params_of_blocks(-high, high, spec, BLOCK)
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


# Scales that leave an int32 accumulator room for the bias, which cannot overflow then.


def weight_parameters(weight: NDArray[np.float32], format: QuantDType, *, per_channel: bool) -> QuantParams:
    low, high = (end(weight, axis=1 if per_channel else None, keepdims=per_channel) for end in (np.min, np.max))
    return params_from_range(low, high, format, symmetric=True)


def quantize_weight_with_bias(
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    format: QuantDType,
    input_scale: float,
    *,
    per_channel: bool,
) -> tuple[QTensor, QTensor]:
    alone = weight_parameters(weight, format, per_channel=per_channel)
    quantized = quantize(weight, QuantParams(raise_scale_for_bias(alone.scale, bias, input_scale), None), format)
    return quantized, quantize_bias(bias, quantized, input_scale)


@settings(max_examples=200)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.floats(2.0**-60, 2.0**40, width=32),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e6]),
    st.sampled_from([0.0, 1e-20, 1.0, 1e9, 1e30]),
    st.booleans(),
    st.sampled_from([NARROW, FORMATS["int8"]]),
    st.integers(0, 2**32 - 1),
)
def test_bias_and_products_never_overflow_int32(
    outputs: int,
    terms: int,
    input_scale: float,
    weight_size: float,
    bias_size: float,
    per_channel: bool,
    format: QuantDType,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    weight = (generator.normal(size=(outputs, terms)) * weight_size).astype(np.float32)
    bias = (generator.normal(size=outputs) * bias_size).astype(np.float32)
    quantized, bias_codes = quantize_weight_with_bias(weight, bias, format, input_scale, per_channel=per_channel)
    # The largest sum that 255 steps of data can make, whatever the zero point.
    products = 255 * np.abs(quantized.values.astype(np.int64)).sum(axis=1)
    assert np.abs(bias_codes.values.astype(np.int64)).max() <= 2**30 + 1
    assert (products + np.abs(bias_codes.values.astype(np.int64))).max() < 2**31
    assert np.isfinite(quantized.parameters.scale).all()
    # The kernel knows no scale of the bias: it is the product of the other two.
    product = np.float32(input_scale) * quantized.parameters.scale.reshape(bias_codes.parameters.scale.shape)
    np.testing.assert_allclose(bias_codes.parameters.scale, product, rtol=1e-6)
    assert quantized.parameters.scale.shape == ((outputs, 1) if per_channel else ())
    assert bias_codes.parameters.scale.shape == ((outputs,) if per_channel and outputs > 1 else ())


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_an_ordinary_bias_errs_by_half_its_scale_at_most(seed: int, per_channel: bool) -> None:
    generator = np.random.default_rng(seed)
    weight, bias = generator.normal(size=(4, 7)).astype(np.float32), generator.normal(size=4).astype(np.float32)
    quantized, bias_codes = quantize_weight_with_bias(weight, bias, NARROW, 0.02, per_channel=per_channel)
    alone = weight_parameters(weight, NARROW, per_channel=per_channel)
    np.testing.assert_array_equal(quantized.values, quantize(weight, alone, NARROW).values)
    error = np.abs(bias_codes.dequantize() - bias)
    assert (error <= 0.51 * bias_codes.parameters.scale + 1e-6).all()


@pytest.mark.parametrize(
    ("bias", "per_channel", "raised", "kept"),
    [
        ([0.1, 1e9], True, [False, True], [0, 1]),
        ([0.1, 1e9], False, [True], [1]),
        # Groups share the scales of a weight.
        ([0.1, 0.2, -0.3, 1e9], True, [False, True], [0, 2, 3]),
    ],
    ids=["its channel alone", "the only scale", "groups"],
)
def test_a_huge_bias_raises_the_scale(
    bias: list[float], per_channel: bool, raised: list[bool], kept: list[int]
) -> None:
    weight, expected = np.ones((2, 3), np.float32), np.array(bias, np.float32)
    quantized, bias_codes = quantize_weight_with_bias(weight, expected, NARROW, 1e-3, per_channel=per_channel)
    scales = quantized.parameters.scale.reshape(-1)
    assert (scales > np.float32(1 / 127)).tolist() == raised
    assert scales.min() >= np.float32(1 / 127)
    np.testing.assert_allclose(bias_codes.dequantize()[kept], expected[kept], rtol=1e-4)
    if len(bias) > 2:
        np.testing.assert_array_equal(bias_codes.parameters.scale, np.float32(1e-3) * scales[[0, 1, 0, 1]])


# Ratios of noise to signal say what decibels say.


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [(1.0, 0.0, np.inf), (0.0, 0.0, np.inf), (0.0, 1.0, -np.inf), (1000.0, 1.0, 30.0), (1.0, 1e10, -100.0)],
)
def test_decibels_of_energies_and_of_their_ratio(signal: float, noise: float, expected: float) -> None:
    assert sqnr_db(signal, noise) == pytest.approx(expected)
    if signal:
        assert sqnr_of_ratio(noise / signal) == pytest.approx(expected)


def test_what_is_not_finite_is_the_worst() -> None:
    assert worst_ratio(np.array([0.5, 2.0, 1.0])) == 2.0
    for bad in (math.nan, math.inf, -math.inf):
        assert sqnr_of_ratio(worst_ratio(np.array([0.5, bad]))) == -math.inf
    assert sqnr_of_ratio(worst_ratio(np.zeros(0))) == math.inf


@pytest.mark.parametrize(
    ("name", "symmetric", "low", "high", "scale", "zero_point"),
    [
        # Ranges are extended to zero.
        ("uint8", False, 2.0, 2.0, 0.00784314, 0),
        ("uint8", False, -2.0, -2.0, 0.00784314, 255),
        ("uint8", False, 0.0, 0.0, EPSILON, 0),
        ("int8", True, -1.8, 0.5, 1.8 / 127.5, None),
        ("uint8", True, -1.8, 0.5, 1.8 / 127.5, 128),
        ("int8-narrow", True, -1.8, 0.5, 1.8 / 127, None),
    ],
)
def test_observers_give_the_scales_of_torch(
    name: str, symmetric: bool, low: float, high: float, scale: float, zero_point: int | None
) -> None:
    found = Observer(name, symmetric).parameters([low], [high])
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert (None if found.zero_point is None else found.zero_point.item()) == zero_point


@pytest.mark.parametrize(
    ("values", "scale", "zero_point", "quantized"),
    [
        # The zero point is added before rounding, and the inverse of the scale is multiplied: division gives 127.
        ([0.5, 1.5, 2.5, -0.5], 1.0, 3, [4, 4, 6, 2]),
        ([0.273939937], 0.00214854861, 0, [128]),
    ],
)
def test_torch_rounds_in_its_own_order(
    values: list[float], scale: float, zero_point: int, quantized: list[int]
) -> None:
    parameters = QuantParams(np.array(scale, np.float32), np.array(zero_point, np.uint8))
    assert quantize_as_torch(np.float32(values), parameters, UINT8).values.tolist() == quantized


EIGHT_BITS = st.builds(Observer, st.sampled_from(["int8", "uint8"]), st.booleans())


@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32), EIGHT_BITS)
def test_zero_is_exact_and_no_scale_is_below_the_smallest(a: float, b: float, observer: Observer) -> None:
    found = observer.parameters([min(a, b)], [max(a, b)])
    assert found.scale[0] >= np.float32(EPSILON)
    tensor = quantize_as_torch(np.zeros(1), found, FORMATS[observer.format])
    assert tensor.dequantize().tolist() == [0.0]


@pytest.mark.parametrize(("low", "high", "zero_point"), [(0.0, 1.0, 0), (-1.0, 1.0, 128)])
def test_a_fixed_range_is_divided_by_256(low: float, high: float, zero_point: int) -> None:
    found = fixed_parameters(low, high)
    assert found.scale == np.float32((high - low) / 256)
    assert found.zero_point == zero_point


@pytest.mark.parametrize(
    ("values", "spec", "scale", "zero_point", "quantized"),
    [
        # Halves go away from zero.
        ([127.0, 0.5, 1.5, -2.5, 3.49], QuantSpec("int8-narrow"), 1.0, None, [127, 1, 2, -3, 3]),
        # The range is not extended to zero, and a zero point is truncated: the nearest is 72.
        ([0.5, 1.8], QuantSpec("int8-narrow"), 3.6 / 254, None, [35, 127]),
        ([-1.8, -1.0, 0.0, 0.5], QuantSpec("int8", symmetric=False), 2.3 / 255, 71, [-128, -40, 71, 126]),
        ([0.0, 0.0], QuantSpec("int8-narrow"), 0.1, None, [0, 0]),
        ([0.0, 0.0], QuantSpec("float4e2m1", scale="ue4m3"), 0.1015625, None, [0, 0]),
    ],
)
def test_burn_encodes_as_its_quantizer(
    values: list[float], spec: QuantSpec, scale: float, zero_point: int | None, quantized: list[int]
) -> None:
    found = encode(np.float32(values), spec)
    assert found.parameters.scale.item() == pytest.approx(scale, rel=1e-6)
    assert (None if found.parameters.zero_point is None else found.parameters.zero_point.item()) == zero_point
    assert found.values.astype(np.float32).tolist() == quantized


def test_halves_go_away_from_zero_and_nothing_else_does() -> None:
    values = np.array([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -0.49999997, 8388607.5, 1e30, np.inf], np.float32)
    assert half_away(values).tolist() == [1, -1, 2, 3, -3, 0, 0, 8388608, np.float32(1e30), np.inf]


@pytest.mark.parametrize(
    ("shape", "block", "grid"),
    [
        ((4, 12), (4,), (4, 3)),
        ((4, 12), (2, 4), (2, 3)),
        ((12,), (4,), (3,)),
        ((2, 2, 3, 4), (3, 4), (2, 2, 1, 1)),
    ],
)
def test_a_block_lies_along_the_last_axes(
    shape: tuple[int, ...], block: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert encode(values, QuantSpec("int8-narrow", granularity=block)).parameters.scale.shape == grid


def test_scales_below_the_smallest_normal_number_are_kept() -> None:
    assert stored_scale(np.float32([1e-7]), "float16")[0] == np.float32(2 * 2.0**-24)
    assert SCALE_FORMATS["float16"].round_up(np.float32([1e-7]))[0] == 2.0**-14


def test_two_levels_divide_by_the_product_of_both() -> None:
    values = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    spec = QuantSpec("float4e2m1", granularity=(16,), scale="ue4m3", two_level=True)
    tensor = encode(values, spec)
    product = tensor.parameters.scale * tensor.parameters.tensor_scale
    np.testing.assert_array_equal(tensor.parameters.effective_scale, product)
    np.testing.assert_array_equal(tensor.values.view(np.uint8), tensor.format.round(values / product).view(np.uint8))
    assert tensor.parameters.scale.max() == 448


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (QuantSpec("int8", granularity=Granularity.CHANNEL), "Burn has no scales per channel"),
        (QuantSpec("int8", method=Method.MSE), 'Burn has no method = "mse"'),
        (QuantSpec("int8", scale_rounding=Rounding.NEAREST), "Burn has no scale_rounding"),
        (QuantSpec("int8", granularity=(256,)), "Burn has no blocks longer than 255"),
        (QuantSpec("uint8", symmetric=False), "Burn has no offsets but of int8 tensors"),
    ],
)
def test_what_burn_has_not_is_told(spec: QuantSpec, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        encode(np.ones((4, 4), np.float32), spec)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("quantized", "scale", "zero_point", "expected"),
    [
        (np.array(5, np.int32), np.float32(0.5), np.array(1, np.int32), np.float32(2)),
        (np.array(939, np.int32), np.float32([0.5]), np.array(0, np.int32), np.float32(469.5)),
        (np.array([2**31 - 1, 2**31 - 2], np.int32), np.float32(1), np.array(2**31 - 3, np.int32), np.float32([2, 1])),
        (np.int8([2, 4]), np.float32([0.5, 2]), None, np.float32([1, 8])),
    ],
    ids=[
        "a scalar by a scalar",
        "a scalar by a vector",
        "wide numbers whose difference is small",
        "a vector by a vector",
    ],
)
def test_numbers_are_dequantized(
    quantized: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, expected: np.ndarray
) -> None:
    np.testing.assert_array_equal(dequantize_linear(quantized, scale, zero_point), np.array(expected), strict=True)
