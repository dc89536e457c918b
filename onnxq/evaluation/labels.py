"""Labels that differ, in decibels of the scores that they are of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxq.data.dataset import counting_as_one

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


def telling(differing: Sequence[int], compared: Sequence[int], files: Sequence[str]) -> float:
    """Return as how many independent labels those count that differ, where the samples of a file count as one.

    It is their number over the design effect: the variance between files of the ratio of those that differ, over what
    chance alone makes of it (Cochran, Sampling Techniques, 1977, chapter 9A; Kish, Survey Sampling, 1965). No less than
    one is told by those that there are, and no more than all of them.

    Args:
        differing: how many labels of each sample differ.
        compared: of how many.
        files: of each sample, see `shared_files`.

    >>> telling([2, 2, 0, 0, 0, 0], [2] * 6, ["a", "a", "b", "b", "c", "c"])
    1.0
    """
    clusters = counting_as_one(files)
    counted, sizes = (
        np.array([sum(labels[place] for place in one) for one in clusters]) for labels in (differing, compared)
    )
    total = float(counted.sum())
    if total <= 1 or len(clusters) < 2:
        return min(total, 1.0)
    squares = float(np.square(counted - total / sizes.sum() * sizes).sum()) * len(clusters) / (len(clusters) - 1)
    return float(np.clip(total**2 / squares, 1.0, total)) if squares else total


def decibels_of_labels(differing: int, compared: int, telling: float | None = None) -> float:
    """Return the SQNR of scores that makes as many labels differ.

    A label flips where noise exceeds the distance between two scores, so the share that differs grows with the
    amplitude of the noise. Measured on the classifiers of ``models/`` with Gaussian noise on their scores, 1.0 to 1.4 %
    differ at 20 dB and 0.06 to 0.18 % at 40 dB; hence 1 % stands for 20 dB here, and 0.1 % for 40 dB. The share is the
    one that can be told from chance: its lower 95 % confidence bound, and none where a single value differs.

    Args:
        differing: how many labels differ.
        compared: of how many.
        telling: as how many independent ones those count that differ, see `telling`; None where each is one.

    >>> round(decibels_of_labels(20, 1000), 1), decibels_of_labels(1, 10)
    (17.6, inf)
    """
    if differing <= 1:
        return math.inf
    if telling is None:
        return -20 * math.log10(_lower_bound(differing) / compared / _SHARE_AT_0_DB)
    share = differing / compared * _lower_bound(telling) / telling
    return -20 * math.log10(share / _SHARE_AT_0_DB)


def _lower_bound(count: float) -> float:
    """Return the lower 95 % confidence bound of what is counted, after Wilson and Hilferty (PNAS 1931)."""
    return count * (1 - 1 / (9 * count) - _NORMAL_95 / (3 * math.sqrt(count))) ** 3
