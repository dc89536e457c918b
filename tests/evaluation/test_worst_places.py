"""Where an output is furthest from the float model's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxq.data.dataset import Subset
from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.sqnr import Place, WorstPlace, furthest, traced, worst_places


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


def test_elements_of_sequences_are_told_by_their_place() -> None:
    pairs = [([[np.ones(2), np.ones(2)]], [[np.ones(2), np.array([1.0, 0.5])]])]
    (one,) = agreement_of(["y"], pairs).outputs[0].worst
    assert (one.sample, one.place) == (0, Place((1, 1), 1.0, 0.5))


def test_labels_have_no_places() -> None:
    assert agreement_of(["y"], [([np.array([1, 2])], [np.array([1, 3])])]).outputs[0].worst == ()


def test_the_number_of_a_sample_is_that_among_those_given() -> None:
    samples = Subset([{} for _ in range(40)], [1, 5, 7, 35])
    (one,) = traced([WorstPlace(1, 20.0, Place((0,), 1.0, 3.0))], samples, [0, 3])
    assert (one.sample, one.sqnr, one.place, one.file) == (35, 20.0, Place((0,), 1.0, 3.0), "")
