"""Small floating-point codes against ml_dtypes, for layouts of the table and others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.numerics.formats import Minifloat, narrowed

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
    codes = np.empty(values.shape, np.uint8)
    layout.encode_into(values.astype(np.float32), codes)
    return codes


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    layout, dtype = LAYOUTS[name], np.dtype(getattr(ml_dtypes, name))
    generator = np.random.default_rng(0)
    sizes = np.exp2(generator.uniform(-20, 20, 50_000))
    values = np.clip(generator.normal(size=50_000) * sizes, -layout.maximum, layout.maximum).astype(np.float32)
    np.testing.assert_array_equal(encoded(layout, values), values.astype(dtype).view(np.uint8))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_sign_of_zero_is_kept(layout: Minifloat) -> None:
    assert encoded(layout, np.array([0.0, 1e-30, 1e-42, -0.0, -1e-30, -1e-42])).tolist() == [
        *[0] * 3,
        *[1 << (layout.bits - 1)] * 3,
    ]


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
    assert encoded(LAYOUTS["float8_e4m3fn"], narrowed(np.array([above]))).view(ml_dtypes.float8_e4m3fn)[0] == 1.125


def test_float32_is_copied() -> None:
    values = np.array([0.1, np.nan, np.inf], np.float32)
    found = narrowed(values)
    np.testing.assert_array_equal(found, values)
    assert not np.shares_memory(found, values)
