"""Confidence bounds of the error on other samples, if the error is skewed and samples are few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import group_equal
from onnxq.numerics.affine import ratio_of_sqnr

RISK = 0.05
"""Default probability that a bound is wrong."""

# The bounds add an unseen sample. Its error exceeds the mean by the first factor times the excess of the worst sample,
# plus the second factor over the number of samples. Found by simulation, see benchmarks/coverage_of_bounds.py.
_UNSEEN, _UNSEEN_OF_FEW = 1.25, 5.0
# Relative spread of the error to assume for samples without parts, divided by the power 1.5 of their number.
_UNKNOWN = 0.8
# Number of parts of a sample. It needs twice as many rows, else a part would be a single row.
_PARTS = 8
# Below this effective sample size, one sample decides nearly alone.
_ALONE = 1.5
# If the samples differ more, the unseen ones do too: the margin of Student's t grows by this factor times the error.
_TAIL = 0.4

Energies = tuple[float, float]
"""Of the signal, and of the error."""


def alpha_spending(number: int) -> float:
    """Return how often the bound of one candidate may be wrong, if candidates are evaluated until one is good enough.

    The first candidate that passes may do so by chance, so all looks at the same samples share the risk. Their parts
    add up to the whole, however many there are (alpha spending; Lan and DeMets, Biometrika 1983).

    Args:
        number: of the look, from 1.

    >>> [round(alpha_spending(number), 4) for number in (1, 2, 3)]
    [0.025, 0.0083, 0.0042]
    """
    return RISK / (number * (number + 1))


def spread_of_parts(expected: NDArray[Any], actual: NDArray[Any]) -> float | None:
    """Return the standard deviation of the error between neighbouring parts of one sample, in units of their mean.

    Positions of a sequence and lines of an image differ in error about as much as samples do. On five real models, the
    samples differ 0.6 to 3.4 times as much as their parts, 0.8 times in the median.

    Args:
        expected: an output for one sample; all axes but the last count as rows.
        actual: the candidate's, of the same shape.

    Returns:
        None if there are fewer than 16 rows, no error, or values that are not finite.

    >>> spread_of_parts(np.ones((16, 2)), np.ones((16, 2)) + 0.1) < 1e-9
    True
    """
    count = math.prod(expected.shape[:-1])
    if count < 2 * _PARTS or not expected.size:
        return None
    starts = np.arange(_PARTS) * count // _PARTS
    # Values that are not finite show in the energies.
    with np.errstate(invalid="ignore", over="ignore"):
        rows, error = expected.reshape(count, -1), (actual - expected).reshape(count, -1)
        energies = [np.einsum("ij,ij->i", values, values).astype(np.float64) for values in (rows, error)]
        signal, noise = (np.add.reduceat(values, starts) for values in energies)
        if not noise.any():
            return None
        means = [max(values.mean(), np.finfo(np.float64).tiny) for values in (signal, noise)]
        spread = float((noise / means[1] - signal / means[0]).std(ddof=1))
    return spread if math.isfinite(spread) else None


def of_files(energies: Sequence[Energies], files: Sequence[str]) -> list[Energies]:
    """Return the energies of files, each of which counts as one sample.

    Rows of a stack and windows of a recording are alike, so they show less than as many files. How much files differ
    shows how accurate a ratio over all is (cluster sampling; Cochran, Sampling Techniques, 1977, chapter 9A).

    Args:
        energies: of signal and error for each sample.
        files: of each sample, see `list_shared_files`; empty if each sample counts by itself.

    >>> of_files([(1.0, 0.25), (2.0, 0.0), (1.0, 0.5)], ["a", "b", "a"])
    [(2.0, 0.75), (2.0, 0.0)]
    """
    if not files:
        return list(energies)
    return [
        (math.fsum(energies[place][0] for place in places), math.fsum(energies[place][1] for place in places))
        for places in group_equal(files)
    ]


def lower_bound(
    energies: Sequence[Energies], risk: float = RISK, spreads: Sequence[float | None] = (), unseen: float = 0.0
) -> float:
    """Return a one-sided lower confidence bound of the SQNR over all samples from the energies of a few.

    - Energies are summed over samples before they are divided. A faint sample counts as little as in the SQNR of all.
    - The jackknife and Student's t distribution give the error of the logarithm of that ratio (Shao and Tu, The
      Jackknife and Bootstrap, 1995).
    - The error is skewed, and a few samples seldom include the rare sample whose answer flips. The bound adds one
      unseen sample with a larger error than the worst. If samples are so few that they may be alike by chance, the
      spread of their parts sets its least excess.
    - Samples count by their amplitudes (effective sample size; Kish, Survey Sampling, 1965). Otherwise the silent
      samples of a detector would vouch for the few with a signal.

    In simulations, bounds of four samples and more hold in 92 to 99 %. The bound of one sample without parts allows
    five times its error.

    Args:
        energies: of signal and error for each sample, finite. Samples that depend on each other must be merged, see
            `of_files`.
        risk: probability that the bound is wrong; see `alpha_spending`.
        spreads: `spread_of_parts` of each sample.
        unseen: error energy by which a sample may exceed the mean, whatever was measured; see `unseen_noise`.

    Returns:
        Decibels; infinite without error, -inf without signal.

    >>> round(lower_bound([(1.0, 0.001), (1.0, 0.002), (1.0, 0.003)]), 1)
    21.9
    """
    signal, noise = np.array(energies, np.float64).T
    if not noise.any():
        return math.inf
    if not signal.any():
        return -math.inf
    ratio = noise.sum() / signal.sum()
    # Samples that are silent beside others do not show how the others differ.
    effective = float(np.sqrt(signal / signal.sum()).sum() ** 2)
    mean = noise.sum() / effective
    furthest = (noise - ratio * signal).max()
    measured = [spread for spread in spreads if spread is not None]
    spread = math.sqrt(np.square(measured).mean()) if measured else _UNKNOWN / effective**1.5
    excess = _UNSEEN * furthest + _UNSEEN_OF_FEW / effective * max(furthest, spread * mean)
    excess_unseen = (_UNSEEN + _UNSEEN_OF_FEW / effective) * unseen
    if effective < _ALONE:
        return -10 * math.log10(ratio * (mean + max(excess, excess_unseen)) / mean)
    highest = _highest_ratio(signal, noise, effective, excess, risk)
    if excess_unseen > excess:
        # The mean cannot exceed that of samples which are all as unsure.
        worst = math.log(ratio * (mean + excess_unseen) / mean)
        highest = max(highest, min(_highest_ratio(signal, noise, effective, excess_unseen, risk), worst))
    return -10 * highest / math.log(10)


def _highest_ratio(
    signal: NDArray[np.float64], noise: NDArray[np.float64], effective: float, excess: float, risk: float
) -> float:
    """Return an upper bound of the logarithm of the ratio, with an unseen sample whose noise exceeds the mean."""
    signal, noise = np.append(signal, signal.sum() / effective), np.append(noise, noise.sum() / effective + excess)
    without = np.log((noise.sum() - noise) / (signal.sum() - signal))
    error = math.sqrt((len(noise) - 1) * without.var())
    quantile = student_t_quantile(max(effective, 2.0), risk)
    return math.log(noise.sum() / signal.sum()) + quantile * error * (1 + _TAIL * error)


def highest_mean(values: NDArray[np.float64], worst: float, risk: float = RISK) -> float:
    """Return a one-sided upper confidence bound of the mean of the distribution that a few values are drawn from.

    As in `lower_bound`, one unseen value is added.

    Args:
        values: one for each sample or group of samples, two or more.
        worst: how far above the mean the unseen value is if all values are equal.
        risk: probability that the bound is wrong; see `alpha_spending`.

    >>> round(highest_mean(np.zeros(100), 1.0), 3), round(highest_mean(np.zeros(8), 1.0), 2)
    (0.026, 0.32)
    """
    count = len(values)
    furthest = values.max() - values.mean()
    excess = (_UNSEEN + _UNSEEN_OF_FEW / count) * furthest if furthest > 0 else worst
    values = np.append(values, values.mean() + excess)
    return float(values.mean() + student_t_quantile(count, risk) * values.std(ddof=1) / math.sqrt(count + 1))


def student_t_quantile(freedom: float, risk: float) -> float:
    """Return a quantile of Student's t distribution.

    Accurate to 1 % from two degrees of freedom (Abramowitz and Stegun, 26.7.5).
    """
    z = -NormalDist().inv_cdf(risk)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


# Labels that differ, in decibels of their scores.

# Share of labels that differ at 0 dB, extrapolated in proportion to the amplitude of the error.
_SHARE_AT_0_DB = 0.1
# One-sided quantile of the normal distribution.
_NORMAL_95 = 1.645


def share_at(decibels: float) -> float:
    """Return the share of labels that may differ at an SQNR in decibels; see `decibels_of_labels`.

    >>> round(share_at(20.0), 6), round(share_at(40.0), 6)
    (0.01, 0.001)
    """
    return min(1.0, _SHARE_AT_0_DB * math.sqrt(ratio_of_sqnr(decibels)))


def effective_sample_size(differing: Sequence[int], compared: Sequence[int], files: Sequence[str]) -> float:
    """Return how many independent labels the labels that differ count as, if samples share files.

    It is their number over the design effect: the variance between files of the share that differs, over its variance
    by chance (Cochran, Sampling Techniques, 1977, chapter 9A; Kish, Survey Sampling, 1965). If any differ, it is at
    least 1 and at most their number.

    Args:
        differing: number of labels that differ, by sample.
        compared: number of labels, by sample.
        files: of each sample, see `list_shared_files`.

    >>> effective_sample_size([2, 2, 0, 0, 0, 0], [2] * 6, ["a", "a", "b", "b", "c", "c"])
    1.0
    """
    clusters = group_equal(files)
    counted, sizes = (
        np.array([sum(labels[place] for place in cluster) for cluster in clusters]) for labels in (differing, compared)
    )
    total = float(counted.sum())
    if total <= 1 or len(clusters) < 2:
        return min(total, 1.0)
    squares = float(np.square(counted - total / sizes.sum() * sizes).sum()) * len(clusters) / (len(clusters) - 1)
    return float(np.clip(total**2 / squares, 1.0, total)) if squares else total


def decibels_of_labels(differing: int, compared: int, effective: float | None = None) -> float:
    """Return the SQNR of scores at which as many labels differ.

    A label flips if the error exceeds the distance between two scores, so the share that differs grows with the
    amplitude of the error. With Gaussian noise on the scores of the classifiers of ``models/``, 1.0 to 1.4 % differ at
    20 dB, and 0.06 to 0.18 % at 40 dB. Here, 1 % stands for 20 dB, and 0.1 % for 40 dB. The share is its lower 95 %
    confidence bound; 0 if at most one label differs.

    Args:
        differing: number of labels that differ.
        compared: number of labels.
        effective: `effective_sample_size` of the labels that differ; None if each counts by itself.

    >>> round(decibels_of_labels(20, 1000), 1), decibels_of_labels(1, 10)
    (17.6, inf)
    """
    if differing <= 1:
        return math.inf
    if effective is None:
        return -20 * math.log10(_lower_bound(differing) / compared / _SHARE_AT_0_DB)
    share = differing / compared * _lower_bound(effective) / effective
    return -20 * math.log10(share / _SHARE_AT_0_DB)


def _lower_bound(count: float) -> float:
    """Return the lower 95 % confidence bound of a count (Wilson and Hilferty, PNAS 1931)."""
    return count * (1 - 1 / (9 * count) - _NORMAL_95 / (3 * math.sqrt(count))) ** 3
