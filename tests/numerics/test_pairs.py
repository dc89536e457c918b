"""Codes in pairs fit 16 bits whatever the data, and lose hardly more than what rounding loses."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from onnxq.numerics.affine import QuantParams, quantize
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.pairs import MOST, Pairs, fit_pairs, search_pair_scales

NARROW = FORMATS["int8-narrow"]
WAYS = [Pairs.ROW, Pairs.TAP]
SHAPES = st.sampled_from([(1, 1), (3, 8), (2, 7), (4, 3, 3, 3), (2, 1, 5), (2, 4, 2, 2)])
CODES = SHAPES.flatmap(lambda shape: arrays(np.int8, shape, elements=st.integers(-128, 127)))


def pairs_of(codes: np.ndarray, way: Pairs) -> list[tuple[int, int]]:
    """Return the pairs of a convolution's weight, or a matrix's with rows of channels, one by one."""
    found = []
    for channel in codes.reshape(*codes.shape[:2], -1):
        taps = [[int(code) for code in tap] for tap in channel.T]
        rows = [[code for tap in taps for code in tap]] if way is Pairs.ROW else taps
        found += [(row[place], row[place + 1]) for row in rows for place in range(0, len(row) - 1, 2)]
    return found


@pytest.mark.parametrize("way", WAYS)
@given(codes=CODES)
def test_two_products_with_any_data_fit_16_bits(way: Pairs, codes: np.ndarray) -> None:
    found = pairs_of(fit_pairs(codes, way, 0, 1), way)
    assert all(-(2**15) <= a * x + b * y < 2**15 for a, b in found for x, y in product((0, 255), repeat=2))


@pytest.mark.parametrize("way", WAYS)
@given(codes=CODES)
def test_what_fits_stays_and_the_rest_gives_up_no_more_than_it_must(way: Pairs, codes: np.ndarray) -> None:
    found = fit_pairs(codes, way, 0, 1)
    assert np.array_equal(fit_pairs(found, way, 0, 1), found)
    for (a, b), (x, y) in zip(pairs_of(codes, way), pairs_of(found, way), strict=True):
        excess = max(abs(a + b) - MOST, 0) if (a > 0) == (b > 0) else 0
        assert (abs(a) - abs(x)) + (abs(b) - abs(y)) == excess
        assert abs((abs(a) - abs(x)) - (abs(b) - abs(y))) <= 1
        assert a * x >= 0
        assert b * y >= 0


def test_matrices_of_a_stack_are_paired_along_what_is_summed() -> None:
    codes = np.full((2, 3, 4), 100, np.int8)
    found = fit_pairs(codes, Pairs.TAP, -1, -2)
    assert (found[:, :2] == 64).all()
    assert (found[:, 2] == 100).all()


def test_kernels_that_add_in_32_bits_keep_all_codes() -> None:
    codes, scale = np.full((2, 4), 127, np.int8), np.ones((2, 1), np.float32)
    assert fit_pairs(codes, Pairs.NONE, 0, 1) is codes
    assert search_pair_scales(codes.astype(np.float32), scale, Pairs.NONE, 0, 1) is scale


def lost(values: np.ndarray, scale: np.ndarray, way: Pairs) -> float:
    found = quantize(values, QuantParams(scale, None), NARROW)
    codes = fit_pairs(found.codes, way, 0, 1)
    return float(np.square(codes * scale.astype(np.float64) - values).sum())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("shape", [(16, 96), (8, 15), (16, 24, 3, 3), (8, 3, 3, 3)])
def test_scales_lose_less_than_those_that_clip_no_weight_or_no_pair(
    way: Pairs, single: bool, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    axes = None if single else tuple(range(1, len(shape)))
    scale = np.abs(values).max(axes, keepdims=True) / np.float32(127)
    found = search_pair_scales(values, scale, way, 0, 1)
    assert found.shape == scale.shape
    assert found.dtype == np.float32
    assert (found >= scale).all()
    # Of halved scales, as 7 bits have them, no pair is too much.
    assert lost(values, found, way) <= min(lost(values, scale, way), lost(values, 2 * scale, way)) * 1.02


def test_weights_of_a_normal_distribution_lose_a_third_of_what_7_bits_lose() -> None:
    values = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
    plain, narrow = lost(values, scale, Pairs.NONE), lost(values, 2 * scale, Pairs.NONE)
    assert plain <= lost(values, search_pair_scales(values, scale, Pairs.ROW, 0, 1), Pairs.ROW) < plain + narrow / 3


def test_scales_of_weights_that_fit_stay_to_the_bit() -> None:
    values = np.tile(np.float32([1.0, -0.9, 0.3, 0.2]), (3, 5))
    scale = np.full((3, 1), 1 / np.float32(127))
    assert np.array_equal(search_pair_scales(values, scale, Pairs.ROW, 0, 1), scale)


def test_a_channel_of_zeros_keeps_its_scale() -> None:
    assert search_pair_scales(np.zeros((1, 4)), np.ones((1, 1), np.float32), Pairs.ROW, 0, 1).tolist() == [[1.0]]
