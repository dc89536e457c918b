"""The expected error of scores and probabilities: few answers turn over, so on a few samples it is mostly luck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxq.evaluation.bounds import Energies
from onnxq.runtime.sessions import Array
from onnxq.system.resources import cached_by_array

# Number of samples, those that are about as sure, whose errors are tried on each sample.
_PARTNERS = 16
# Number of answers of the smallest margins that are kept of each sample; the others did not turn over.
_UNSURE = 128
# Number of likeliest outcomes that are kept of each answer; all others count as one.
_OUTCOMES = 16
# Rows of probabilities add up to one, to the precision of float16.
_ROUNDING = 2e-3
# Smaller probabilities are raised to this, as errors of their logarithms do not matter.
_TINY = 1e-12
# Smaller numbers are no normal float32.
_LEAST = 1e-37
# Possible margins of an unseen answer, evenly spaced, as parts of the smallest margin.
_LESS_SURE = (0.125, 0.375, 0.625, 0.875)


class UnsureAnswers(NamedTuple):
    """The answers of a sample with the smallest margins, at most 128: rows of probabilities, or single scores.

    A score p is a row of the two outcomes p and 1 - p, of which only the first is an element of the output.

    Attributes:
        expected: the reference's likeliest outcomes in order and the sum of all others, in float64.
        errors: logarithms of the factors between the candidate's probabilities of these outcomes and the reference's.
        margins: logarithmic margin between the first two outcomes of each answer, in ascending order.
        weight: how much the error of an outcome counts: 1 in rows of probabilities, and 1/2 for scores.
        others: error energy that these factors do not describe, such as that of the remaining answers.
    """

    expected: NDArray[np.float64]
    errors: NDArray[np.float64]
    margins: NDArray[np.float64]
    weight: float
    others: float


class _Ranked(NamedTuple):
    """The reference's answers with the smallest margins.

    Attributes:
        places: indices of these answers.
        outcomes: indices of each answer's likeliest outcomes in order.
        probabilities: of these outcomes, and the sum of all others.
    """

    places: NDArray[np.intp]
    outcomes: NDArray[np.intp]
    probabilities: NDArray[np.float64]
    margins: NDArray[np.float64]


@cached_by_array
def are_shares(array: Array) -> bool:
    """Whether rows along the last axis add up to one, without negative values."""
    if array.ndim < 2 or array.shape[-1] < 2 or not array.size:
        return False
    return bool(array.min() >= 0 and np.allclose(array.sum(-1), 1, 0, _ROUNDING))


def are_probabilities(array: Array) -> bool:
    """Whether the last axis holds probabilities of two or more outcomes, as a Softmax gives them.

    A Softmax gives no exact zeros. Rows with zeros come from sparsemax, routers or one-hot codes, where 0 instead of
    0.001 is a small error, although the error of the logarithm is infinite.
    """
    return are_shares(array) and bool(array.min() > 0)


@cached_by_array
def are_scores(array: Array) -> bool:
    """Whether each value may be the probability of an outcome that does not depend on the others, as of a Sigmoid."""
    return bool(array.size and array.min() > 0 and array.max() <= 1)


def unsure_answers(reference: Array, candidate: Array, noise: float) -> UnsureAnswers | None:
    """Return the answers that may turn over; None if an output holds neither probabilities nor scores.

    Args:
        reference: the reference's output, in float32 or wider.
        candidate: the candidate's.
        noise: the energy of their difference.
    """
    rows = are_probabilities(reference)
    if not rows and not (are_scores(reference) and candidate.min() >= 0 and candidate.max() <= 1):
        return None
    ranked, weight = _ranked(reference), 1.0 if rows else 0.5
    actual = _first_and_rest(_answers(candidate, ranked.places, rows=rows), ranked.outcomes)
    # Where the candidate has zeros, it is coarser than the reference, and tells nothing of smaller probabilities.
    likeliest = actual[:, : ranked.outcomes.shape[-1]]
    least = max(_TINY, float(actual[actual > 0].min()) if (likeliest <= 0).any() and (actual > 0).any() else 0.0)
    errors = np.log(np.maximum(actual, least) / np.maximum(ranked.probabilities, least))
    expected = np.maximum(ranked.probabilities, _TINY)
    # These factors do not describe the error of such zeros, nor of rows that do not add up to one.
    described = weight * float(_squares(expected * np.exp(errors), expected).sum())
    return UnsureAnswers(expected, errors, ranked.margins, weight, max(noise - described, 0.0))


def expected_noises(samples: Sequence[UnsureAnswers]) -> list[float]:
    """Return error energies of samples whose mean and spread depend less on chance than the measured energies.

    An error is a factor on each probability, before rows are normalized again. It is chance whether the largest error
    meets the least certain sample, and whether an error flips an answer or makes it more certain. So each sample gets
    the errors of 16 samples of similar certainty: of the answer with the nearest margin, on outcomes in order of
    probability, with either sign. The mean over all pairs is a V-statistic of two samples. Its first-order projection
    gives the energy of each sample: the mean of its own answers with all errors, plus that of its own errors on all
    answers, less the mean of all (Hoeffding, The Annals of Mathematical Statistics 1948). It may be negative; the sum
    is not.

    Args:
        samples: the unsure answers of each sample.
    """
    count = len(samples)
    partners = min(count, _PARTNERS)
    order = sorted(range(count), key=lambda place: samples[place].margins[0])
    of_answers, of_errors = np.zeros(count), np.zeros(count)
    for rank, place in enumerate(order):
        first = min(max(rank - partners // 2, 0), count - partners)
        alike = order[first : first + partners]
        noises = _noises_with(samples[place], [samples[partner] for partner in alike]) / partners
        of_answers[place] = noises.sum()
        of_errors[alike] += noises
    projected = of_answers + of_errors - of_answers.mean()
    return [float(noise) + sample.others for noise, sample in zip(projected, samples, strict=True)]


def unseen_noise(samples: Sequence[UnsureAnswers]) -> float:
    """Return the mean error energy of an unseen answer of a smaller margin than all.

    The next answer is as likely as any before to have the smallest margin between its first two outcomes. Its margin
    then lies anywhere below the smallest one: the nearest neighbour estimates the density of margins at zero
    (Loftsgaarden and Quesenberry, The Annals of Mathematical Statistics 1965). It gets the errors of the least sure
    answer of each sample, with either sign.

    Args:
        samples: the unsure answers of each sample.
    """
    least = min(samples, key=lambda sample: sample.margins[0])
    less_sure = np.tile(least.expected[0], (len(_LESS_SURE), 1))
    less_sure[:, 0] *= np.exp(least.margins[0] * (np.array(_LESS_SURE) - 1))
    less_sure /= less_sure.sum(-1, keepdims=True)
    errors = np.stack([sample.errors[:1] for sample in samples[:: -(-len(samples) // _PARTNERS)]])
    return least.weight * float(_noises(less_sure, errors).mean()) / len(_LESS_SURE)


def energies_of_logarithms(expected: Array, actual: Array) -> Energies:
    """Return the energies of the inputs of a Softmax less the mean of each row, computed from its outputs.

    Args:
        expected: the reference's probabilities.
        actual: the candidate's.
    """
    error = np.log(_no_less(actual) / _no_less(expected))
    error -= error.mean(-1, keepdims=True)
    return _signal_of_logarithms(expected), float(np.vdot(error, error))


@cached_by_array
def _signal_of_logarithms(probabilities: Array) -> float:
    logarithms = np.log(_no_less(probabilities))
    logarithms -= logarithms.mean(-1, keepdims=True)
    return float(np.vdot(logarithms, logarithms))


def _no_less(probabilities: Array) -> Array:
    return np.maximum(probabilities, _LEAST, dtype=probabilities.dtype)


@cached_by_array
def _ranked(reference: Array) -> _Ranked:
    rows = are_probabilities(reference)
    if rows:
        second, first = np.partition(reference.reshape(-1, reference.shape[-1]), -2, -1)[:, -2:].T
        distances = np.log(np.maximum(first, _TINY) / np.maximum(second, _TINY))
    else:
        distances = np.abs(reference.reshape(-1) - 0.5)
    count = min(_UNSURE, distances.size)
    places = np.argpartition(distances, count - 1)[:count]
    places = places[np.argsort(distances[places], kind="stable")]
    answers = _answers(reference, places, rows=rows)
    likeliest = np.argpartition(-answers, min(_OUTCOMES, answers.shape[-1]) - 1, -1)[:, :_OUTCOMES]
    order = np.argsort(-np.take_along_axis(answers, likeliest, -1), -1, kind="stable")
    outcomes = np.take_along_axis(likeliest, order, -1)
    probabilities = _first_and_rest(answers, outcomes)
    first, second = np.maximum(probabilities[:, :2], _TINY).T
    return _Ranked(places, outcomes, probabilities, np.log(first / second))


def _answers(array: Array, places: NDArray[np.intp], *, rows: bool) -> NDArray[np.float64]:
    """Return some rows of probabilities, or scores beside their complements to one."""
    if rows:
        return array.reshape(-1, array.shape[-1])[places].astype(np.float64)
    scores = array.reshape(-1)[places].astype(np.float64)
    return np.stack([scores, 1 - scores], -1)


def _first_and_rest(answers: NDArray[np.float64], outcomes: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the probabilities of outcomes, and the sum of all others."""
    rest = answers.copy()
    np.put_along_axis(rest, outcomes, 0, -1)
    # Rows of fewer outcomes, such as those of shorter samples, get more outcomes of probability 0.
    shares = np.zeros((len(answers), _OUTCOMES + 1))
    shares[:, : outcomes.shape[-1]] = np.take_along_axis(answers, outcomes, -1)
    shares[:, -1] = rest.sum(-1)
    return shares


def _noises_with(sample: UnsureAnswers, partners: Sequence[UnsureAnswers]) -> NDArray[np.float64]:
    """Return the error energies of a sample with the errors of others, each of the answer of the nearest margin."""
    nearest = (
        np.searchsorted((partner.margins[1:] + partner.margins[:-1]) / 2, sample.margins) for partner in partners
    )
    errors = np.stack([partner.errors[places] for partner, places in zip(partners, nearest, strict=True)])
    return sample.weight * _noises(sample.expected, errors)


def _noises(expected: NDArray[np.float64], errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the energies of several errors in rows of probabilities, each as the mean over both signs."""
    factors = np.exp(errors)
    shifted = (expected * factors, expected / factors)
    return np.asarray(sum(_squares(answers, expected).sum(-1) / 2 for answers in shifted))


def _squares(outcomes: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the energy of the error of each row of outcomes, once it is normalized."""
    normalized = outcomes / np.maximum(outcomes.sum(-1, keepdims=True), _TINY)
    return np.asarray(np.square(normalized - expected).sum(-1))
