"""What errors do to probabilities: few answers turn over, so what was seen of some samples is mostly luck."""

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

# Errors of so many rows are tried on each that is as sure: of its own alone, whether it turns over is luck.
_ALIKE = 32
# On a row that is less sure than all, errors of so many other samples are tried.
_OTHERS = 7
# Of each sample, so many rows that are the least sure; the others were seen not to turn over.
_UNSURE = 128
# Outcomes of a row that are told apart, the likeliest; all others count as one.
_OUTCOMES = 16
# Rows of probabilities add up to one, as far as float16 tells.
_ROUNDING = 2e-3
# Errors of the logarithms of less are no matter, and elsewhere they would be; float16 tells no less than the second.
_TINY, _TINY_OF_HALVES = np.float32(1e-12), np.float32(1e-6)
# Less is no normal float32.
_LEAST = 1e-37
# Parts of the least margin that was seen, evenly spread, which a row that is less sure may have.
_LESS_SURE = (0.125, 0.375, 0.625, 0.875)


class UnsureRows(NamedTuple):
    """Rows of probabilities of a sample that are the least sure, 128 at most.

    Attributes:
        expected: what the reference gives their likeliest outcomes in order, and all others together, in float64.
        found: what the candidate gives these.
        least: the place of the row of the least margin.
        total: how many rows the sample has.
        others: the noise of the rows that are surer.
    """

    expected: Array
    found: Array
    least: int
    total: int
    others: float


class _Unsure(NamedTuple):
    """The rows of a reference's probabilities of the least margins between their first two outcomes, 128 at most.

    Attributes:
        places: of these rows among all; None where there are no others.
        least: place of the row of the least margin.
        outcomes: places of each row's likeliest outcomes in order.
        ranked: the probabilities of these, and of all others as one.
    """

    places: NDArray[np.intp] | None
    least: int
    outcomes: NDArray[np.intp]
    ranked: NDArray[np.float64]

    def of(self, array: Array) -> Array:
        """Return the rows in these places of the reference's or the candidate's probabilities."""
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
    """Return the noise of each sample of probabilities as the mean over errors that might have been.

    An error is the factor on each probability, before rows are made to add up to one again. Whether it turns an answer
    over, or makes it the surer, is luck, and plans are chosen by what was seen. So each row meets its own error and
    those of the rows of any sample that are about as sure, on its outcomes in the order of how likely they are, with
    either sign.

    Args:
        samples: of each its unsure rows.
        halves: whether the numbers were computed in float16 or bfloat16.
    """
    tiny = _TINY_OF_HALVES if halves else _TINY
    rows, errors = (np.concatenate(some) for some in zip(*(_errors(one, tiny) for one in samples), strict=True))
    noises = np.split(_expected_noises(rows, errors), list(accumulate(len(one.expected) for one in samples))[:-1])
    return [one.others + float(might.sum()) for one, might in zip(samples, noises, strict=True)]


def unseen_noise(samples: Sequence[UnsureRows], *, halves: bool = False) -> float:
    """Return what rows that are less sure than all that were seen add to the noise of a sample, in the mean.

    The next row is as likely as any of those before to be the least sure, and then its margin between the first two
    outcomes lies anywhere below the least that was seen: the density of margins at zero as the nearest neighbour tells
    it (Loftsgaarden and Quesenberry, The Annals of Mathematical Statistics 1965). It meets the errors of a few of the
    rows, on its outcomes in the order of how likely they are, with either sign.

    Args:
        samples: of each its unsure rows.
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
    """Return the energies of what entered a Softmax, less the mean of each row, by what came out of it.

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
    """Return what rows hold in some places, and the sum of all else."""
    rest = rows.copy()
    np.put_along_axis(rest, places, 0, -1)
    # Rows of fewer outcomes, such as those of shorter samples, have more that are impossible.
    found = np.zeros((len(rows), _OUTCOMES + 1))
    found[:, : places.shape[-1]] = np.take_along_axis(rows, places, -1)
    found[:, -1] = rest.sum(-1)
    return found


def _expected_noises(rows: Array, errors: Array) -> Array:
    """Return the noise of each ranked row in the mean over the errors of those that are as sure, with either sign."""
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
    """Return the energy of what a factor changes of each row of probabilities."""
    error = one * factor
    error /= np.maximum(error.sum(-1, keepdims=True), _TINY)
    error -= one
    return np.asarray(np.square(error).sum(-1))


def _margins(rows: Array) -> Array:
    """Return the logarithmic margin between the first two outcomes of rows of probabilities."""
    second, first = np.maximum(np.partition(rows, -2, -1)[:, -2:], _TINY).T
    return np.asarray(np.log(first / second))
