"""Bins whose width is a power of two: which ones a range needs, and into which a value falls, without rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 4096
"""Most bins of a histogram."""
MINIMUM_EXPONENT = -1074
"""Exponent of the finest bins: the distance of the smallest float64 numbers."""

# Integers below this are exact in float32, and so are differences of floats that lie within the bins of one histogram.
_EXACT_FLOAT32 = 1 << 23


def stride_of(size: int, elements: int | None) -> int:
    """Return a step that takes about `elements` of `size`; sharing no factor with any axis, it visits all of each."""
    if elements is None or size <= elements:
        return 1
    stride = size // elements
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def bins_of(values: NDArray[Any], exponent: int, first: int) -> NDArray[np.signedinteger]:
    """Return the bin of each value, counted from bin `first`."""
    # Multiplying by a power of two from 1 to 2**126 only moves the exponent of a float32, so nothing is rounded.
    if values.dtype == np.float32 and -126 <= exponent <= 0 and abs(first) < _EXACT_FLOAT32:
        scaled = values * np.float32(math.ldexp(1.0, -exponent))
        np.floor(scaled, out=scaled)
        scaled -= np.float32(first)
        # Processors convert many floats at once to integers of 32 bits, which hold any such bin.
        return scaled.astype(np.int32)
    wide = values.astype(np.float64)
    bins = np.floor(np.ldexp(wide, -exponent)).astype(np.intp)
    # A negative denormal may become -0.0 and lose its sign.
    bins[(bins == 0) & (wide < 0)] = -1
    return bins - first


def bin_of(value: float, exponent: int) -> int:
    """Return the bin of a value, counted from zero."""
    index = math.floor(math.ldexp(value, -exponent))
    return -1 if index == 0 and value < 0 else index


def exponent_of(minimum: float, maximum: float) -> int:
    """Return the least exponent with which at most `BINS` bins cover the range and bin numbers are exact in float64."""
    magnitude = max(-minimum, maximum)
    if magnitude == 0:
        return MINIMUM_EXPONENT
    finest = math.frexp(magnitude)[1] - 53
    # Halving large extremes keeps their difference finite; halving tiny ones would lose it.
    halving = -1 if magnitude > 1 else 0
    spread = math.frexp(math.ldexp(maximum, halving) - math.ldexp(minimum, halving))[1] - halving
    exponent = max(MINIMUM_EXPONENT, finest, spread - BINS.bit_length() if maximum > minimum else finest)
    while bin_of(maximum, exponent) - bin_of(minimum, exponent) >= BINS:
        exponent += 1
    return exponent


def add_bins(counts: NDArray[np.int64], added: NDArray[np.int64], added_first: int, coarser: int, first: int) -> None:
    """Add a histogram to one whose bins are ``2**coarser`` times as wide; exact, since bins lie whole in wider ones.

    Args:
        counts: Changed in place; bin `first` comes first.
        added: The other histogram; its bin `added_first` comes first.
        added_first: Counted in its own bins.
        coarser: At least 0.
        first: Counted in the wider bins.
    """
    if coarser == 0:
        counts[added_first - first : added_first - first + len(added)] += added
        return
    # Numpy shifts by at most 63, which already leaves nothing but the sign.
    coarser = min(coarser, 63)
    low, high = added_first >> coarser, (added_first + len(added) - 1) >> coarser
    starts = np.zeros(high - low + 1, np.intp)
    starts[1:] = (np.arange(low + 1, high + 1) << coarser) - added_first
    counts[low - first : high - first + 1] += np.add.reduceat(added, starts)
