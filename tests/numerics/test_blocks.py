"""Blocks and the walk over them: every value once, beside its own scale, and nothing copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import SchemeError
from onnxq.numerics.blocks import block_shape, grid_shape, pieces
from onnxq.numerics.spec import Granularity

SHAPE = (6, 4, 10)


@pytest.mark.parametrize(
    ("per", "expected"),
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
    per: Granularity | tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert block_shape(per, SHAPE, channel_axis=-2, reduction_axis=-3) == expected


def test_a_block_of_more_axes_than_the_weight_is_an_error() -> None:
    with pytest.raises(SchemeError, match=r"^blocks of \[2, 4, 4, 8\] have 4 axes and a weight of shape \[6, 4, 10\]"):
        block_shape((2, 4, 4, 8), SHAPE, channel_axis=0, reduction_axis=1)


def test_an_empty_axis_has_no_blocks() -> None:
    block = block_shape(Granularity.CHANNEL, (0, 4), channel_axis=1, reduction_axis=0)
    assert grid_shape((0, 4), block) == (0, 4)
    assert list(pieces((0, 4), block)) == []


axes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), max_size=4)


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
