"""What a few samples prove of a model."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.sqnr import estimate_sqnr, influence_by_sample, nsr_by_sample

# The benchmark prints the whole table of what is tried here on fewer draws.
BENCHMARK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "coverage_of_bounds.py"))
DRAWN = 800


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def noisy(logits: np.ndarray, noise: np.ndarray) -> list[tuple[tuple[np.ndarray], tuple[np.ndarray]]]:
    """Return pairs of outputs: a softmax of logits, and of logits with noise."""
    return [((softmax(one),), (softmax(one + error),)) for one, error in zip(logits, noise, strict=True)]


@pytest.mark.parametrize("count", [4, 16])
def test_errors_of_probabilities_are_pooled_over_samples_and_signs(count: int) -> None:
    """The trust in a few samples of a classifier holds for many."""
    generator = np.random.default_rng(count)
    logits = generator.normal(0, 3, (4000, 1, 10))
    everything = noisy(logits, generator.normal(0, 0.3, logits.shape))
    true = agreement_of(["p"], everything).worst_sqnr
    found = [estimate_sqnr(everything[start : start + count]) for start in range(0, 100 * count, count)]
    assert np.mean([one.sqnr <= true for one in found]) >= 0.92
    assert -10 * math.log10(np.mean([one.nsr for one in found])) == pytest.approx(true, abs=1.5)


def test_samples_of_one_file_are_trusted_as_one() -> None:
    generator = np.random.default_rng(0)
    files = [str(place // 4) for place in range(32)]
    noise = np.repeat(generator.lognormal(0, 1, 8), 4)[:, None] * generator.normal(0, 0.01, (32, 10))
    floats = [((one,), (one + error,)) for one, error in zip(generator.normal(0, 1, (32, 10)), noise, strict=True)]
    logits = generator.normal(0, 3, (32, 1, 10))
    labels = [((np.zeros(9, int),), (np.full(9, int(place < 4)),)) for place in range(32)]
    for pairs in (floats, noisy(logits, noise[:, None] * 30), labels):
        by_itself, together = estimate_sqnr(pairs), estimate_sqnr(pairs, files)
        assert (by_itself.sqnr, by_itself.nsr) == tuple(
            vars(estimate_sqnr(pairs, [""] * 32)).values()
        ) or pairs is labels
        assert together.sqnr != by_itself.sqnr
        assert together.sqnr < by_itself.sqnr or pairs is labels
    assert influence_by_sample(floats, files)[:4].tolist() == [influence_by_sample(floats, files)[0].tolist()] * 4


def test_samples_of_other_lengths_lend_their_errors() -> None:
    generator = np.random.default_rng(0)
    logits = [generator.normal(0, 1, (1, length, 4)) for length in (2, 7, 5)]
    pairs = [((softmax(one),), (softmax(one + 0.1 * generator.normal(0, 1, one.shape)),)) for one in logits]
    assert 10 < estimate_sqnr(pairs).sqnr < -10 * math.log10(estimate_sqnr(pairs).nsr)


def test_errors_that_made_answers_surer_by_luck_are_turned_round() -> None:
    logits = np.tile(np.float32([[2.0, 1.0, -3.0]]), (8, 1, 1))
    surer, turned = (noisy(logits, np.tile(np.float32([[sign, -sign, 0.0]]), (8, 1, 1))) for sign in (1.5, -1.5))
    assert agreement_of(["p"], surer).worst_sqnr == pytest.approx(6.77, abs=0.01)
    assert estimate_sqnr(surer).nsr == pytest.approx(estimate_sqnr(turned).nsr, rel=1e-3)
    both = (agreement_of(["p"], [*surer, *turned]).worst_sqnr,)
    assert -10 * math.log10(estimate_sqnr(surer).nsr) == pytest.approx(*both, abs=0.01)
    assert estimate_sqnr(surer).sqnr < both[0]


@pytest.mark.parametrize(
    "output",
    [
        np.float32([[0.5, 0.6]]),
        np.float32([0.5, 0.5]),
        np.float32([[1.0]]),
        np.float32([[-0.5, 1.5]]),
        np.zeros((0, 2)),
    ],
    ids=["not of sum one", "of rank one", "of one outcome", "negative", "empty"],
)
def test_errors_of_other_outputs_are_taken_as_they_are(output: np.ndarray) -> None:
    pairs = [((output,), (output * np.float32(1.01),))] * 4
    assert estimate_sqnr(pairs).nsr == pytest.approx(10 ** (-agreement_of(["y"], pairs).worst_sqnr / 10), rel=1e-3)


def test_the_worst_output_counts_and_unsound_ones_are_trusted_with_nothing() -> None:
    one = np.ones((1, 4), np.float32)
    pairs = [((one, one), (one + np.float32(1e-4), one + np.float32(1e-1)))] * 3
    assert estimate_sqnr(pairs) == estimate_sqnr([((one,), (one + np.float32(1e-1),))] * 3)
    assert estimate_sqnr([((one,), (one * np.float32("nan"),))]).sqnr == -math.inf
    assert estimate_sqnr([((one,), (one[:, :2],))]).sqnr == -math.inf


def test_equal_probabilities_stay_equal() -> None:
    one = softmax(np.random.default_rng(0).normal(0, 9, (3, 2, 50)).astype(np.float32))
    assert estimate_sqnr([((row,), (row,)) for row in one]).sqnr > 130


def test_labels_are_judged_all_together() -> None:
    pairs = [((np.int64([label]),), (np.int64([label if label % 4 else 0]),)) for label in range(40)]
    assert estimate_sqnr(pairs).sqnr == agreement_of(["label"], pairs).worst_sqnr < 10


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_trust_in_equal_noise_is_the_same_in_all_float_types(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    pairs = [((np.full((4, 9), 200, kind),), (np.full((4, 9), 202, kind),))] * 5
    assert estimate_sqnr(pairs).nsr == pytest.approx(1e-4)


def test_energies_do_not_overflow_and_infinities_of_the_reference_are_left_out() -> None:
    large = np.float32([[1e30, np.inf, -2e30]])
    pairs = [((large,), (large * np.float32(1.01),))] * 4
    assert estimate_sqnr(pairs).nsr == pytest.approx(1e-4, rel=1e-3)
    assert math.isfinite(estimate_sqnr(pairs).sqnr)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [1e-300, 1e150, 1e250, 1e307])
def test_the_unit_of_float64_outputs_does_not_matter(unit: float) -> None:
    output = unit * np.array([[1.0, -2.0, 0.5]])
    assert estimate_sqnr([((output,), (1.01 * output,))] * 4).nsr == pytest.approx(1e-4, rel=1e-3)
    assert estimate_sqnr([((output,), (output,))] * 4).sqnr > 100


def test_a_model_without_outputs_and_an_empty_optional_are_judged() -> None:
    assert estimate_sqnr([((), ())]).sqnr == math.inf
    assert estimate_sqnr([((None,), (None,))]).sqnr == math.inf
    assert estimate_sqnr([((np.ones(2, np.float32),), (None,))]).sqnr == -math.inf


@given(st.integers(0, 2**32 - 1))
def test_the_noises_of_samples_add_up_to_that_of_the_candidate(seed: int) -> None:
    generator = np.random.default_rng(seed)
    signal = generator.normal(0, 1, (6, 5, 4))
    noise = 0.3 * generator.normal(0, 1, signal.shape)
    pairs = [((one, one), (one + error, one)) for one, error in zip(signal, noise, strict=True)]
    found = nsr_by_sample(pairs)
    assert found.shape == (6, 2)
    assert found.sum(0) == pytest.approx([estimate_sqnr(pairs).nsr, 0.0])
    assert nsr_by_sample(pairs[::-1])[::-1] == pytest.approx(found)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 9))
def test_the_noise_of_probabilities_is_that_of_what_entered_the_softmax(seed: int, sure: float) -> None:
    generator = np.random.default_rng(seed)
    logits = sure * generator.normal(0, 1, (6, 5, 4))
    noise = 0.1 * sure * generator.normal(0, 1, logits.shape)
    centred, error = (array - array.mean(-1, keepdims=True) for array in (logits, noise))
    expected = np.square(error).sum((1, 2)) / np.square(centred).sum()
    assert nsr_by_sample(noisy(logits, noise))[:, 0] == pytest.approx(expected, rel=2e-2)


def test_what_is_trusted_depends_on_the_noisiest_sample_most_and_on_labels_alike() -> None:
    signal, labels = np.ones((2, 3)), np.array([0, 1, 2])
    pairs = [((signal, labels), (signal + noise, labels[::-1])) for noise in (0.01, 0.01, 0.2, 0.01, 0.01)]
    found = influence_by_sample(pairs)
    assert found.shape == (5, 2)
    assert found[:, 0].argmax() == 2
    assert found[:, 1].tolist() == [1.0] * 5
    assert influence_by_sample([((), ())] * 3).shape == (3, 0)


def test_labels_count_for_all_samples_alike_and_silence_is_no_signal() -> None:
    labels = [((np.array([0, 1, 2]),), (np.array([0, 1, wrong]),)) for wrong in (2, 0, 0, 0)]
    assert nsr_by_sample(labels)[:, 0] == pytest.approx(estimate_sqnr(labels).nsr / 4)
    silent = [((np.zeros(2),), (np.array([0.0, noise]),)) for noise in (0.0, 1.0)]
    assert nsr_by_sample(silent).tolist() == [[0.0], [np.inf]]
