"""Blocks, pairs and specs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from onnxq.errors import SchemeError
from onnxq.numerics.affine import QuantParams, quantize
from onnxq.numerics.blocks import block_shape, grid_shape, pieces
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.pairs import MOST, Pairs, fit_pairs, search_pair_scales
from onnxq.numerics.spec import Granularity, Method, QuantSpec, Rounding, Storage

SHAPE = (6, 4, 10)


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        (Granularity.TENSOR, (6, 4, 10)),
        (Granularity.CHANNEL, (6, 1, 10)),
        ((32,), (32, 1, 1)),
        ((1,), (1, 1, 1)),
        ((2, 16), (1, 2, 16)),
        ((4, 4, 8), (4, 4, 8)),
        ((1, 1, 4, 4, 8), (4, 4, 8)),
    ],
)
def test_a_block_lies_along_the_axes_that_it_names(
    granularity: Granularity | tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert block_shape(granularity, SHAPE, channel_axis=-2, reduction_axis=-3) == expected


def test_a_block_of_more_axes_than_the_weight_is_an_error() -> None:
    with pytest.raises(SchemeError, match=r"^blocks of \[2, 4, 4, 8\] have 4 axes and a weight of shape \[6, 4, 10\]"):
        block_shape((2, 4, 4, 8), SHAPE, channel_axis=0, reduction_axis=1)


axes = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 14)), max_size=4)


@given(axes, st.integers(1, 200))
def test_every_value_is_seen_once_beside_its_own_scale(sizes: list[tuple[int, int]], most: int) -> None:
    shape, block = tuple(extent for extent, _ in sizes), tuple(length for _, length in sizes)
    grid = grid_shape(shape, block)
    scale = np.arange(np.prod(grid, dtype=int)).reshape(grid)
    expected = scale[np.ix_(*(np.arange(extent) // length for extent, length in sizes))] if shape else scale
    seen = np.full(shape, -1)
    for piece in pieces(shape, block, most):
        view = piece.part(seen)
        assert np.shares_memory(view, seen)
        assert (view == -1).all()
        assert view.size == piece.size <= most
        view += 1 + piece.own(scale)
    np.testing.assert_array_equal(seen, expected)


@given(axes, st.integers(1, 200))
def test_terms_add_up_by_block(sizes: list[tuple[int, int]], most: int) -> None:
    shape, block = tuple(extent for extent, _ in sizes), tuple(length for _, length in sizes)
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    sums = np.zeros(grid_shape(shape, block))
    for piece in pieces(shape, block, most):
        piece.gather(piece.part(values), (np.add, sums))
    places = np.ix_(*(np.arange(extent) // length for extent, length in sizes)) if shape else ()
    expected = np.zeros_like(sums)
    np.add.at(expected, places, values)
    np.testing.assert_array_equal(sums, expected)


NARROW = FORMATS["int8-narrow"]
WAYS = [Pairs.ROW, Pairs.TAP]
SHAPES = st.sampled_from([(1, 1), (3, 8), (2, 7), (4, 3, 3, 3), (2, 1, 5), (2, 4, 2, 2)])
CODES = SHAPES.flatmap(lambda shape: arrays(np.int8, shape, elements=st.integers(-128, 127)))


def pairs_of(quantized: np.ndarray, way: Pairs) -> list[tuple[int, int]]:
    """Return the pairs of a convolution's weight, or a matrix's with rows of channels, one by one."""
    found = []
    for channel in quantized.reshape(*quantized.shape[:2], -1):
        taps = [[int(code) for code in tap] for tap in channel.T]
        rows = [[code for tap in taps for code in tap]] if way is Pairs.ROW else taps
        found += [(row[place], row[place + 1]) for row in rows for place in range(0, len(row) - 1, 2)]
    return found


@pytest.mark.parametrize("way", WAYS)
@given(quantized=CODES)
def test_two_products_with_any_data_fit_16_bits(way: Pairs, quantized: np.ndarray) -> None:
    found = pairs_of(fit_pairs(quantized, way, 0, 1), way)
    assert all(-(2**15) <= a * x + b * y < 2**15 for a, b in found for x, y in product((0, 255), repeat=2))


@pytest.mark.parametrize("way", WAYS)
@given(quantized=CODES)
def test_what_fits_stays_and_the_rest_gives_up_no_more_than_it_must(way: Pairs, quantized: np.ndarray) -> None:
    found = fit_pairs(quantized, way, 0, 1)
    assert np.array_equal(fit_pairs(found, way, 0, 1), found)
    for (a, b), (x, y) in zip(pairs_of(quantized, way), pairs_of(found, way), strict=True):
        excess = max(abs(a + b) - MOST, 0) if (a > 0) == (b > 0) else 0
        assert (abs(a) - abs(x)) + (abs(b) - abs(y)) == excess
        assert abs((abs(a) - abs(x)) - (abs(b) - abs(y))) <= 1
        assert a * x >= 0
        assert b * y >= 0


def test_matrices_of_a_stack_are_paired_along_what_is_summed() -> None:
    quantized = np.full((2, 3, 4), 100, np.int8)
    found = fit_pairs(quantized, Pairs.TAP, -1, -2)
    assert (found[:, :2] == 64).all()
    assert (found[:, 2] == 100).all()


def test_kernels_that_add_in_32_bits_keep_all_codes() -> None:
    quantized, scale = np.full((2, 4), 127, np.int8), np.ones((2, 1), np.float32)
    assert fit_pairs(quantized, Pairs.NONE, 0, 1) is quantized
    assert search_pair_scales(quantized.astype(np.float32), scale, Pairs.NONE, 0, 1) is scale


def lost(values: np.ndarray, scale: np.ndarray, way: Pairs) -> float:
    found = quantize(values, QuantParams(scale, None), NARROW)
    quantized = fit_pairs(found.values, way, 0, 1)
    return float(np.square(quantized * scale.astype(np.float64) - values).sum())


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


def test_a_spec_checks_its_names() -> None:
    with pytest.raises(SchemeError, match="did you mean 'int8'"):
        QuantSpec("Int8")
    with pytest.raises(SchemeError, match="number format 'int9'"):
        QuantSpec("int9", symmetric=False)
    with pytest.raises(SchemeError, match=r"^scale format 'float15' is not one of .* did you mean 'float16'\?$"):
        QuantSpec("int8", scale="float15")


def test_a_method_is_ours_by_its_name_or_that_of_somebody_elses_encoder() -> None:
    assert QuantSpec("int4", method="mse").method is Method.MSE
    mine = QuantSpec("float8e5m2", (32,), scale="e8m0", scale_rounding=Rounding.FLOOR, method="mine")
    assert (mine.method, mine.is_followed) == ("mine", False)
    assert [one for one in Method if QuantSpec("int8", method=one, symmetric=one is not Method.HQQ).is_followed] == [
        Method.BURN,
        Method.TORCH,
    ]
    with pytest.raises(SchemeError, match="the method is None of type NoneType, expected a Method such as"):
        QuantSpec("int4", method=None)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_spec(name: str) -> None:
    assert QuantSpec(name, symmetric=FORMATS[name].signed, granularity=(32,)).format == name


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"format": "uint4"},
            "uint4 has no negative values, so it cannot be symmetric; say symmetric = false or use int4",
        ),
        ({"format": "uint8-7bit"}, "uint8-7bit has no negative values"),
        ({"format": "float8e4m3fn", "symmetric": False}, "float8e4m3fn values have no zero point"),
        ({"format": "int8", "scale_rounding": Rounding.FLOOR}, 'scale_rounding = "floor" gives powers of two'),
        (
            {"format": "int8", "scale": "e8m0", "scale_rounding": Rounding.FLOOR, "symmetric": False},
            'scale_rounding = "floor" gives powers of two',
        ),
        (
            {"format": "int8", "scale": "e8m0", "scale_rounding": Rounding.FLOOR, "method": Method.MSE},
            'scale_rounding = "floor" decides the scale, so method = "mse" has nothing to choose',
        ),
        ({"format": "int8", "scale": "float16", "two_level": True}, "two_level multiplies several scales by one"),
        ({"format": "int8", "granularity": (32,), "two_level": True}, "two_level serves scales of a small range"),
        (
            {"format": "int8", "granularity": (32,), "scale": "e8m0", "two_level": True},
            "two_level serves scales of a small",
        ),
        ({"format": "int16", "method": Method.GPTQ}, 'method = "gptq" takes formats of 8 bits or fewer'),
        ({"format": "int4", "method": Method.HQQ}, 'method = "hqq" chooses zero points and symmetric values have none'),
        ({"format": "float6e2m3", "storage": Storage.WORDS}, 'storage = "words" holds values of 2, 4 or 8 bits'),
        ({"format": "int16", "storage": Storage.WORDS}, 'storage = "words" holds values of 2, 4 or 8 bits'),
        ({"format": "int4", "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "float8e5m2", "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "granularity": (32,), "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "scale": "float16", "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "storage": Storage.WORDS, "method": Method.TORCH}, 'method = "torch" makes 8-bit integers'),
        ({"format": "int8", "granularity": [32]}, "granularity is a Granularity or a tuple such as (32,), found [32]"),
        (
            {"format": "int8", "granularity": "channel"},
            "granularity is a Granularity or a tuple such as (32,), found 'channel'",
        ),
        ({"format": "int8", "granularity": ()}, "blocks have 1 to 5 extents of at least 1, found []"),
        ({"format": "int8", "granularity": (0,)}, "blocks have 1 to 5 extents of at least 1, found [0]"),
        (
            {"format": "int8", "granularity": (1,) * 6},
            "blocks have 1 to 5 extents of at least 1, found [1, 1, 1, 1, 1, 1]",
        ),
    ],
)
def test_choices_that_contradict_each_other_are_told(choices: dict[str, object], message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        QuantSpec(**choices)
    assert str(caught.value).startswith(message)
