"""The expected error of probabilities: few answers turn over, so the error on a few samples is mostly luck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxq.evaluation.bounds import Energies
from onnxq.runtime.sessions import Array
from onnxq.system.resources import cached_by_array

# Number of rows of similar margin whose errors are tried on each row. With its own error alone, a turnover is luck.
_ALIKE = 32
# Number of other samples whose errors are tried on a row with a smaller margin than all.
_OTHERS = 7
# Number of rows of the smallest margins that are kept of each sample; the others did not turn over.
_UNSURE = 128
# Number of likeliest outcomes that are kept of each row; all others count as one.
_OUTCOMES = 16
# Rows of probabilities add up to one, to the precision of float16.
_ROUNDING = 2e-3
# Smaller probabilities are raised to this, as errors of their logarithms do not matter; the second is for float16.
_TINY, _TINY_OF_HALVES = np.float32(1e-12), np.float32(1e-6)
# Smaller numbers are no normal float32.
_LEAST = 1e-37
# Possible margins of an unseen row, evenly spaced, as parts of the smallest margin.
_LESS_SURE = (0.125, 0.375, 0.625, 0.875)


class UnsureRows(NamedTuple):
    """The rows of a sample's probabilities with the smallest margins, at most 128.

    Attributes:
        expected: the reference's likeliest outcomes in order and the sum of all others, in float64.
        found: the candidate's probabilities of these outcomes.
        least: index of the row of the smallest margin.
        total: number of rows of the sample.
        others: error energy of the remaining rows.
    """

    expected: Array
    found: Array
    least: int
    total: int
    others: float


class _Unsure(NamedTuple):
    """The reference's rows with the smallest margins between their first two outcomes, at most 128.

    Attributes:
        places: indices of these rows; None stands for all.
        least: index of the row of the smallest margin.
        outcomes: indices of each row's likeliest outcomes in order.
        ranked: the probabilities of these, and the sum of all others.
    """

    places: NDArray[np.intp] | None
    least: int
    outcomes: NDArray[np.intp]
    ranked: NDArray[np.float64]

    def of(self, array: Array) -> Array:
        """Return these rows of the reference's or the candidate's probabilities."""
        rows = _rows(array)
        return rows if self.places is None else rows[self.places]


@cached_by_array
def are_probabilities(array: Array) -> bool:
    """Whether the last axis holds probabilities of two or more outcomes."""
    if array.ndim < 2 or array.shape[-1] < 2 or not array.size:
        return False
    return bool(array.min() >= 0 and np.allclose(array.sum(-1), 1, 0, _ROUNDING))


def unsure_rows(one: Array, other: Array, noise: float) -> UnsureRows:
    """Return the rows that may turn over.

    Args:
        one: the reference's probabilities, in float32 or wider.
        other: the candidate's.
        noise: the energy of their difference.
    """
    unsure = _unsure(one)
    found, others = unsure.of(other), 0.0
    if unsure.places is not None:
        error = found - unsure.of(one)
        others = max(noise - float(np.vdot(error, error)), 0.0)
    ranked = _first_and_rest(found, unsure.outcomes)
    return UnsureRows(unsure.ranked, ranked, unsure.least, one.size // one.shape[-1], others)


def expected_noises(samples: Sequence[UnsureRows], *, halves: bool = False) -> list[float]:
    """Return the error energy of each sample of probabilities, as the mean over errors that are as likely.

    An error is a factor on each probability, before rows are normalized again. It is luck whether an error turns an
    answer over or makes it surer, and plans are chosen by these errors. So each row gets its own error and the errors
    of rows of similar margin in any sample. They are applied to its outcomes in order of probability, with either sign.

    Args:
        samples: the unsure rows of each sample.
        halves: whether the numbers were computed in float16 or bfloat16.
    """
    tiny = _TINY_OF_HALVES if halves else _TINY
    rows, errors = (np.concatenate(some) for some in zip(*(_errors(one, tiny) for one in samples), strict=True))
    noises = np.split(_expected_noises(rows, errors), list(accumulate(len(one.expected) for one in samples))[:-1])
    return [one.others + float(might.sum()) for one, might in zip(samples, noises, strict=True)]


def unseen_noise(samples: Sequence[UnsureRows], *, halves: bool = False) -> float:
    """Return the mean error energy that unseen rows of a smaller margin than all add to a sample.

    The next row is as likely as any row before to have the smallest margin between its first two outcomes. Its margin
    then lies anywhere below the smallest one: the nearest neighbour estimates the density of margins at zero
    (Loftsgaarden and Quesenberry, The Annals of Mathematical Statistics 1965). It gets the errors of a few rows, on its
    outcomes in order of probability, with either sign.

    Args:
        samples: the unsure rows of each sample.
        halves: whether the numbers were computed in float16 or bfloat16.
    """
    tiny = _TINY_OF_HALVES if halves else _TINY
    rows, errors = (
        np.stack([part[one.least] for one, part in zip(samples, some, strict=True)])
        for some in zip(*(_errors(one, tiny) for one in samples), strict=True)
    )
    margins = np.log(rows[:, 0] / rows[:, 1])
    place = int(np.argmin(margins))
    less_sure = np.tile(rows[place], (len(_LESS_SURE), 1))
    less_sure[:, 0] *= np.exp(margins[place] * (np.array(_LESS_SURE) - 1))
    less_sure /= less_sure.sum(-1, keepdims=True)
    met = [errors[(place + away) % len(errors)] for away in range(min(len(errors), 1 + _OTHERS))]
    noises = [float(_noises(less_sure, np.exp(sign * error)).sum()) for error in met for sign in (1, -1)]
    mean = math.fsum(noises) / len(noises) / len(_LESS_SURE)
    count = sum(one.total for one in samples)
    return mean * count / (count + 1) / len(samples)


def energies_of_logarithms(one: Array, other: Array) -> Energies:
    """Return the energies of the inputs of a Softmax less the mean of each row, computed from its outputs.

    Args:
        one: the reference's probabilities.
        other: the candidate's.
    """
    error = np.log(_no_less(other) / _no_less(one))
    error -= error.mean(-1, keepdims=True)
    return _signal_of_logarithms(one), float(np.vdot(error, error))


@cached_by_array
def _signal_of_logarithms(probabilities: Array) -> float:
    logarithms = np.log(_no_less(probabilities))
    logarithms -= logarithms.mean(-1, keepdims=True)
    return float(np.vdot(logarithms, logarithms))


def _no_less(probabilities: Array) -> Array:
    return np.maximum(probabilities, _LEAST, dtype=probabilities.dtype)


@cached_by_array
def _unsure(array: Array) -> _Unsure:
    rows = _rows(array)
    margins = _margins(rows)
    places = np.argpartition(margins, _UNSURE - 1)[:_UNSURE] if len(rows) > _UNSURE else None
    unsure = rows if places is None else rows[places]
    count = min(_OUTCOMES, rows.shape[-1])
    likeliest = np.argpartition(unsure, -count, -1)[:, -count:]
    order = np.argsort(-np.take_along_axis(unsure, likeliest, -1), -1, kind="stable")
    outcomes = np.take_along_axis(likeliest, order, -1)
    least = int((margins if places is None else margins[places]).argmin())
    return _Unsure(places, least, outcomes, _first_and_rest(unsure, outcomes))


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _first_and_rest(rows: Array, places: Array) -> Array:
    """Return the values of rows at indices, and the sum of all others."""
    rest = rows.copy()
    np.put_along_axis(rest, places, 0, -1)
    # Rows of fewer outcomes, such as those of shorter samples, get more outcomes of probability 0.
    found = np.zeros((len(rows), _OUTCOMES + 1))
    found[:, : places.shape[-1]] = np.take_along_axis(rows, places, -1)
    found[:, -1] = rest.sum(-1)
    return found


def _expected_noises(rows: Array, errors: Array) -> Array:
    """Return each ranked row's error energy: the mean over errors of rows of similar margin, with either sign."""
    order = np.argsort(rows[:, 0] / rows[:, 1], kind="stable")
    alike = min(_ALIKE, len(rows))
    first = np.clip(np.arange(len(rows)) - alike // 2, 0, len(rows) - alike)
    noises = np.zeros(len(rows))
    for away in range(alike):
        error = errors[order[first + away]]
        for factor in (np.exp(error), np.exp(-error)):
            noises[order] += _noises(rows[order], factor)
    return np.asarray(noises / (2 * alike))


def _errors(one: UnsureRows, tiny: np.float32) -> tuple[Array, Array]:
    """Return the unsure rows of the reference, and the logarithms of the factors on them."""
    rows = np.maximum(one.expected, tiny)
    return rows, np.log(np.maximum(one.found, tiny) / rows)


def _noises(one: Array, factor: Array) -> Array:
    """Return the error energy that a factor causes in each row of probabilities."""
    error = one * factor
    error /= np.maximum(error.sum(-1, keepdims=True), _TINY)
    error -= one
    return np.asarray(np.square(error).sum(-1))


def _margins(rows: Array) -> Array:
    """Return the logarithmic margin between the first two outcomes of each row."""
    second, first = np.maximum(np.partition(rows, -2, -1)[:, -2:], _TINY).T
    return np.asarray(np.log(first / second))
