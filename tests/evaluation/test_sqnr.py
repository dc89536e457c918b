"""The error accumulator, the SQNR that is estimated from it, and the places of the largest errors."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.data.dataset import Subset
from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.bounds import RISK, lower_bound, of_files
from onnxq.evaluation.outputs import OutputPart
from onnxq.evaluation.sqnr import (
    DetailedErrorAccumulator,
    Place,
    WorstPlace,
    estimate_sqnr,
    furthest,
    nsr_by_sample,
    traced,
    worst_places,
)
from onnxq.numerics.affine import sqnr_db


def tally_of(*pairs: tuple[object, object]) -> DetailedErrorAccumulator:
    tally = DetailedErrorAccumulator()
    for pair in pairs:
        tally.add_sample(*pair)
    return tally


def test_energies_are_kept_by_sample_and_summed_over_all() -> None:
    tally = tally_of((np.array([3.0, 4.0]), np.array([3.0, 4.5])), (np.array([1.0, 0.0]), np.array([1.0, 0.0])))
    assert tally.energies == [(25.0, 0.25), (1.0, 0.0)]
    assert tally.sqnr == pytest.approx(10 * math.log10(26.0 / 0.25))
    assert tally.largest == 0.5
    assert tally.bound(RISK) == lower_bound(tally.energies)


def test_samples_of_one_file_count_as_one() -> None:
    generator = np.random.default_rng(0)
    pairs = [(one := generator.normal(0, 1, 4), one + generator.normal(0, 0.1, 4)) for _ in range(6)]
    tally, files = tally_of(*pairs), ["a", "a", "b", "b", "c", "c"]
    assert tally.bound(RISK, files) == lower_bound(of_files(tally.energies, files))
    labels = tally_of(*((np.array([0, 0]), np.array([one, one])) for one in (1, 1, 0, 0, 0, 0)))
    assert (labels.effective_labels(), labels.effective_labels(files)) == (pytest.approx(2.5), 1.0)
    assert tally_of((np.array([0, 0]), np.array([1, 1]))).effective_labels() is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_search_and_verdict_have_one_measure(dtype: type) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (16, 5, 10))
    powers, others = np.exp(logits), np.exp(logits + generator.normal(0, 0.2, logits.shape))
    probabilities = [(one / one.sum(-1, keepdims=True)).astype(dtype) for one in (powers, others)]
    plain = [one.astype(dtype) for one in (logits, logits + 0.1)]
    for expected, found in (probabilities, plain):
        tally = tally_of(*zip(expected, found, strict=True))
        assert tally.bound() == estimate_sqnr([((one,), (other,)) for one, other in zip(expected, found, strict=True)])


def test_what_the_reference_gives_no_numbers_for_is_left_out_and_counted() -> None:
    one = np.float32([[1.0, np.nan, np.inf, 2.0]])
    tally = tally_of((one, np.float32([[1.1, 5.0, np.nan, 2.0]])), (one * np.nan, one), (one, one))
    assert (tally.finite, tally.elements, tally.skipped) == (True, 4, 8)
    assert tally.sqnr == pytest.approx(10 * math.log10(10 / 0.01), abs=1e-3)
    assert tally.bound() < tally.sqnr
    broken = tally_of((one, np.float32([[np.nan, 5.0, 0.0, 2.0]])))
    assert (broken.finite, broken.bound()) == (False, -math.inf)


def test_samples_without_elements_tell_nothing() -> None:
    pairs = [(one := np.eye(3, dtype=np.float32)[[place % 3]], 0.9 * one + 0.1 / 3) for place in range(8)]
    empty = (np.zeros((0, 3), np.float32),) * 2
    assert tally_of(*pairs, empty).bound() == pytest.approx(tally_of(*pairs).bound(), abs=0.5)
    assert tally_of(empty, empty).elements == 0


@pytest.mark.parametrize("unit", [1e-30, 1e-15, 1.0, 1e30])
def test_faint_errors_are_not_taken_for_none(unit: float) -> None:
    one = np.full(4, unit, np.float32)
    assert tally_of((one, one * np.float32(1 + 2**-14))).sqnr == pytest.approx(20 * math.log10(2**14), abs=0.1)


@pytest.mark.parametrize("sizes", [(1.0, 1e200), (1e-200, 1.0), (1e-200, 1.0, 1e200), (1e200, 1.0), (1e160, 1e302)])
def test_samples_of_any_size_are_counted_beside_one_another(sizes: tuple[float, ...]) -> None:
    part = OutputPart(0, 0, 2, "a")
    tally = DetailedErrorAccumulator([part])
    for size in sizes:
        one = np.array([3.0, 4.0]) * size
        tally.add_sample(one, one * 1.01)
    assert tally.sqnr == pytest.approx(40.0)
    assert math.isfinite(tally.bound())
    assert -10 * math.log10(tally.nsr) == pytest.approx(40.0)
    assert sqnr_db(*tally.parts[part]) == pytest.approx(40.0)


# What a few samples prove of a model.


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


def noisy(logits: np.ndarray, noise: np.ndarray) -> list[tuple[tuple[np.ndarray], tuple[np.ndarray]]]:
    """Return pairs of outputs: a softmax of logits, and of logits with noise."""
    return [((softmax(one),), (softmax(one + error),)) for one, error in zip(logits, noise, strict=True)]


def nsr(pairs: list[tuple[tuple[Any], tuple[Any]]]) -> float:
    """Return the expected noise-to-signal ratio of the only output."""
    return tally_of(*((one, other) for (one,), (other,) in pairs)).nsr


@pytest.mark.parametrize("count", [4, 16])
def test_errors_of_probabilities_are_pooled_over_samples_and_signs(count: int) -> None:
    """The trust in a few samples of a classifier holds for many."""
    generator = np.random.default_rng(count)
    logits = generator.normal(0, 3, (2000, 1, 10))
    everything = noisy(logits, generator.normal(0, 0.3, logits.shape))
    true = agreement_of(["p"], everything).worst_sqnr
    found = [estimate_sqnr(everything[start : start + count]) for start in range(0, 60 * count, count)]
    assert np.mean(np.array(found) <= true) >= 0.92
    ratios = [nsr(everything[start : start + count]) for start in range(0, 60 * count, count)]
    assert -10 * math.log10(np.mean(ratios)) == pytest.approx(true, abs=1.5)


def test_samples_of_one_file_are_trusted_as_one() -> None:
    generator = np.random.default_rng(0)
    files = [str(place // 4) for place in range(32)]
    noise = np.repeat(generator.lognormal(0, 1, 8), 4)[:, None] * generator.normal(0, 0.01, (32, 10))
    floats = [((one,), (one + error,)) for one, error in zip(generator.normal(0, 1, (32, 10)), noise, strict=True)]
    logits = generator.normal(0, 3, (32, 1, 10))
    labels = [((np.zeros(9, int),), (np.full(9, int(place < 4)),)) for place in range(32)]
    for pairs in (floats, noisy(logits, noise[:, None] * 30), labels):
        by_itself, together = estimate_sqnr(pairs), estimate_sqnr(pairs, files)
        assert by_itself == estimate_sqnr(pairs, [""] * 32) or pairs is labels
        assert together != by_itself
        assert together < by_itself or pairs is labels


def test_errors_that_made_answers_surer_by_luck_are_turned_round() -> None:
    logits = np.tile(np.float32([[2.0, 1.0, -3.0]]), (8, 1, 1))
    surer, turned = (noisy(logits, np.tile(np.float32([[sign, -sign, 0.0]]), (8, 1, 1))) for sign in (1.5, -1.5))
    assert agreement_of(["p"], surer).worst_sqnr == pytest.approx(6.77, abs=0.01)
    assert nsr(surer) == pytest.approx(nsr(turned), rel=1e-3)
    both = (agreement_of(["p"], [*surer, *turned]).worst_sqnr,)
    assert -10 * math.log10(nsr(surer)) == pytest.approx(*both, abs=0.01)
    assert estimate_sqnr(surer) < both[0]


@pytest.mark.parametrize(
    "output",
    [
        np.float32([[0.5, 1.6]]),
        np.float32([1.5, 0.5]),
        np.float32([[-0.5, 1.5]]),
        np.float32([[0.7, 0.3, 0.0]]),
        np.zeros((0, 2)),
    ],
    ids=["above one", "of rank one", "negative", "with zeros", "empty"],
)
def test_errors_of_other_outputs_are_taken_as_they_are(output: np.ndarray) -> None:
    pairs = [((output,), (output * np.float32(1.01),))] * 4
    assert nsr(pairs) == pytest.approx(10 ** (-agreement_of(["y"], pairs).worst_sqnr / 10), rel=1e-3)


ONE = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(
    ("expected", "found", "sqnr"),
    [
        # The worst output counts, and an unsound one is trusted with nothing.
        ((ONE, ONE), (ONE + np.float32(1e-4), ONE + np.float32(1e-1)), 19.98),
        ((ONE,), (ONE * np.float32("nan"),), -math.inf),
        ((ONE,), (ONE[:, :2],), -math.inf),
        ((ONE,), (None,), -math.inf),
        ((None,), (None,), math.inf),
        ((), (), math.inf),
    ],
)
def test_estimates_of_single_outputs(expected: tuple[Any, ...], found: tuple[Any, ...], sqnr: float) -> None:
    assert estimate_sqnr([(expected, found)] * 9) == pytest.approx(sqnr, abs=0.01)


def test_labels_are_judged_all_together() -> None:
    pairs = [((np.int64([label]),), (np.int64([label if label % 4 else 0]),)) for label in range(40)]
    assert estimate_sqnr(pairs) == agreement_of(["label"], pairs).worst_sqnr < 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "output",
    [
        *(np.full((4, 9), 200, dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)),
        *(unit * np.array([[1.0, -2.0, 0.5]]) for unit in (1e-300, 1e150, 1e250, 1e307)),
        np.float32([[1e30, np.inf, -2e30]]),
    ],
)
def test_the_type_and_the_unit_of_outputs_do_not_matter(output: np.ndarray) -> None:
    found = (output.astype(np.float64) * 1.01).astype(output.dtype)
    pairs = [((output,), (found,))] * 5
    assert nsr(pairs) == pytest.approx(1e-4, rel=1e-3)
    assert math.isfinite(estimate_sqnr(pairs))
    assert estimate_sqnr([((output,), (output,))] * 4) > 100


@given(st.integers(0, 2**32 - 1))
def test_the_noises_of_samples_add_up_to_that_of_the_candidate(seed: int) -> None:
    generator = np.random.default_rng(seed)
    signal = generator.normal(0, 1, (6, 5, 4))
    noise = 0.3 * generator.normal(0, 1, signal.shape)
    pairs = [((one, one), (one + error, one)) for one, error in zip(signal, noise, strict=True)]
    found = nsr_by_sample(pairs)
    assert found.shape == (6, 2)
    assert found.sum(0) == pytest.approx([tally_of(*zip(signal, signal + noise, strict=True)).nsr, 0.0])
    assert nsr_by_sample(pairs[::-1])[::-1] == pytest.approx(found)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 9))
def test_the_noise_of_probabilities_is_that_of_what_entered_the_softmax(seed: int, sure: float) -> None:
    generator = np.random.default_rng(seed)
    logits = sure * generator.normal(0, 1, (6, 5, 4))
    noise = 0.1 * sure * generator.normal(0, 1, logits.shape)
    centred, error = (array - array.mean(-1, keepdims=True) for array in (logits, noise))
    expected = np.square(error).sum((1, 2)) / np.square(centred).sum()
    assert nsr_by_sample(noisy(logits, noise))[:, 0] == pytest.approx(expected, rel=2e-2)


def test_labels_count_for_all_samples_alike_and_silence_is_no_signal() -> None:
    labels = [((np.array([0, 1, 2]),), (np.array([0, 1, wrong]),)) for wrong in (2, 0, 0, 0)]
    assert nsr_by_sample(labels)[:, 0] == pytest.approx(nsr(labels) / 4)
    silent = [((np.zeros(2),), (np.array([0.0, noise]),)) for noise in (0.0, 1.0)]
    assert nsr_by_sample(silent).tolist() == [[0.0], [np.inf]]


# Where an output is furthest from the float model's.


@pytest.mark.parametrize(
    ("expected", "found", "place"),
    [
        ([[1, 2], [3, 4]], [[1, 2.5], [3, 3]], Place((1, 1), 4.0, 3.0)),
        ([1, 2], [1, 2], None),
        ([], [], None),
        # What the float model does not know either is no error.
        ([math.inf, math.nan, 1], [0, 0, 2], Place((2,), 1.0, 2.0)),
        ([math.inf], [math.inf], None),
        (7, 5, Place((), 7.0, 5.0)),
    ],
)
def test_the_largest_error_has_a_place(expected: list, found: list, place: Place | None) -> None:
    assert furthest(np.array(expected, np.float64), np.array(found, np.float64)) == place


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_furthest(value: float) -> None:
    place = furthest(np.array([1.0, 2.0, 3.0]), np.array([9e9, value, 3.0]))
    assert place is not None
    assert (place.index, place.reference, place.error) == ((1,), 2.0, math.inf)


def test_the_worst_samples_come_first_and_exact_ones_not_at_all() -> None:
    near, far = Place((0,), 1.0, 1.1), Place((1,), 1.0, 3.0)
    found = worst_places(
        [(1.0, 0.01), (1.0, 0.0), (1.0, 4.0), (1.0, 0.1), (1.0, 0.2)], [[near], [], [near, far], [near], [near]]
    )
    assert [one.sample for one in found] == [2, 4, 3]
    assert found[0].place == far
    assert found[1].sqnr == pytest.approx(6.99, abs=0.01)


def test_places_are_those_of_elements_and_of_the_samples_given() -> None:
    pairs = [([[np.ones(2), np.ones(2)]], [[np.ones(2), np.array([1.0, 0.5])]])]
    (one,) = agreement_of(["y"], pairs).outputs[0].worst
    assert (one.sample, one.place) == (0, Place((1, 1), 1.0, 0.5))
    assert agreement_of(["y"], [([np.array([1, 2])], [np.array([1, 3])])]).outputs[0].worst == ()
    samples = Subset(Subset([{} for _ in range(40)], [1, 5, 7, 35]), [0, 3])
    (one,) = traced([WorstPlace(1, 20.0, Place((0,), 1.0, 3.0))], samples)
    assert (one.sample, one.sqnr, one.place, one.file) == (35, 20.0, Place((0,), 1.0, 3.0), "")


@pytest.mark.parametrize(
    ("shape", "compared"),
    [((), 0), ((3,), 0), ((2, 3), 2), ((2, 1), 0), ((0, 3), 0), ((2, 2, 3), 0), ((1, 1, 2, 3), 0)],
)
def test_classes_lie_along_the_last_axis_of_scores_of_rank_2(shape: tuple[int, ...], compared: int) -> None:
    scores = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    tally = DetailedErrorAccumulator()
    tally.add_sample(scores, scores)
    assert (tally.equal, tally.compared) == (compared, compared)
