"""What errors do to probabilities: few answers turn over, so what was seen of some samples is mostly luck."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onnxq.judging.bounds import Energies
from onnxq.runtime import Array

# Errors of so many other samples are tried on each: of a few alone, which answers they turn over is luck.
_OTHERS = 7
# Rows of probabilities add up to one, as far as float16 tells.
_ROUNDING = 2e-3
# Errors of the logarithms of less are no matter, and elsewhere they would be; float16 tells no less than the second.
_TINY, _TINY_OF_HALVES = np.float32(1e-12), np.float32(1e-6)
# Less is no normal float32.
_LEAST = 1e-37
# Parts of the least margin that was seen, evenly spread, which a row that is less sure may have.
_LESS_SURE = (0.125, 0.375, 0.625, 0.875)

Pairs = Sequence[tuple[Array, Array]]
"""The reference's probabilities for each sample, and the candidate's, in float32 or wider."""


def are_probabilities(array: Array) -> bool:
    """Whether the last axis holds probabilities of two or more outcomes."""
    if array.ndim < 2 or array.shape[-1] < 2 or not array.size:
        return False
    return bool(array.min() >= 0 and np.allclose(array.sum(-1), 1, 0, _ROUNDING))


def expected_energies(pairs: Pairs, seen: Sequence[Energies], *, halves: bool = False) -> list[Energies]:
    """Return the energies of each sample of probabilities, the noise as the mean over errors that might have been.

    An error is the factor on each probability, before rows are made to add up to one again. Whether it turns an answer
    over, or makes it the surer, is luck, and plans are chosen by what was seen. So each sample meets its own error, and
    those of a few others, turned round by turns.

    Args:
        pairs: of each sample, one or more rows in the last axis.
        seen: the energies of each sample as they are.
        halves: whether the numbers were computed in float16 or bfloat16.
    """
    errors = _errors(pairs, _TINY_OF_HALVES if halves else _TINY)
    found = []
    for place, (one, _) in enumerate(pairs):
        signal, noise = seen[place]
        noises = [noise, *(_noise(one, factor) for factor in _others(errors, place))]
        found.append((signal, math.fsum(noises) / len(noises)))
    return found


def unseen_noise(unsure: Pairs, rows: int, *, halves: bool = False) -> float:
    """Return what rows that are less sure than all that were seen add to the noise of a sample, in the mean.

    The next row is as likely as any of those before to be the least sure, and then its margin between the first two
    outcomes lies anywhere below the least that was seen: the density of margins at zero as the nearest neighbour tells
    it (Loftsgaarden and Quesenberry, The Annals of Mathematical Statistics 1965). It meets the errors of a few of the
    rows, with either sign.

    Args:
        unsure: of each sample its `least_sure` row.
        rows: how many all samples have together.
        halves: whether the numbers were computed in float16 or bfloat16.
    """
    tiny = _TINY_OF_HALVES if halves else _TINY
    margins = [_margins(one[None])[0] for one, _ in unsure]
    place = int(np.argmin(margins))
    less_sure = np.tile(unsure[place][0].astype(np.float64), (len(_LESS_SURE), 1))
    less_sure[:, less_sure[0].argmax()] *= np.exp(margins[place] * (np.array(_LESS_SURE) - 1))
    less_sure /= less_sure.sum(-1, keepdims=True)
    noises = []
    for away in range(min(len(unsure), 1 + _OTHERS)):
        one, other = (np.maximum(array, tiny) for array in unsure[(place + away) % len(unsure)])
        noises += [_noise(less_sure, other / one), _noise(less_sure, one / other)]
    mean = math.fsum(noises) / len(noises) / len(_LESS_SURE)
    return float(mean * rows / (rows + 1) / len(unsure))


def least_sure(one: Array, other: Array) -> tuple[Array, Array]:
    """Return the reference's row with the least margin between the first two outcomes, and the candidate's."""
    rows = one.reshape(-1, one.shape[-1])
    number = int(_margins(rows).argmin())
    return rows[number], other.reshape(rows.shape)[number]


def centred_logarithms(probabilities: Array) -> Array:
    """Return what entered a Softmax, less the mean of each row, from what came out of it."""
    logarithms = np.log(np.maximum(probabilities, _LEAST, dtype=probabilities.dtype))
    logarithms -= logarithms.mean(-1, keepdims=True)
    return np.asarray(logarithms)


def _errors(pairs: Pairs, tiny: np.floating[Any]) -> list[tuple[Array, Array]]:
    """Return the error of each sample, as it was and turned round."""
    found = []
    for pair in pairs:
        one, other = (np.maximum(array, tiny) for array in pair)
        found.append((np.divide(other, one), np.divide(one, other)))
    return found


def _others(errors: Sequence[tuple[Array, Array]], place: int) -> Iterator[Array]:
    """Yield the errors of the samples after one, turned round by turns."""
    shape = errors[place][0].shape
    for away in range(1, max(min(len(errors), 1 + _OTHERS), 2)):
        factor = errors[(place + away) % len(errors)][away % 2]
        # Of another number of rows, those there are take turns.
        yield factor if factor.shape == shape else np.resize(factor, shape)


def _noise(one: Array, factor: Array) -> float:
    """Return the energy of what a factor changes of probabilities."""
    error = one * factor
    error /= np.maximum(error.sum(-1, keepdims=True), _TINY)
    error -= one
    return float(np.vdot(error, error))


def _margins(rows: Array) -> Array:
    """Return the logarithmic margin between the first two outcomes of rows of probabilities."""
    second, first = np.maximum(np.partition(rows, -2, -1)[:, -2:], _TINY).T
    return np.asarray(np.log(first / second))
