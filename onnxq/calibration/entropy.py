"""The range that keeps the most information: least Kullback-Leibler divergence between floats and codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.evidence import TensorEvidence
from onnxq.calibration.histogram import Bins
from onnxq.calibration.ranges import bins_of_data
from onnxq.calibration.squared_error import Grid
from onnxq.errors import SchemeError
from onnxq.numerics.formats import Format, format_named
from onnxq.numerics.spec import Spec

_BINS = 2048
_CANDIDATES = 256


@dataclass(frozen=True)
class Entropy:
    """The magnitude at which to clip so that codes tell most about the magnitudes of the elements.

    For each candidate, the histogram of magnitudes up to it, with all greater ones in its last bin, is compared with
    the same histogram coarsened to `levels`; the candidate of least divergence is taken, the wider one of equals. Codes
    of more than 4096 levels are finer than the histogram, which cannot tell what they keep: they get all elements.

    Args:
        levels: For magnitudes; None takes half of the spec's codes, from 2 to 1024.

    Raises:
        SchemeError: `levels` is not from 2 to 1024.
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None and not 2 <= self.levels <= _BINS // 2:
            raise SchemeError(f"Entropy levels are {self.levels}, expected 2 to {_BINS // 2}, such as 128 for 8 bits")

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) within the minimum and maximum.

        Raises:
            DataError: No element was seen, or none was counted.
        """
        data = bins_of_data(seen)
        if self.levels is None and Grid.of(spec).is_fine:
            return data.minimum, data.maximum
        levels = self.levels or _magnitude_levels(format_named(spec.format))
        counts, width, fold = _magnitudes(data)
        # The spike at zero, which has a code of its own, would decide alone.
        if fold < len(counts):
            counts[:fold] = counts[fold]
        if not counts.any():
            return data.minimum, data.maximum
        sizes = np.unique(np.linspace(levels, len(counts), _CANDIDATES).astype(int))[::-1]
        limit = float(sizes[_divergences(counts, sizes, levels).argmin()]) * width
        low, high = max(data.minimum, -limit), min(data.maximum, limit)
        # An end beyond the limit on the wrong side of zero keeps its sign.
        return min(low, data.maximum), max(high, data.minimum)


def _magnitude_levels(format: Format) -> int:
    """Return half of the codes, two at least: zero and another one."""
    codes = len(format.codebook.numbers) if format.codebook else int(format.maximum - format.minimum) + 1
    return min(max(codes // 2, 2), _BINS // 2)


def _magnitudes(data: Bins) -> tuple[NDArray[np.float64], float, int]:
    """Return the histogram of magnitudes in at least 2,048 bins from zero, the width of one, and how many were one."""
    first = data.first
    last = first + len(data.counts)
    size = max(last, -first)
    # Far from zero the bins would outnumber memory; coarser ones keep what a candidate can tell apart.
    shift = max(0, math.ceil(math.log2(size / (4 * _BINS))))
    bins = np.arange(first, last)
    counts = np.bincount(np.where(bins < 0, -1 - bins, bins) >> shift, weights=data.counts)
    fold = max(1, math.ceil(_BINS / len(counts)))
    return np.repeat(counts / fold, fold), math.ldexp(1.0, data.exponent + shift) / fold, fold


def _divergences(counts: NDArray[np.float64], sizes: NDArray[np.int64], levels: int) -> NDArray[np.float64]:
    """Return, for each size, how far the first bins coarsened to levels are from them with all others in the last.

    With k the bins that are kept, c the same with all others added to the last, and s the mean of the filled bins of a
    level, the divergence of c and s, each divided by its sum, is a sum over bins of c log(c / s), which running sums of
    k and k log k give for every size at once. A size whose last bin is empty while greater ones are not has none.
    """
    own = counts * _logarithms(counts)
    below, filled, ordered = (np.concatenate([[0.0], np.cumsum(values)]) for values in (counts, counts > 0, own))
    starts = np.arange(levels + 1) * sizes[:, None] // levels
    inside, number = np.diff(below[starts]), np.diff(filled[starts])
    shares = _logarithms(inside / np.maximum(number, 1))
    total, kept, last = below[-1], below[sizes], counts[sizes - 1]
    rest = total - kept
    clipped = ordered[sizes - 1] + (last + rest) * _logarithms(last + rest)
    coarse = (inside * shares).sum(1) + rest * shares[:, -1]
    found = (clipped - coarse) / total - np.log(total) + _logarithms(kept)
    return np.where((rest > 0) & (last == 0), np.inf, found)


def _logarithms(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural logarithms, and 0 of 0, which is only ever multiplied by 0."""
    return np.log(values, out=np.zeros_like(values), where=values > 0)
