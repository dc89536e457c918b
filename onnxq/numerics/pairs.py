"""Weights whose pairwise products fit the 16-bit accumulator of x86 processors without VNNI.

Without VNNI an x86 processor multiplies uint8 activations with int8 weights and adds two neighbouring products in 16
bits, which saturate (Intel 64 and IA-32 Architectures Software Developer's Manual, PMADDUBSW). No activation can
overflow the sum if the weights of one sign in each pair add up to at most 128. Few pairs of 8-bit weights exceed the
limit, so the weights keep nearly all of their precision. Reducing all weights to 7 bits would lose half of it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.numerics.formats import QuantDType

Array = npt.NDArray[Any]
MOST: Final = (2**15 - 1) // (2**8 - 1)
"""Largest sum of the weights of one sign in a pair, as integers: times 255 it fits 16 bits."""

_BITS: Final = 8
# Number of scales to try, from the one that clips no weight to the one that clips no pair.
_TRIED: Final = 9
# Mean squared error of rounding, in units of the squared scale.
_ROUNDING: Final = 1 / 12


class Pairs(StrEnum):
    """Which weights a kernel multiplies in pairs: 0 and 1, 2 and 3 and so on, along the reduction."""

    NONE = "none"
    """No pairs: the kernel adds products in 32 bits."""
    ROW = "row"
    """The weights of an output channel form one row: the input channels of a tap, then those of the next tap."""
    TAP = "tap"
    """Each tap of a convolution, or matrix of a batch, starts a new row."""
    BOTH = "both"
    """The weights are for kernels of either kind."""

    @property
    def each(self) -> tuple[Pairs, ...]:
        """The kinds of pairs that weights have to fit."""
        return {Pairs.NONE: (), Pairs.BOTH: (Pairs.ROW, Pairs.TAP)}.get(self, (self,))


def may_be_paired(format: QuantDType) -> bool:
    """Whether a kernel may multiply this format with uint8 activations and add pairs of products in 16 bits."""
    return format.bits == _BITS and format.dtype == np.int8


def fit_pairs(quantized: Array, pairs: Pairs, axis: int, reduction_axis: int) -> Array:
    """Reduce both weights of each pair that exceeds the limit by half of the excess.

    Args:
        quantized: int8 weights with two axes or more.
        pairs: how the kernel forms pairs.
        axis: axis of the output channels.
        reduction_axis: axis of the sum.

    >>> fit_pairs(np.array([[100, 60, 100, -60, 127]], np.int8), Pairs.ROW, 0, 1)
    array([[ 84,  44, 100, -60, 127]], dtype=int8)
    """
    if pairs is Pairs.NONE:
        return quantized
    order = kernel_order(quantized.ndim, axis, reduction_axis)
    # A copy; `rows` is a view of it.
    ordered = np.array(quantized.transpose(order), order="C")
    # Weights only become smaller, so pairs of the first kind still fit after the second.
    for kind in pairs.each:
        rows = _rows(ordered, kind)
        even = rows.shape[1] // 2 * 2
        first, second = rows[:, :even:2], rows[:, 1:even:2]
        # Both weights exceed the excess, because each alone fits the limit. So no sign changes.
        excess = np.maximum(_sums(rows.astype(np.int16)) - MOST, 0)
        sign = np.sign(first)
        first -= sign * (excess // 2).astype(np.int8)
        second -= sign * (excess - excess // 2).astype(np.int8)
    return np.ascontiguousarray(ordered.transpose(np.argsort(order)))


def search_pair_scales(
    values: Array, scale: Array, pairs: Pairs, axis: int, reduction_axis: int
) -> npt.NDArray[np.float32]:
    """Return the scales of least squared error for weights that are rounded and then passed to `fit_pairs`.

    A larger scale has a larger rounding error but reduces fewer pairs.

    Args:
        values: float weights with two axes or more.
        scale: float32 scales that clip no weight: one for each channel, or one.
        pairs: how the kernel forms pairs.
        axis: axis of the output channels.
        reduction_axis: axis of the sum.

    Returns:
        Scales of the same shape; none is smaller.

    >>> values, scale = np.array([[127.0, 127.0], [127.0, -1.0]]), np.ones((2, 1), np.float32)
    >>> search_pair_scales(values, scale, Pairs.ROW, 0, 1)
    array([[1.984375],
           [1.      ]], dtype=float32)
    """
    if pairs is Pairs.NONE:
        return scale
    ordered = np.ascontiguousarray(values.transpose(kernel_order(values.ndim, axis, reduction_axis)), np.float32)
    parts = [_sums(_rows(ordered, kind)).reshape(scale.size, -1) for kind in pairs.each]
    sums, least = np.concatenate(parts, axis=1), scale.reshape(-1, 1)
    most = np.maximum(sums.max(axis=1, keepdims=True, initial=0) / np.float32(MOST), least)
    best, error = least, np.full(least.shape, np.inf)
    for power in np.linspace(0, 1, _TRIED, dtype=np.float32) if (most > least).any() else ():
        tried = least * (most / least) ** power
        given_up = np.square(np.maximum(sums - tried * MOST, 0)).sum(axis=1, keepdims=True, dtype=np.float64) / 2
        total = given_up + values.size / scale.size * _ROUNDING * np.square(tried, dtype=np.float64)
        best, error = np.where(total < error, tried, best), np.minimum(total, error)
    return best.reshape(scale.shape).astype(np.float32, copy=False)


def kernel_order(rank: int, axis: int, reduction_axis: int) -> tuple[int, ...]:
    """Return the axes of a weight in the kernel's order: output channels outermost, reduction axis innermost."""
    axis, reduction_axis = axis % rank, reduction_axis % rank
    return (axis, *(other for other in range(rank) if other not in (axis, reduction_axis)), reduction_axis)


def row_shape(ordered: tuple[int, ...], pairs: Pairs) -> tuple[int, int]:
    """Return the two-dimensional shape of a weight in kernel order, where pairs start at the beginning of each row."""
    return (ordered[0], -1) if pairs is Pairs.ROW else (-1, ordered[-1])


def _rows(ordered: Array, pairs: Pairs) -> Array:
    return ordered.reshape(row_shape(ordered.shape, pairs))


def _sums(rows: Array) -> Array:
    """Return the magnitude of each pair's sum; 0 if the signs differ."""
    even = rows.shape[1] // 2 * 2
    first, second = rows[:, :even:2], rows[:, 1:even:2]
    return np.where((first > 0) == (second > 0), np.abs(first + second), 0)
