"""Noise-to-signal ratios: the largest of several, and what one is in decibels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def decibels(ratio: float) -> float:
    """Return a noise-to-signal ratio as SQNR.

    >>> decibels(0.01), decibels(0.0)
    (20.0, inf)
    """
    return -10 * math.log10(ratio) if ratio > 0 else math.inf


def largest(ratios: NDArray[np.float64]) -> float:
    """Return the largest ratio, that of the worst output; infinite where one is not finite.

    >>> largest(np.array([0.5, 0.25])), largest(np.array([0.5, np.nan])), largest(np.zeros(0))
    (0.5, inf, 0.0)
    """
    return float(ratios.max(initial=0.0)) if np.isfinite(ratios).all() else math.inf
