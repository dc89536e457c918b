"""Scales and zero points of least squared error for integers with float scales, by alternating least squares.

For a given scale the nearest integers have the least error, and for given integers the scale `<x, q> / <q, q>`, so
neither step raises it (the two conditions of Lloyd 1982, "Least squares quantization in PCM", for evenly spaced
levels). The error of a short block has many minima, so several scales begin.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import SMALLEST_SCALE, Floats, QuantParams, on_grid
from onnxq.numerics.blocks import Shape, whole_blocks
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.spec import QuantSpec

Singles = npt.NDArray[np.float32]

_FLOAT_SCALES: Final = frozenset({"float32", "float16", "bfloat16"})
# float32 holds each of these integers, and the middle between two of them.
_MOST_BITS = 16
# With more bits, rounding of sums in float32 hides which of two scales errs less.
_MOST_BITS_OF_STARTS = 8
# Scales to begin with, as parts of that of the whole range; 2 bits and long blocks need the smallest. One more scale is
# larger, by this part of a step at the end of the range: other values of a short block may gain from it.
_STARTS: Final = tuple(0.94 * 0.92**step for step in range(20))
_WIDENED: Final = 0.4
# The error of a long block is smooth, and its scale moves little in an alternation.
_CLOSE_STARTS: Final = tuple(0.97**step for step in range(1, 53))
_SHORT: Final = 512
# The first start that may clip too much to be tried.
_LOOK: Final = 3
# Errors of rounding fall at most with the square of the scale; those of a few values may happen to fall more.
_ROUNDING: Final = 0.75
PART: Final = 1 << 20
"""Values that are fitted at a time, as many as in a `PIECE`, and for the same reasons."""
# Terms of a sum in float32; longer sums go on in float64.
_TERMS: Final = 128


def is_alternated(spec: QuantSpec) -> bool:
    """Return whether `alternate` finds the scales of a spec: those of integers, in float32, float16 or bfloat16.

    >>> is_alternated(QuantSpec("int4")), is_alternated(QuantSpec("int4", scale="e8m0"))
    (True, False)
    """
    format = format_named(spec.format)
    return not format.is_float and format.bits <= _MOST_BITS and spec.scale in _FLOAT_SCALES and not spec.two_level


def alternate(
    values: npt.NDArray[Any], low: Floats, high: Floats, initial: QuantParams, spec: QuantSpec, block: Shape
) -> QuantParams:
    """Fit scales and zero points to the integers of each block, and integers to the scales, in turn.

    All arithmetic is float32, in units of the initial scale, so any size of weight is as precise.

    Args:
        values: finite float array.
        low: minimum of each block.
        high: maximum of each block.
        initial: scales and zero points that represent these ranges.
        spec: format and scales, see `is_alternated`.
        block: extents of a block, one for each axis.
    """
    format = format_named(spec.format)
    scale, zero_point = initial.scale.copy(), initial.zero_point
    zero_point = None if zero_point is None else zero_point.copy()
    room = np.empty((2, min(values.size, max(PART, math.prod(block)))), np.float32)
    # Weights far beyond the largest scale of a format have infinite squares, and keep that scale.
    with np.errstate(over="ignore", invalid="ignore"):
        for place, own in whole_blocks(values.shape, block, PART):
            unit = initial.scale[own]
            columns = columns_of(values[place], unit, block, room[0])
            ends = [(end[own] / unit).reshape(-1).astype(np.float32) for end in (low, high)]
            zero = None if zero_point is None else zero_point[own].reshape(-1).astype(np.float32)
            integers = room[1, : columns.size].reshape(columns.shape)
            factor, zero = _fit(columns, integers, np.minimum(*ends), np.maximum(*ends), zero, format)
            scale[own] *= factor.reshape(unit.shape)
            if zero_point is not None and zero is not None:
                zero_point[own] = zero.reshape(unit.shape).astype(format.dtype)
    magnitude = np.maximum(on_grid(np.abs(scale).astype(np.float64), spec), np.float32(SMALLEST_SCALE))
    return replace(initial, scale=np.copysign(magnitude, scale), zero_point=zero_point)


def columns_of(part: npt.NDArray[Any], scale: Singles, block: Shape, room: Singles) -> Singles:
    """Return the blocks of a part as columns, divided by their scales.

    Args:
        part: whole blocks of an array, see `whole_blocks`.
        scale: of each of these blocks, in the rank of the part.
        block: extents of a block, one for each axis.
        room: one-dimensional array that holds the columns.
    """
    lengths = [min(extent, length) for extent, length in zip(part.shape, block, strict=True)]
    counts = [extent // length for extent, length in zip(part.shape, lengths, strict=True)]
    split = part.reshape([size for pair in zip(counts, lengths, strict=True) for size in pair])
    split = split.transpose(*range(1, split.ndim, 2), *range(0, split.ndim, 2))
    columns = room[: part.size].reshape(split.shape)
    np.multiply(split, 1 / scale, out=columns, casting="same_kind")
    return columns.reshape(math.prod(lengths), math.prod(counts))


def _fit(
    columns: Singles, integers: Singles, low: Singles, high: Singles, zero: Singles | None, format: QuantDType
) -> tuple[Singles, Singles | None]:
    """Return the factor of each column's scale, and its zero point.

    Args:
        columns: values in units of the initial scale.
        integers: array of the same shape to compute in.
        low: smallest value of each column.
        high: largest value of each column.
        zero: initial zero point of each column; None for symmetric values.
        format: format of the integers.
    """
    limits, energy = _limits(zero, format), products_of(columns, columns)
    factor, gain, left = np.ones_like(energy), np.zeros_like(energy), np.ones(energy.shape, bool)
    rounding = energy  # of the first start, which clips nothing
    for number, start in enumerate(_starts(len(columns), format.bits)):
        if number >= _LOOK:
            clipped = energy - gain - np.float32(_ROUNDING * start**2) * rounding
            left &= _least_factor(low, high, limits, np.sqrt(np.maximum(clipped, 0))) <= start
            if not left.any():
                break
        # A copy of few columns takes less time than a pass over all of them.
        seen = np.flatnonzero(left) if 2 * np.count_nonzero(left) < left.size else slice(None)
        tried, own = columns[:, seen], _limits(None if zero is None else zero[seen], format)
        fitted, gained = _round_and_fit(tried, np.float32(1 / start), own, integers[:, : tried.shape[1]])
        better = left[seen] & (gained > gain[seen])
        factor[seen] = np.where(better, fitted, factor[seen])
        gain[seen] = np.where(better, gained, gain[seen])
        if not number:
            rounding = energy - gain
    fitted, gain = _round_and_fit(columns, 1 / factor, limits, integers)
    # All integers of a block may be zero.
    factor = np.where(fitted > 0, fitted, factor)
    if zero is not None:
        slope, offset = fit_line(columns, integers, factor)
        moved = np.clip(np.rint(zero - offset), format.minimum, format.maximum).astype(np.float32)
        fitted, gained = _round_and_fit(columns, 1 / slope, _limits(moved, format), integers)
        better = gained > gain
        factor, zero = np.where(better, fitted, factor), np.where(better, moved, zero)
    return factor, zero


def _starts(length: int, bits: int) -> tuple[float, ...]:
    if bits > _MOST_BITS_OF_STARTS:
        return (1.0,)
    return (1.0, 1 + _WIDENED / 2 ** (bits - 1), *(_STARTS if length <= _SHORT else _CLOSE_STARTS))


def _limits(zero: Singles | None, format: QuantDType) -> tuple[Any, Any]:
    """Return the lowest and the highest integer, less the zero points."""
    lowest, highest = np.float32(format.minimum), np.float32(format.maximum)
    return (lowest, highest) if zero is None else (lowest - zero, highest - zero)


def _round_and_fit(
    columns: Singles, inverse: Any, limits: tuple[Any, Any], integers: Singles
) -> tuple[Singles, Singles]:
    """Divide columns by scales, given their inverse, round them into `integers`, and fit new scales.

    Returns:
        The new scale of each column, and how much less its squared error is than that of zeros.
    """
    np.multiply(columns, inverse, out=integers)
    np.rint(integers, out=integers)
    if np.ndim(limits[0]):
        np.maximum(integers, limits[0], out=integers)
        np.minimum(integers, limits[1], out=integers)
    else:
        np.clip(integers, *limits, out=integers)
    products = products_of(columns, integers)
    fitted = products_of(integers, integers)
    np.divide(products, np.maximum(fitted, 1, out=fitted), out=fitted)
    return fitted, fitted * products


def fit_line(columns: Singles, integers: Singles, slope: Singles) -> tuple[Singles, Singles]:
    """Fit a line to the integers of each column by least squares.

    Returns:
        The slope of each line, or the given one if the integers determine none, and where the line crosses zero.
    """
    count = float(len(columns))
    total, whole = (array.sum(0, dtype=np.float64) for array in (integers, columns))
    spread = count * products_of(integers, integers) - total**2
    shared = count * products_of(columns, integers) - whole * total
    fits = (spread > 0) & (shared > 0)
    steeper = np.where(fits, shared / np.where(fits, spread, 1), slope)
    return steeper.astype(np.float32), np.asarray((whole / steeper - total) / count)


def _least_factor(low: Singles, high: Singles, limits: tuple[Any, Any], reach: Singles) -> Singles:
    """Return the factor of each scale below which clipping the extremes alone errs by more than `reach`."""
    below, above = np.minimum(limits[0], np.float32(-1)), np.maximum(limits[1], np.float32(1))
    return np.asarray(np.maximum((low + reach) / below, (high - reach) / above))


def products_of(left: Singles, right: Singles) -> Singles:
    """Return the inner product of each pair of columns."""
    whole = len(left) // _TERMS * _TERMS
    rest = np.einsum("kb,kb->b", left[whole:], right[whole:])
    if not whole:
        return np.asarray(rest)
    parts = (array[:whole].reshape(-1, _TERMS, array.shape[1]) for array in (left, right))
    return np.asarray((np.einsum("skb,skb->sb", *parts).sum(0, dtype=np.float64) + rest).astype(np.float32))
