"""Number formats: rounding, saturation, codebooks, and their scales."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxq.errors import SchemeError
from onnxq.numerics.formats import (
    FORMATS,
    SCALE_FORMATS,
    Codebook,
    Minifloat,
    QuantDType,
    ScaleFormat,
    format_named,
    narrowed,
    scale_format_named,
)
from onnxq.runtime.sessions import Session, open_session, run

ALL = list(FORMATS.values())
FLOATS = [format for format in ALL if format.minifloat is not None]
SMALL = [format for format in ALL if format.bits <= 8]


# No kernel of the runtime makes the other ones.
EXECUTED = [
    format
    for format in ALL
    if format.name != "int32" and format.name[:6] not in ("float4", "float6") and format.codebook is None
]


def named(format: QuantDType) -> str:
    return format.name


every_format = pytest.mark.parametrize("format", ALL, ids=named)
every_small = pytest.mark.parametrize("format", SMALL, ids=named)


def used(format: QuantDType) -> NDArray[np.generic]:
    """Return every finite code that rounding gives, in the order of its value."""
    patterns = np.flatnonzero((format.values >= format.minimum) & (format.values <= format.maximum)).astype(np.uint8)
    if format.bits < 8 and format.signed and not format.is_float:
        half = np.uint8(2 ** (format.bits - 1))
        patterns = (patterns ^ half) - half
    quantized = patterns.view(format.dtype)
    return quantized[np.argsort(format.numbers(quantized), kind="stable")]


def grid(format: QuantDType) -> NDArray[np.float64]:
    return np.unique(format.numbers(used(format)).astype(np.float64))


def edges(format: QuantDType) -> NDArray[np.float32]:
    """Return values of the grid, ties with their neighbours, values that saturate, denormals and infinities."""
    if format.bits <= 8:
        points = grid(format)
    else:
        ends = np.arange(300.0)
        points = np.unique(np.concatenate([format.minimum + ends, ends - 150 * format.signed, format.maximum - ends]))
    ties = (points[:-1] + points[1:]) / 2
    exact = np.concatenate([points, ties]).astype(np.float32)
    near = [np.nextafter(exact, np.float32(end)) for end in (np.inf, -np.inf)]
    rest = [-0.0, 1e-40, -1e-40, 1e-9, format.maximum * 1.01, format.maximum * 1e4, 3e9, 3.4e38, np.inf]
    return np.concatenate([exact, *near, np.float32(rest), -np.float32(rest)])


# --- the table ------------------------------------------------------------------------------------------------------


@every_format
def test_a_row_agrees_with_itself_and_with_onnx(format: QuantDType) -> None:
    onnx_type = helper.tensor_dtype_to_np_dtype(format.onnx_type)
    if format.codebook is not None:
        # Its quantized values are stored as plain numbers.
        assert onnx_type.name == f"uint{format.bits}"
        return
    assert onnx_type.name.replace("_", "") == format.name.split("-")[0].replace("float4e2m1", "float4e2m1fn") + (
        "fn" if format.name.startswith("float6") else ""
    )
    assert format.dtype.itemsize == max(format.bits, 8) // 8 if not format.is_float else 1
    assert format.signed == (format.minimum < 0)
    assert FORMATS[format.name] is format
    if format.is_float:
        assert format.dtype == onnx_type
        assert format.minimum == -format.maximum == grid(format)[0]
    else:
        info = np.iinfo(format.dtype)
        assert info.min <= format.minimum < format.maximum <= info.max
        assert format.maximum - format.minimum < 2**format.bits


def test_an_unknown_format_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^number format 'unit8' is not one of int8, .*; did you mean 'uint8'\?$"):
        format_named("unit8")
    assert format_named("int8-narrow").minimum == -127


@every_small
def test_values_lists_what_each_bit_pattern_means(format: QuantDType) -> None:
    assert format.values.shape == (2**format.bits,)
    quantized = used(format)
    patterns = quantized.view(np.uint8) & (2**format.bits - 1)
    np.testing.assert_array_equal(format.values[patterns], format.numbers(quantized))
    with pytest.raises(ValueError, match="read-only"):
        format.values[0] = 1


def test_the_grids_are_those_of_the_specifications() -> None:
    assert grid(FORMATS["float4e2m1"]).tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert grid(FORMATS["int4"]).tolist() == list(range(-8, 8))
    assert grid(FORMATS["int2-narrow"]).tolist() == [-1, 0, 1]
    assert [(format.name, len(grid(format))) for format in FLOATS] == [
        ("float8e4m3fn", 253),
        ("float8e5m2", 247),
        ("float4e2m1", 15),
        ("float6e2m3", 63),
        ("float6e3m2", 63),
    ]


def test_normal_floats_are_the_quantiles_that_define_them() -> None:
    # The outermost quantile is the mean of those that 15 and 16 equal parts of the distribution would begin with.
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(part) for part in np.linspace(outermost, 0.5, 9)[:-1]]
    below = [-quantile(part) for part in np.linspace(outermost, 0.5, 8)[:-1]]
    expected = np.sort([*below, 0.0, *above]) / max(above)
    np.testing.assert_allclose(FORMATS["nf4"].values, expected, atol=1e-6)


# --- rounding -------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinities_and_large_values_saturate(format: QuantDType, dtype: type) -> None:
    largest = np.finfo(dtype).max
    values = np.array([-np.inf, -largest, largest, np.inf], dtype)
    expected = [format.minimum, format.minimum, format.maximum, format.maximum]
    if dtype is np.float16:
        # The largest float16 lies inside the widest formats.
        expected[1:3] = max(format.minimum, -65504), min(format.maximum, 65504)
    assert format.numbers(format.round(values)).astype(np.float64).tolist() == pytest.approx(expected, rel=1e-7)


@every_format
def test_the_value_that_is_none_has_a_code_of_its_own_where_the_format_has_one(format: QuantDType) -> None:
    (found,) = format.numbers(format.round(np.array([1.0, np.nan, 1.0]))[1:2])
    if format.name.startswith("float8"):
        assert np.isnan(found)
    else:
        assert found == (0 if format.is_float else format.minimum)


@pytest.mark.parametrize("format", [format for format in ALL if format.bits > 8], ids=named)
def test_the_ends_of_wide_formats_round_to_themselves(format: QuantDType) -> None:
    ends = range(int(format.minimum), int(format.minimum) + 300), range(int(format.maximum) - 300, int(format.maximum))
    quantized = np.array([code for end in ends for code in end], np.float64)
    assert format.round(quantized).tolist() == quantized.tolist()


values = st.lists(st.floats(-1e12, 1e12), min_size=1)
formats = st.sampled_from(ALL)


@given(values, formats)
def test_rounding_is_monotone_and_stays_inside(given: list[float], format: QuantDType) -> None:
    rounded = format.round(np.sort(np.array(given)))
    quantized = (
        format.numbers(rounded).astype(np.float64) if format.codebook is not None else rounded.astype(np.float64)
    )
    assert (np.diff(quantized) >= 0).all()
    assert format.minimum <= quantized.min()
    assert quantized.max() <= format.maximum


@every_format
def test_any_shape_is_kept(format: QuantDType) -> None:
    for shape in ((), (0,), (2, 0, 3), (2, 3)):
        assert format.round(np.ones(shape, np.float32)).shape == shape
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(format.round(turned), format.round(turned.copy()))


# --- onnxruntime ----------------------------------------------------------------------------------------------------


@cache
def round_trip(onnx_type: int) -> Session:
    """Return a session of QuantizeLinear and DequantizeLinear, whose quantized values no numpy array would hold."""
    zero = helper.make_tensor("zero", onnx_type, [], [0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "one", "zero"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("x", "y")]
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph(nodes, "round_trip", ends[:1], ends[1:], [one, zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    return open_session(model, optimize=False)


@pytest.mark.parametrize("format", EXECUTED, ids=named)
def test_values_round_as_in_onnxruntime(format: QuantDType) -> None:
    given = edges(format)
    if format.bits == 2:
        # There the runtime turns what is far outside into the lowest code.
        given = given[np.abs(given) < 2**31]
    expected = run(round_trip(format.onnx_type), {"x": given})[0]
    inside = np.clip(expected, format.minimum, format.maximum)
    np.testing.assert_array_equal(format.round(given).astype(np.float32), inside)


LAYOUTS = {
    "float8_e4m3fn": Minifloat(4, 3, 448.0, 0x7F),
    "float8_e5m2": Minifloat(5, 2, 57344.0, 0x7E),
    "float8_e3m4": Minifloat(3, 4, 15.5),
    "float8_e4m3": Minifloat(4, 3, 240.0),
    "float6_e2m3fn": Minifloat(2, 3, 7.5),
    "float6_e3m2fn": Minifloat(3, 2, 28.0),
    "float4_e2m1fn": Minifloat(2, 1, 6.0),
}


def encoded(layout: Minifloat, values: np.ndarray) -> np.ndarray:
    quantized = np.empty(values.shape, np.uint8)
    layout.encode_into(values.astype(np.float32), quantized)
    return quantized


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    layout, dtype = LAYOUTS[name], np.dtype(getattr(ml_dtypes, name))
    generator = np.random.default_rng(0)
    sizes = np.exp2(generator.uniform(-20, 20, 50_000))
    points = np.arange(2**layout.bits, dtype=np.uint8).view(dtype).astype(np.float32)
    points = np.unique(points[np.isfinite(points)])
    ties = (points[:-1] + points[1:]) / 2
    near = [np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf)]
    # The sign of zero is kept.
    nothing = [0.0, -0.0, 1e-30, -1e-30, 1e-42, -1e-42]
    values = np.concatenate([generator.normal(size=50_000) * sizes, points, ties, *near, nothing])
    values = np.clip(values, -layout.maximum, layout.maximum).astype(np.float32)
    np.testing.assert_array_equal(encoded(layout, values), values.astype(dtype).view(np.uint8))


@given(st.floats(allow_nan=False))
def test_narrowing_keeps_on_which_side_of_a_coarser_tie_a_value_lies(value: float) -> None:
    single = float(narrowed(np.array([value]))[0])
    if not np.isfinite(single):
        assert abs(value) > float(np.finfo(np.float32).max)
        return
    # Every number of 12 mantissa bits is on the same side of both.
    tie = np.float32(single).view(np.int32) & ~np.int32(0xFFF)
    exact = float(np.int32(tie).view(np.float32))
    assert (single > exact) == (value > exact)
    assert (single < exact) == (value < exact)


def test_narrowing_makes_no_false_tie() -> None:
    above = 1.0 + 2.0**-4 + 2.0**-40
    assert np.float32(above) == 1.0625
    assert FORMATS["float8e4m3fn"].round(np.array([above])).tolist() == [1.125]


def test_float32_is_copied() -> None:
    values = np.array([0.1, np.nan, np.inf], np.float32)
    found = narrowed(values)
    np.testing.assert_array_equal(found, values)
    assert not np.shares_memory(found, values)


BOOK = Codebook((-2.0, -0.5, 0.0, 1.0))


def quantized(values: list[float]) -> list[int]:
    found = np.empty(len(values), np.uint8)
    BOOK.encode_into(np.array(values, np.float32), found)
    return found.tolist()


def test_a_book_of_four_numbers_has_codes_of_two_bits() -> None:
    assert (BOOK.bits, BOOK.zero) == (2, 2)
    assert (Codebook((0.0, 1.0, 2.0)).bits, Codebook((-1.0, 0.0)).bits) == (2, 1)


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([-2.0, -0.5, 0.0, 1.0], [0, 1, 2, 3]),
        ([-np.inf, -99.0, 99.0, np.inf], [0, 0, 3, 3]),
        # Between two numbers the lower one wins.
        ([-1.25, -0.25, 0.5, float(np.nextafter(np.float32(0.5), np.float32(1)))], [0, 1, 2, 3]),
    ],
)
def test_a_number_has_its_code_and_those_beyond_saturate(values: list[float], codes: list[int]) -> None:
    assert quantized(values) == codes


@given(st.floats(-4, 4, width=32))
def test_no_number_is_nearer(value: float) -> None:
    found = BOOK.numbers[quantized([value])[0]]
    assert abs(found - value) == min(abs(number - value) for number in BOOK.numbers)


ALL_SCALES = list(SCALE_FORMATS.values())
every_scale_format = pytest.mark.parametrize("format", ALL_SCALES, ids=list(SCALE_FORMATS))
TINY = float(np.finfo(np.float32).tiny)


def scale_codes(format: ScaleFormat) -> np.ndarray:
    """Return every scale of a format of 16 bits or fewer."""
    width = format.dtype.itemsize
    with np.errstate(invalid="ignore"):
        found = np.arange(2 ** (8 * width), dtype=f"u{width}").view(format.dtype).astype(np.float64)
    return np.sort(found[(found >= format.smallest) & (found <= format.maximum)])


@every_scale_format
def test_a_row_agrees_with_onnx_and_is_usable_in_float32(format: ScaleFormat) -> None:
    assert helper.tensor_dtype_to_np_dtype(format.onnx_type) == format.dtype
    for end in (format.smallest, format.maximum):
        assert np.array(end).astype(format.dtype).astype(np.float64) == end
        assert TINY <= end <= np.finfo(np.float32).max


@pytest.mark.parametrize("format", ALL_SCALES[1:], ids=list(SCALE_FORMATS)[1:])
def test_every_scale_of_a_format_is_itself(format: ScaleFormat) -> None:
    for rounded in (format.round_up, format.round_nearest):
        np.testing.assert_array_equal(rounded(scale_codes(format)), scale_codes(format))


@pytest.mark.parametrize("format", ALL_SCALES[1:], ids=list(SCALE_FORMATS)[1:])
def test_between_two_scales_each_rounding_goes_its_way(format: ScaleFormat) -> None:
    known = scale_codes(format)
    for part in (0.01, 0.49, 0.51, 0.99):
        between = known[:-1] + part * np.diff(known)
        np.testing.assert_array_equal(format.round_up(between), known[1:])
        np.testing.assert_array_equal(format.round_nearest(between), known[1:] if part > 0.5 else known[:-1])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "ue4m3"])
def test_a_tie_goes_to_the_even_code_as_a_cast_does(name: str) -> None:
    format = SCALE_FORMATS[name]
    known = scale_codes(format)[:3000]
    ties = known[:-1] + np.diff(known) / 2
    np.testing.assert_array_equal(format.round_nearest(ties), ties.astype(format.dtype).astype(np.float32))


@given(st.floats(0, 1e300), st.sampled_from(ALL_SCALES))
def test_every_scale_is_positive_finite_and_in_order(value: float, format: ScaleFormat) -> None:
    given = np.array([value])
    nearest, above = (float(rounded(given)[0]) for rounded in (format.round_nearest, format.round_up))
    assert format.smallest <= nearest <= above <= format.maximum
    assert min(max(value, format.smallest), format.maximum) <= above
    assert all(math.isfinite(one) and one >= TINY for one in (nearest, above))


def test_scales_of_any_shape_come_back_as_float32() -> None:
    for format in ALL_SCALES:
        for shape in ((), (0,), (2, 3)):
            found = format.round_up(np.ones(shape))
            assert (found.shape, found.dtype) == (shape, np.float32)


def test_an_unknown_scale_format_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^scale format 'fp16' is not one of float32, .*, ue4m3"):
        scale_format_named("fp16")
    with pytest.raises(SchemeError, match=r"did you mean 'bfloat16'\?$"):
        scale_format_named("bfloat6")
    assert scale_format_named("e8m0").maximum == 2.0**127
