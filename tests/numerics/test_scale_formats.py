"""Scale formats: the neighbours of a scale, ties, and that none is ever unusable."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from onnxq.errors import SchemeError
from onnxq.numerics.formats import SCALE_FORMATS, ScaleFormat, scale_format_named

ALL = list(SCALE_FORMATS.values())
every_format = pytest.mark.parametrize("format", ALL, ids=list(SCALE_FORMATS))
TINY = float(np.finfo(np.float32).tiny)


def codes(format: ScaleFormat) -> np.ndarray:
    """Return every scale of a format of 16 bits or fewer."""
    width = format.dtype.itemsize
    with np.errstate(invalid="ignore"):
        found = np.arange(2 ** (8 * width), dtype=f"u{width}").view(format.dtype).astype(np.float64)
    return np.sort(found[(found >= format.smallest) & (found <= format.maximum)])


@every_format
def test_a_row_agrees_with_onnx_and_is_usable_in_float32(format: ScaleFormat) -> None:
    assert helper.tensor_dtype_to_np_dtype(format.onnx_type) == format.dtype
    for end in (format.smallest, format.maximum):
        assert np.array(end).astype(format.dtype).astype(np.float64) == end
        assert TINY <= end <= np.finfo(np.float32).max


@pytest.mark.parametrize("format", ALL[1:], ids=list(SCALE_FORMATS)[1:])
def test_every_scale_of_a_format_is_itself(format: ScaleFormat) -> None:
    for rounded in (format.round_up, format.round_nearest, format.round_down):
        np.testing.assert_array_equal(rounded(codes(format)), codes(format))


@pytest.mark.parametrize("format", ALL[1:], ids=list(SCALE_FORMATS)[1:])
def test_between_two_scales_each_rounding_goes_its_way(format: ScaleFormat) -> None:
    known = codes(format)
    for part in (0.01, 0.49, 0.51, 0.99):
        between = known[:-1] + part * np.diff(known)
        np.testing.assert_array_equal(format.round_down(between), known[:-1])
        np.testing.assert_array_equal(format.round_up(between), known[1:])
        np.testing.assert_array_equal(format.round_nearest(between), known[1:] if part > 0.5 else known[:-1])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "ue4m3"])
def test_a_tie_goes_to_the_even_code_as_a_cast_does(name: str) -> None:
    format = SCALE_FORMATS[name]
    known = codes(format)[:3000]
    ties = known[:-1] + np.diff(known) / 2
    np.testing.assert_array_equal(format.round_nearest(ties), ties.astype(format.dtype).astype(np.float32))


@given(st.floats(0, 1e300), st.sampled_from(ALL))
def test_every_scale_is_positive_finite_and_in_order(value: float, format: ScaleFormat) -> None:
    given = np.array([value])
    below, nearest, above = (
        float(rounded(given)[0]) for rounded in (format.round_down, format.round_nearest, format.round_up)
    )
    assert format.smallest <= below <= nearest <= above <= format.maximum
    inside = min(max(value, format.smallest), format.maximum)
    assert below <= inside <= above
    assert all(math.isfinite(one) and one >= TINY for one in (below, nearest, above))


def test_scales_of_any_shape_come_back_as_float32() -> None:
    for format in ALL:
        for shape in ((), (0,), (2, 3)):
            found = format.round_up(np.ones(shape))
            assert (found.shape, found.dtype) == (shape, np.float32)


def test_an_unknown_format_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^scale format 'fp16' is not one of float32, .*, ue4m3"):
        scale_format_named("fp16")
    with pytest.raises(SchemeError, match=r"did you mean 'bfloat16'\?$"):
        scale_format_named("bfloat6")
    assert scale_format_named("e8m0").maximum == 2.0**127
