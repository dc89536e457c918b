"""Labels that differ, in decibels of the scores that they are of."""

from __future__ import annotations

import math

# Share of labels that differ at 0 dB, if they went on to grow with the amplitude of the noise.
_SHARE_AT_0_DB = 0.1
# One-sided quantile of the normal distribution.
_NORMAL_95 = 1.645


def share_at(decibels: float) -> float:
    """Return the share of labels that may differ at an SQNR; see `decibels_of_labels`.

    >>> round(share_at(20.0), 6), round(share_at(40.0), 6)
    (0.01, 0.001)
    """
    return min(1.0, _SHARE_AT_0_DB * 10 ** (-decibels / 20))


def decibels_of_labels(differing: int, compared: int) -> float:
    """Return the SQNR of scores that makes as many labels differ.

    A label flips where noise exceeds the distance between two scores, so the share that differs grows with the
    amplitude of the noise. Measured on the classifiers of ``models/`` with Gaussian noise on their scores, 1.0 to 1.4 %
    differ at 20 dB and 0.06 to 0.18 % at 40 dB; hence 1 % stands for 20 dB here, and 0.1 % for 40 dB. The share is the
    one that can be told from chance: its lower 95 % confidence bound, and none where a single value differs.

    Args:
        differing: how many labels differ.
        compared: of how many.

    >>> round(decibels_of_labels(20, 1000), 1), decibels_of_labels(1, 10)
    (17.6, inf)
    """
    if differing <= 1:
        return math.inf
    return -20 * math.log10(_lower_bound(differing) / compared / _SHARE_AT_0_DB)


def _lower_bound(count: int) -> float:
    """Return the lower 95 % confidence bound of what is counted, after Wilson and Hilferty (PNAS 1931)."""
    return count * (1 - 1 / (9 * count) - _NORMAL_95 / (3 * math.sqrt(count))) ** 3
