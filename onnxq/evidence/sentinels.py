"""Attention-mask constants in activations, told apart from data."""

from __future__ import annotations

import numpy as np

from onnxq.evidence.bins import BINS
from onnxq.evidence.tensor_statistics import MASK, TensorStatistics


def sentinels(statistics: TensorStatistics) -> tuple[float, ...]:
    """Return the extremes that are attention-mask constants such as -1e4 or -3.4e38 rather than data.

    They are recognised by a wide gap: every element of at least `MASK` in magnitude lies within 1/8 of an extreme, and
    the others, of which there are some, within `MASK` / 8 of zero. Fewer than 1 in 4096 elements, below 1e30 in
    magnitude, are outliers and therefore data.
    """
    core = statistics.core
    if core is None or not core.count or max(-core.minimum, core.maximum) > MASK / 8:
        return ()
    found = tuple(value for value in (statistics.minimum, statistics.maximum) if abs(value) >= MASK)
    if statistics.count - core.count < statistics.count / BINS and min(map(abs, found)) < 1e30:
        return ()
    lower, upper = statistics.edges[:-1], statistics.edges[1:]
    isolated = (statistics.counts == 0) | (lower == 0) | (upper == 0) | (np.maximum(-lower, upper) <= MASK)
    for value in found:
        isolated |= (lower <= value + abs(value) / 8) & (upper >= value - abs(value) / 8)
    return found if bool(isolated.all()) else ()


def without_sentinels(statistics: TensorStatistics) -> TensorStatistics:
    """Return the statistics of the elements that are no mask constants; see `sentinels`."""
    return statistics.core if statistics.core is not None and sentinels(statistics) else statistics
