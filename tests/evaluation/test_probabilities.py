"""What errors do to probabilities that were seen, and to those that were not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.bounds import lower_bound
from onnxq.evaluation.probabilities import (
    UnsureAnswers,
    are_probabilities,
    are_scores,
    are_shares,
    energies_of_logarithms,
    expected_noises,
    unseen_noise,
    unsure_answers,
)
from onnxq.evaluation.sqnr import estimate_sqnr


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def energies(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    return float(np.square(one).sum()), float(np.square(other - one).sum())


def answers(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[UnsureAnswers]:
    found = [unsure_answers(*pair, energies(*pair)[1]) for pair in pairs]
    assert None not in found
    return [one for one in found if one is not None]


def unseen(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    return unseen_noise(answers(pairs))


def expected(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    return expected_noises(answers(pairs))


def sure_of_two(count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of a classifier of two outcomes that is hardly ever unsure, and errors of one unit."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 15, (count, 1, 1)) * [0.5, -0.5]
    error = generator.normal(0, 1, (count, 1, 1)) * [0.5, -0.5]
    return list(zip(softmax(logits), softmax(logits + error), strict=True))


@pytest.mark.parametrize("count", [4, 16])
def test_bounds_miss_by_less_where_hardly_any_answer_turns_over(count: int) -> None:
    everything = sure_of_two(2400, 0)
    true = agreement_of(["p"], [((one,), (other,)) for one, other in everything]).worst_sqnr
    seen = [everything[start : start + count] for start in range(0, 2400, count)][:150]
    found, alone = (
        np.array([bound(part) for part in seen])
        for bound in (
            lambda part: estimate_sqnr([((one,), (other,)) for one, other in part]),
            lambda part: lower_bound([energies(*pair) for pair in part]),
        )
    )
    assert np.mean(found <= true) > np.mean(alone <= true) + 0.05
    missed, missed_alone = (np.quantile(bounds - true, 0.9) for bounds in (found, alone))
    assert missed < min(11.0, missed_alone - 3)


def test_a_row_that_is_less_sure_makes_the_more_noise_the_less_sure_all_are() -> None:
    error = np.float32([[0.5, -0.5, 0.0]])
    found = []
    for margin in (1.0, 5.0, 25.0):
        logits = np.float32([[margin, 0.0, -30.0]])
        found.append(unseen([(softmax(logits), softmax(logits + error))] * 4))
    assert found == sorted(found, reverse=True)
    assert found[0] > 10 * found[-1] > 0
    same = softmax(np.random.default_rng(0).normal(0, 3, (6, 2, 10)))
    assert unseen([(one, one) for one in same]) < 1e-12


def test_a_row_meets_errors_of_others_with_either_sign() -> None:
    sure, unsure = np.float32([[9.0, 0.0]]), np.float32([[0.5, 0.0]])
    error = np.float32([[1.0, -1.0]])
    pairs = [(softmax(sure), softmax(sure + error)), (softmax(unsure), softmax(unsure))]
    found = expected(pairs)
    straight, turned = (energies(softmax(unsure), softmax(unsure + sign * error))[1] for sign in (1, -1))
    own = energies(*pairs[0])[1] / 2 + energies(softmax(sure), softmax(sure - error))[1] / 2
    both = (straight + turned) / 2
    # The mean of each row with both errors, and of both rows with each error, less the mean of all.
    mean = (own + both) / 4
    assert found == pytest.approx([own / 2 + (own + both) / 2 - mean, both / 2 + 0 - mean], rel=1e-3)
    assert sum(found) == pytest.approx(2 * mean, rel=1e-3)


def test_rows_meet_the_errors_of_those_that_are_as_sure() -> None:
    generator = np.random.default_rng(0)
    unsure = [np.float32([[margin, 0.0, -1.0]]) for margin in np.linspace(0, 1, 64)]
    sure = [np.float32([[margin, 0.0, -1.0]]) for margin in np.linspace(8, 9, 64)]
    # Logits that are far from one another err by more.
    error = [generator.normal(0, 0.01, (1, 3)) for _ in unsure] + [generator.normal(0, 3, (1, 3)) for _ in sure]
    pairs = [(softmax(one), softmax(one + off)) for one, off in zip(unsure + sure, error, strict=True)]
    noises = expected(pairs)
    assert max(noises[:32]) < 1e-3 < max(noises[64:])


@pytest.mark.parametrize("outcomes", [3, 16, 17, 500])
def test_many_rows_make_the_noise_that_was_seen_where_errors_are_alike(outcomes: int) -> None:
    generator = np.random.default_rng(outcomes)
    logits = generator.normal(0, 3, (8, 200, outcomes))
    pairs = list(zip(softmax(logits), softmax(logits + generator.normal(0, 0.3, logits.shape)), strict=True))
    assert sum(expected(pairs)) == pytest.approx(sum(energies(*pair)[1] for pair in pairs), rel=0.1)


def test_samples_may_have_rows_of_other_lengths() -> None:
    generator = np.random.default_rng(0)
    logits = [generator.normal(0, 3, (length, length)) for length in (3, 20, 40)]
    pairs = [(softmax(one), softmax(one + generator.normal(0, 0.1, one.shape))) for one in logits]
    noises = expected(pairs)
    assert np.isfinite(noises).all()
    assert sum(noises) > 0
    assert 0 < unseen(pairs) < math.inf


def test_of_many_rows_the_least_sure_is_found_wherever_it_is() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (300, 5))
    logits[299, :2] = 9.0, 9.001
    one, other = softmax(logits), softmax(logits + generator.normal(0, 0.1, logits.shape))
    [rows] = answers([(one, other)])
    assert len(rows.expected) == 128
    assert rows.expected[0, 0] == pytest.approx(one[299].max())
    assert 0 < unseen([(one, other)]) < math.inf


def test_a_row_that_is_less_sure_meets_errors_by_rank_of_the_outcome() -> None:
    """Which class is likely differs from sample to sample, and so may the number of classes."""
    ranked = np.float32([[2.0, 1.0, -30.0]]), np.float32([[2.3, 0.9, -30.0]])
    pair = tuple(softmax(one) for one in ranked)
    turned = tuple(softmax(one[:, ::-1]) for one in ranked)
    longer = tuple(softmax(np.pad(one, ((0, 0), (0, 30)), constant_values=-30)) for one in ranked)
    assert unseen([pair, turned, longer]) == pytest.approx(unseen([pair] * 3), rel=1e-4)


@pytest.mark.parametrize(
    ("array", "kinds"),
    [
        ([[0.5, 0.5]], (True, True, True)),
        ([[0.5, 0.6]], (False, False, True)),
        ([0.5, 0.5], (False, False, True)),
        ([[1.0]], (False, False, True)),
        ([[-0.5, 1.5]], (False, False, False)),
        # sparsemax, routers and one-hot codes
        ([[0.7, 0.3, 0.0]], (True, False, False)),
        ([[1.0, 0.0]], (True, False, False)),
        ([[0.3, 1.01]], (False, False, False)),
        ([[0.3, np.nan]], (False, False, False)),
        (np.zeros((0, 2)), (False, False, False)),
    ],
)
def test_shares_and_probabilities_and_scores(array: list[object], kinds: tuple[bool, bool, bool]) -> None:
    values = np.float32(array)
    assert (are_shares(values), are_probabilities(values), are_scores(values)) == kinds


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def test_scores_are_judged_as_probabilities_of_two_outcomes() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (6, 40))
    noisy = logits + generator.normal(0, 0.5, logits.shape)
    two = [
        (softmax(np.stack([one, 0 * one], -1)), softmax(np.stack([other, 0 * other], -1)))
        for one, other in zip(logits, noisy, strict=True)
    ]
    alone = list(zip(sigmoid(logits), sigmoid(noisy), strict=True))
    assert expected(alone) == pytest.approx([noise / 2 for noise in expected(two)], rel=1e-4)
    assert unseen(alone) == pytest.approx(unseen(two) / 2, rel=1e-4)


@pytest.mark.parametrize("steps", [1, 8, 255])
@pytest.mark.parametrize("outcomes", [1, 3], ids=["scores", "rows"])
def test_answers_that_were_rounded_to_zero_are_no_better_than_they_were_measured(outcomes: int, steps: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 20, outcomes))
    answers = sigmoid(logits) if outcomes == 1 else softmax(logits)
    rounded = np.round(answers * steps) / np.float32(steps)
    found = agreement_of(["y"], [((one,), (other,)) for one, other in zip(answers, rounded, strict=True)]).outputs[0]
    assert found.sqnr is not None
    assert found.bound is not None
    assert found.bound < found.sqnr


def test_sure_scores_of_few_samples_do_not_vouch_for_unsure_ones() -> None:
    """Three samples of sure scores have 64 dB, and four with one unsure score among them 24 dB."""
    error = np.float32([[0.6, -0.6, 0.6, -0.6]])
    logits = np.float32([[[7, 8, -7, -8]]] * 3 + [[[1, 8, -7, -8]]])
    pairs = [(sigmoid(one), sigmoid(one + error)) for one in logits]
    truth = agreement_of(["y"], [((one,), (other,)) for one, other in pairs]).worst_sqnr
    seen = agreement_of(["y"], [((one,), (other,)) for one, other in pairs[:3]]).outputs[0]
    assert seen.sqnr is not None
    assert seen.bound is not None
    assert seen.bound < truth < seen.sqnr - 30
    assert lower_bound([energies(*pair) for pair in pairs[:3]]) > truth + 20


def test_a_tiny_error_of_sure_answers_leaves_a_high_bound() -> None:
    """An unsure answer would have a million times the noise, and still next to none."""
    logits = np.float32([[[margin, 0.0]] for margin in (14, 15, 16, 17, 18, 19)])
    pairs = [((softmax(one),), (softmax(one + np.float32([[1e-3, -1e-3]])),)) for one in logits]
    found = agreement_of(["y"], pairs).outputs[0]
    assert found.sqnr is not None
    assert found.bound is not None
    assert 55 < found.bound < found.sqnr - 40


def test_zeros_of_a_coarser_candidate_are_no_endless_errors() -> None:
    scores = sigmoid(np.random.default_rng(0).normal(-4, 3, (8, 200)))
    pairs = [((one,), (np.round(one * 255) / np.float32(255),)) for one in scores]
    found = agreement_of(["y"], pairs).outputs[0]
    assert found.sqnr is not None
    assert found.bound is not None
    assert (scores < 1 / 510).any()
    assert found.sqnr - 3 < found.bound


def test_energies_of_logarithms_are_those_of_what_entered_the_softmax() -> None:
    logits, others = np.float32([[2.0, -1.0, -1.0]]), np.float32([[2.5, -1.5, -1.0]])
    signal, noise = energies_of_logarithms(softmax(logits), softmax(others))
    assert (signal, noise) == (pytest.approx(6.0), pytest.approx(0.5, rel=1e-4))


def test_what_a_candidate_does_to_unsure_rows_is_told_beside_what_it_does_to_the_others() -> None:
    logits = np.random.default_rng(3).normal(0, 4, (300, 5))
    one, other = softmax(logits), softmax(logits + 0.1)
    sure = np.argmax(np.abs(np.diff(np.sort(logits, -1)[:, -2:])).ravel())
    other[sure] = one[sure] * np.float32(0.5)
    [noise] = expected([(one, other)])
    # Whatever the errors of unsure rows might have been, that of a sure one is what it is.
    assert noise == pytest.approx(float(np.square(one[sure] / 2).sum()), rel=1e-3)
