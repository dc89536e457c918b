"""Codes whose products a kernel adds in 16 bits, pair by pair, without saturating.

Without VNNI an x86 processor multiplies uint8 data with int8 weights and adds two neighbouring products in 16 bits,
which saturate (Intel 64 and IA-32 Architectures Software Developer's Manual, PMADDUBSW). Whatever the data, nothing is
lost where the weights of one sign in a pair add up to no more than 128. Few pairs of 8-bit weights have more, so that
these keep nearly all of their precision, of which 7 bits for all would lose half.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.numerics.formats import QuantDType

Array = npt.NDArray[Any]
MOST: Final = (2**15 - 1) // (2**8 - 1)
"""What the weights of one sign in a pair may add up to, as codes: times 255 it fits 16 bits."""

_BITS: Final = 8
# So many scales are weighed, from those that clip no weight to those that clip no pair.
_TRIED: Final = 9
# The mean squared error of rounding, in units of the square of a scale.
_ROUNDING: Final = 1 / 12


class Pairs(StrEnum):
    """Which weights a kernel takes in pairs: 0 and 1, 2 and 3 and so on, along what it sums over."""

    NONE = "none"
    """It adds products in 32 bits."""
    ROW = "row"
    """All weights of an output channel lie one behind another: the channels of a tap, then those of the next."""
    TAP = "tap"
    """Each tap of a convolution, or matrix of a stack, begins with a pair of its own."""


def may_be_paired(format: QuantDType) -> bool:
    """Whether codes of a format are multiplied by uint8 data in kernels that may add pairs of products in 16 bits."""
    return format.bits == _BITS and format.dtype == np.int8


def fit_pairs(codes: Array, pairs: Pairs, axis: int, reduction_axis: int) -> Array:
    """Return codes whose pairs fit: of those that do not, both weights give up half of what is too much.

    Args:
        codes: int8, of two axes or more.
        pairs: which are pairs.
        axis: of its output channels.
        reduction_axis: that is summed over.

    >>> fit_pairs(np.array([[100, 60, 100, -60, 127]], np.int8), Pairs.ROW, 0, 1)
    array([[ 84,  44, 100, -60, 127]], dtype=int8)
    """
    if pairs is Pairs.NONE:
        return codes
    order = kernel_order(codes.ndim, axis, reduction_axis)
    # A copy, of which rows are a view.
    ordered = np.array(codes.transpose(order), order="C")
    rows = _rows(ordered, pairs)
    even = rows.shape[1] // 2 * 2
    first, second = rows[:, :even:2], rows[:, 1:even:2]
    # Neither is less than what is too much, as the other is no more than fits alone: no sign turns.
    excess = np.maximum(_sums(rows.astype(np.int16)) - MOST, 0)
    sign = np.sign(first)
    first -= sign * (excess // 2).astype(np.int8)
    second -= sign * (excess - excess // 2).astype(np.int8)
    return np.ascontiguousarray(ordered.transpose(np.argsort(order)))


def search_pair_scales(
    values: Array, scale: Array, pairs: Pairs, axis: int, reduction_axis: int
) -> npt.NDArray[np.float32]:
    """Return the scales of least squared error where codes are rounded and then fitted.

    Larger scales round more coarsely and leave less of large pairs to be given up.

    Args:
        values: of a float type and two axes or more.
        scale: float32 scales that clip no weight: one for each channel, or one.
        pairs: which are pairs.
        axis: of output channels.
        reduction_axis: that is summed over.

    Returns:
        Scales of that shape, none of which is smaller.

    >>> values, scale = np.array([[127.0, 127.0], [127.0, -1.0]]), np.ones((2, 1), np.float32)
    >>> search_pair_scales(values, scale, Pairs.ROW, 0, 1)
    array([[1.984375],
           [1.      ]], dtype=float32)
    """
    if pairs is Pairs.NONE:
        return scale
    ordered = np.ascontiguousarray(values.transpose(kernel_order(values.ndim, axis, reduction_axis)), np.float32)
    sums, least = _sums(_rows(ordered, pairs)).reshape(scale.size, -1), scale.reshape(-1, 1)
    most = np.maximum(sums.max(axis=1, keepdims=True, initial=0) / np.float32(MOST), least)
    best, error = least, np.full(least.shape, np.inf)
    for power in np.linspace(0, 1, _TRIED, dtype=np.float32) if (most > least).any() else ():
        tried = least * (most / least) ** power
        given_up = np.square(np.maximum(sums - tried * MOST, 0)).sum(axis=1, keepdims=True, dtype=np.float64) / 2
        total = given_up + values.size / scale.size * _ROUNDING * np.square(tried, dtype=np.float64)
        best, error = np.where(total < error, tried, best), np.minimum(total, error)
    return best.reshape(scale.shape).astype(np.float32, copy=False)


def kernel_order(rank: int, axis: int, reduction_axis: int) -> tuple[int, ...]:
    """Return the axes of a weight as kernels read it: channels outermost, what is summed over innermost."""
    axis, reduction_axis = axis % rank, reduction_axis % rank
    return (axis, *(other for other in range(rank) if other not in (axis, reduction_axis)), reduction_axis)


def row_shape(ordered: tuple[int, ...], pairs: Pairs) -> tuple[int, int]:
    """Return the shape in rows, each of which begins with a pair, of a weight whose axes are in that order."""
    return (ordered[0], -1) if pairs is Pairs.ROW else (-1, ordered[-1])


def _rows(ordered: Array, pairs: Pairs) -> Array:
    """Return a view of a weight in rows, each of which begins with a pair."""
    return ordered.reshape(row_shape(ordered.shape, pairs))


def _sums(rows: Array) -> Array:
    """Return what the values of each pair of a row add up to in magnitude; 0 where their signs differ."""
    even = rows.shape[1] // 2 * 2
    first, second = rows[:, :even:2], rows[:, 1:even:2]
    return np.where((first > 0) == (second > 0), np.abs(first + second), 0)
