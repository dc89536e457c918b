"""What is summed of one output, sample by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxq.evaluation.bounds import RISK, lower_bound, of_files
from onnxq.evaluation.outputs import OutputPart
from onnxq.evaluation.sqnr import DetailedErrorAccumulator, estimate_sqnr
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
    assert (labels.effective_labels(()), labels.effective_labels(files)) == (None, 1.0)


def test_what_is_no_float_is_counted() -> None:
    tally = tally_of((np.array([1, 2, 3]), np.array([1, 2, 4])), (np.array(["a"], object), np.array(["b"], object)))
    assert (tally.is_float, tally.equal, tally.compared) == (False, 2, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_search_and_verdict_have_one_measure(dtype: type) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (16, 5, 10))
    powers, others = np.exp(logits), np.exp(logits + generator.normal(0, 0.2, logits.shape))
    probabilities = [(one / one.sum(-1, keepdims=True)).astype(dtype) for one in (powers, others)]
    plain = [one.astype(dtype) for one in (logits, logits + 0.1)]
    for expected, found in (probabilities, plain):
        tally = tally_of(*zip(expected, found, strict=True))
        assert (
            tally.bound()
            == estimate_sqnr([((one,), (other,)) for one, other in zip(expected, found, strict=True)]).sqnr
        )


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


@pytest.mark.parametrize(
    ("expected", "found", "share"),
    [
        (np.array(["a", "b"], object), np.array(["a", "c"], object), 0.5),
        (np.array([True, False]), np.array([True, True]), 0.5),
        ([np.array([1, 2])], [np.array([1, 2])], 1.0),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, 0.5),
        (None, None, 1.0),
    ],
    ids=["strings", "bools", "a sequence", "a map", "an empty optional"],
)
def test_values_that_are_no_floats_are_counted(expected: object, found: object, share: float) -> None:
    tally = tally_of((expected, found))
    assert (tally.is_float, tally.same_shapes, tally.equal / tally.compared) == (False, True, share)
    assert tally.elements == tally.compared


@pytest.mark.parametrize("sizes", [(1.0, 1e200), (1e-200, 1.0), (1e-200, 1.0, 1e200), (1e200, 1.0), (1e160, 1e302)])
def test_samples_of_any_size_are_counted_beside_one_another(sizes: tuple[float, ...]) -> None:
    part = OutputPart(0, 0, 2, "a")
    tally = DetailedErrorAccumulator([part])
    for size in sizes:
        one = np.array([3.0, 4.0]) * size
        tally.add_sample(one, one * 1.01)
    assert tally.sqnr == pytest.approx(40.0)
    assert math.isfinite(tally.bound())
    assert -10 * math.log10(tally.expected_nsr) == pytest.approx(40.0)
    assert sqnr_db(*tally.parts[part]) == pytest.approx(40.0)
