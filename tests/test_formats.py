"""The table of number formats: rounding, saturation and names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from onnxq.errors import SchemeError
from onnxq.formats import FORMATS, Format, format_named

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


@every_format
def test_a_row_agrees_with_itself(format: Format) -> None:
    info = np.iinfo(format.dtype)
    assert info.min <= format.minimum < format.maximum <= info.max
    assert helper.tensor_dtype_to_np_dtype(format.onnx_type) == format.dtype
    assert format.bits == format.dtype.itemsize * 8
    assert format.signed == (format.minimum < 0)
    assert FORMATS[format.name] is format


@every_format
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinities_and_large_values_saturate(format: Format, dtype: type) -> None:
    largest = np.finfo(dtype).max
    codes = format.round(np.array([-np.inf, -largest, largest, np.inf], dtype))
    expected = [format.minimum, format.minimum, format.maximum, format.maximum]
    if dtype is np.float16 and format.bits > 8:
        # The largest float16 lies inside the widest formats.
        expected[1:3] = max(format.minimum, -65504), min(format.maximum, 65504)
    assert codes.tolist() == expected


@every_format
def test_ties_round_to_even(format: Format) -> None:
    codes = format.round(np.array([0.5, 1.5, 2.5, 3.5, 62.5]))
    assert codes.tolist() == [0, 2, 2, 4, 62]
    assert codes.dtype == format.dtype


@every_format
def test_every_code_rounds_to_itself(format: Format) -> None:
    ends = range(format.minimum, format.minimum + 300), range(format.maximum - 300, format.maximum + 1)
    codes = np.array([code for end in ends for code in end if format.minimum <= code <= format.maximum], np.float64)
    assert format.round(codes).tolist() == codes.tolist()


@given(st.lists(st.floats(-1e12, 1e12), min_size=1), st.sampled_from(list(FORMATS.values())))
def test_rounding_is_monotone_and_stays_inside(values: list[float], format: Format) -> None:
    codes = format.round(np.sort(np.array(values))).astype(np.int64)
    assert (np.diff(codes) >= 0).all()
    assert format.minimum <= codes.min()
    assert codes.max() <= format.maximum


@given(st.floats(-1e12, 1e12), st.sampled_from(list(FORMATS.values())))
def test_rounding_errs_by_half_a_code_at_most(value: float, format: Format) -> None:
    inside = min(max(value, format.minimum), format.maximum)
    assert abs(int(format.round(np.array([value]))[0]) - inside) <= 0.5


def test_an_unknown_format_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^number format 'unit8' is not one of int8, .*; did you mean 'uint8'\?$"):
        format_named("unit8")
    assert format_named("int8-narrow").minimum == -127
