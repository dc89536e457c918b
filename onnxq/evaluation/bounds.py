"""Confidence bounds: what a few samples prove of all others, where noise is skewed and samples are few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import group_equal

RISK = 0.05
"""How often a bound may be wrong."""

# The sample that was not seen is noisier than the mean by this many times what the noisiest one is, and by the second
# over the number of samples; found by simulation, see benchmarks/coverage_of_bounds.py.
_UNSEEN, _UNSEEN_OF_FEW = 1.25, 5.0
# Of samples without parts, one says nothing of how noise differs: so much, over the power 1.5 of their number.
_UNKNOWN = 0.8
# Into so many parts a sample is divided. Twice as many are needed to divide it, else a part is a single row.
_PARTS = 8
# Of so few samples that tell anything, one decides nearly alone.
_ALONE = 1.5
# The more samples differ, the more do those that were not seen: what Student's t allows grows by this part of itself.
_TAIL = 0.4
# Part of the mean noise by which that of one sample is changed to see what that does to the bound.
_CHANGE = 1e-3

Energies = tuple[float, float]
"""Of the signal, and of the noise on it."""


def alpha_spending(number: int) -> float:
    """Return how often the bound of a candidate may be wrong, where candidates are judged until one is good enough.

    The first that passes may do so by luck, so all looks at the same samples share the risk: each a part of it that
    together, however many there will be, add up to the whole (Lan and DeMets, Biometrika 1983).

    Args:
        number: of the look, from 1.

    >>> [round(alpha_spending(number), 4) for number in (1, 2, 3)]
    [0.025, 0.0083, 0.0042]
    """
    return RISK / (number * (number + 1))


def spread_of_parts(expected: NDArray[Any], found: NDArray[Any]) -> float | None:
    """Return the standard deviation of noise between neighbouring parts of one sample, in units of their mean.

    Positions of a sequence and lines of an image differ in noise about as much as samples do: those of five real models
    by 0.6 to 3.4 times what their parts do, in the median 0.8 times.

    Args:
        expected: an output for one sample, all axes but the last of which count its rows.
        found: the candidate's, of the same shape.

    Returns:
        None where the rows are too few to tell.

    >>> spread_of_parts(np.ones((16, 2)), np.ones((16, 2)) + 0.1) < 1e-9
    True
    """
    count = math.prod(expected.shape[:-1])
    if count < 2 * _PARTS or not expected.size:
        return None
    starts = np.arange(_PARTS) * count // _PARTS
    # What is not finite shows in the energies.
    with np.errstate(invalid="ignore", over="ignore"):
        rows, error = expected.reshape(count, -1), (found - expected).reshape(count, -1)
        energies = [np.einsum("ij,ij->i", one, one).astype(np.float64) for one in (rows, error)]
        signal, noise = (np.add.reduceat(one, starts) for one in energies)
        if not noise.any():
            return None
        means = [max(one.mean(), np.finfo(np.float64).tiny) for one in (signal, noise)]
        spread = float((noise / means[1] - signal / means[0]).std(ddof=1))
    return spread if math.isfinite(spread) else None


def of_files(energies: Sequence[Energies], files: Sequence[str]) -> list[Energies]:
    """Return the energies of files, each of which counts as one sample.

    Rows of a stack and windows of a recording are alike, so as many of them tell less than as many files do, and how
    files differ tells how far a ratio over all can be trusted (ratio to size of clusters; Cochran, Sampling Techniques,
    1977, chapter 9A).

    Args:
        energies: of signal and noise for each sample.
        files: of each sample, see `list_shared_files`; nothing where each counts by itself.

    >>> of_files([(1.0, 0.25), (2.0, 0.0), (1.0, 0.5)], ["a", "b", "a"])
    [(2.0, 0.75), (2.0, 0.0)]
    """
    if not files:
        return list(energies)
    return [
        (math.fsum(energies[place][0] for place in one), math.fsum(energies[place][1] for place in one))
        for one in group_equal(files)
    ]


def lower_bound(energies: Sequence[Energies], risk: float = RISK, spreads: Sequence[float | None] = ()) -> float:
    """Return a one-sided 95 % lower confidence bound of the SQNR over all samples from the energies of a few.

    Energies are summed over samples before they are divided, so that a faint sample counts as little as it does in the
    SQNR of all. How far the logarithm of that ratio can be trusted is told by leaving out one sample at a time
    (jackknife; Shao and Tu, The Jackknife and Bootstrap, 1995) and Student's t distribution. Noise is skewed, and few
    samples seldom hold the rare one that a little noise turns over: an unseen one is counted besides, further above
    the mean than the noisiest, and than the parts of a sample differ where samples are so few that they may be alike by
    chance. Samples count by their amplitudes (effective sample size; Kish, Survey Sampling, 1965), as the silent ones
    of a detector would else vouch for the few in which there is anything. Simulated in many ways, bounds of four
    samples and more hold in 92 to 99 %; a single one without parts is trusted with a fifth of what it shows.

    Args:
        energies: of signal and noise for each sample, finite; what depends on each other has to be one sample, see
            `of_files`.
        risk: how often it may be wrong; see `alpha_spending`.
        spreads: of each sample how its parts differ, see `spread_of_parts`.

    Returns:
        Decibels; infinite without noise, -inf without signal.

    >>> round(lower_bound([(1.0, 0.001), (1.0, 0.002), (1.0, 0.003)]), 1)
    21.9
    """
    signal, noise = np.array(energies, np.float64).T
    if not noise.any():
        return math.inf
    if not signal.any():
        return -math.inf
    ratio = noise.sum() / signal.sum()
    # Samples that are silent beside others tell nothing of how those differ.
    effective = float(np.sqrt(signal / signal.sum()).sum() ** 2)
    mean = noise.sum() / effective
    furthest = (noise - ratio * signal).max()
    known = [spread for spread in spreads if spread is not None]
    spread = math.sqrt(np.square(known).mean()) if known else _UNKNOWN / effective**1.5
    excess = _UNSEEN * furthest + _UNSEEN_OF_FEW / effective * max(furthest, spread * mean)
    if effective < _ALONE:
        return -10 * math.log10(ratio * (mean + excess) / mean)
    signal, noise = np.append(signal, signal.sum() / effective), np.append(noise, mean + excess)
    without = np.log((noise.sum() - noise) / (signal.sum() - signal))
    error = math.sqrt((len(noise) - 1) * without.var())
    highest = math.log(noise.sum() / signal.sum()) + student_t_quantile(max(effective, 2.0), risk) * error * (
        1 + _TAIL * error
    )
    return -10 * highest / math.log(10)


def influences(
    energies: Sequence[Energies], spreads: Sequence[float | None] = (), files: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Return by how much the bound of the noise-to-signal ratio grows for each part that a sample adds to that ratio.

    Where all samples are as noisy, that is alike for each, 1 or, of few samples, more; where one is far noisier than
    the others, which samples that were not seen may be too, it is many times that, and more noise in the others makes
    the bound of the ratio lower (empirical influence; Hampel, The Influence Curve, 1974).

    Args:
        energies: as for `lower_bound`.
        spreads: as for `lower_bound`.
        files: of each sample, see `of_files`.

    Returns:
        float64 of shape (samples,); ones where there is no bound that is a number. They are negative where more noise
        makes samples more alike.

    >>> influences([(1.0, 0.01), (1.0, 0.01), (1.0, 0.1)]).round().tolist()
    [-46.0, -46.0, 30.0]
    """
    if files:
        found = np.ones(len(files))
        alone = influences(of_files(energies, files), spreads)
        for one, influence in zip(group_equal(files), alone, strict=True):
            found[one] = influence
        return found
    signal, noise = np.array(energies, np.float64).T
    change = _CHANGE * noise.mean()

    def bound(noises: NDArray[np.float64]) -> float:
        return 10 ** (-lower_bound(list(zip(signal, noises, strict=True)), spreads=spreads) / 10)

    if not (0 < change < math.inf and 0 < signal.sum() < math.inf):
        return np.ones(len(noise))
    now = bound(noise)
    more = [bound(noise + change * one) for one in np.eye(len(noise))]
    return np.asarray((np.array(more) - now) / (change / signal.sum()))


def highest_mean(values: NDArray[np.float64], worst: float, risk: float = RISK) -> float:
    """Return a one-sided 95 % upper confidence bound of the mean of what a few values are drawn from.

    As in `lower_bound`, one that was not seen is counted besides.

    Args:
        values: one for each sample or group of samples, two or more.
        worst: how far above the mean one may come where all that was seen are equal.
        risk: how often it may be wrong; see `alpha_spending`.

    >>> round(highest_mean(np.zeros(100), 1.0), 3), round(highest_mean(np.zeros(8), 1.0), 2)
    (0.026, 0.32)
    """
    count = len(values)
    furthest = values.max() - values.mean()
    excess = (_UNSEEN + _UNSEEN_OF_FEW / count) * furthest if furthest > 0 else worst
    values = np.append(values, values.mean() + excess)
    return float(values.mean() + student_t_quantile(count, risk) * values.std(ddof=1) / math.sqrt(count + 1))


def student_t_quantile(freedom: float, risk: float) -> float:
    """Return a quantile of Student's t distribution, to 1 % from two degrees of freedom (Abramowitz, Stegun 26.7.5)."""
    z = -NormalDist().inv_cdf(risk)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


# Labels that differ, in decibels of the scores that they are of.

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


def effective_sample_size(differing: Sequence[int], compared: Sequence[int], files: Sequence[str]) -> float:
    """Return as how many independent labels those count that differ, where the samples of a file count as one.

    It is their number over the design effect: the variance between files of the ratio of those that differ, over what
    chance alone makes of it (Cochran, Sampling Techniques, 1977, chapter 9A; Kish, Survey Sampling, 1965). No less than
    one is told by those that there are, and no more than all of them.

    Args:
        differing: how many labels of each sample differ.
        compared: of how many.
        files: of each sample, see `list_shared_files`.

    >>> effective_sample_size([2, 2, 0, 0, 0, 0], [2] * 6, ["a", "a", "b", "b", "c", "c"])
    1.0
    """
    clusters = group_equal(files)
    counted, sizes = (
        np.array([sum(labels[place] for place in one) for one in clusters]) for labels in (differing, compared)
    )
    total = float(counted.sum())
    if total <= 1 or len(clusters) < 2:
        return min(total, 1.0)
    squares = float(np.square(counted - total / sizes.sum() * sizes).sum()) * len(clusters) / (len(clusters) - 1)
    return float(np.clip(total**2 / squares, 1.0, total)) if squares else total


def decibels_of_labels(differing: int, compared: int, effective: float | None = None) -> float:
    """Return the SQNR of scores that makes as many labels differ.

    A label flips where noise exceeds the distance between two scores, so the share that differs grows with the
    amplitude of the noise. Measured on the classifiers of ``models/`` with Gaussian noise on their scores, 1.0 to 1.4 %
    differ at 20 dB and 0.06 to 0.18 % at 40 dB; hence 1 % stands for 20 dB here, and 0.1 % for 40 dB. The share is the
    one that can be told from chance: its lower 95 % confidence bound, and none where a single value differs.

    Args:
        differing: how many labels differ.
        compared: of how many.
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
    """Return the lower 95 % confidence bound of what is counted, after Wilson and Hilferty (PNAS 1931)."""
    return count * (1 - 1 / (9 * count) - _NORMAL_95 / (3 * math.sqrt(count))) ** 3
