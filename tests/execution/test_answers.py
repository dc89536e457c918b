from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from execution.clustered import MODEL, SAMPLES, TAPS, collected_here
from onnxq.evidence.evidence import Evidence
from onnxq.evidence.gram import Gram
from onnxq.evidence.histogram import Bins, Histogram
from onnxq.evidence.value_range import Range
from onnxq.execution.answers import fits
from onnxq.execution.runner import tap
from onnxq.execution.shards import Tapped


@pytest.fixture(scope="module")
def expected() -> Evidence:
    return collected_here()


@pytest.fixture(scope="module")
def tapped() -> Tapped:
    return replace(tap(MODEL, TAPS), model="model")


def test_evidence_fits_when_it_is_of_the_samples_the_requests_and_the_model(expected: Evidence, tapped: Tapped) -> None:
    assert fits(expected, tapped, len(SAMPLES))
    assert not fits(None, tapped, len(SAMPLES))
    assert not fits(expected, tapped, len(SAMPLES) - 1)
    assert not fits(expected.select(TAPS[:1]), tapped, len(SAMPLES))
    assert not fits(expected, replace(tapped, model="another"), len(SAMPLES))


@pytest.mark.parametrize(
    "spoilt",
    [
        {"samples": None},
        {"samples": (7,) * len(SAMPLES)},
        {"statistics": None},
        {"statistics": tuple(TAPS)},
        {"provenance": None},
    ],
)
def test_what_is_hardly_evidence_does_not_fit(expected: Evidence, tapped: Tapped, spoilt: dict[str, Any]) -> None:
    assert not fits(replace(expected, **spoilt), tapped, len(SAMPLES))


def test_equal_samples_fit(expected: Evidence, tapped: Tapped) -> None:
    assert fits(replace(expected, samples=("0" * 32,) * len(SAMPLES)), tapped, len(SAMPLES))


@pytest.mark.parametrize(
    ("kind", "garbage"),
    [
        ("range", None),
        ("range", Range),
        ("range", Gram()),
        ("range", Range()),
        ("range", Range(3, math.nan, math.nan, 3, math.nan, math.nan)),
        ("range", Range(3, -math.inf, math.inf, 3, -math.inf, math.inf)),
        ("range", Range(-3, -1.0, 1.0, -3, -1.0, 1.0)),
        ("histogram", Histogram()),
        ("histogram", Histogram(Bins(0.0, 1.0, np.int64([-1])))),
        ("histogram", Histogram(Bins(0.0, 0.0, np.float64([1])))),
    ],
)
def test_a_statistic_that_cannot_be_does_not_fit(expected: Evidence, tapped: Tapped, kind: str, garbage: Any) -> None:
    request = next(one for one in TAPS if one.kind == kind)
    statistics = MappingProxyType({**expected.statistics, request: garbage})
    assert not fits(replace(expected, statistics=statistics), tapped, len(SAMPLES))


def test_a_tensor_that_no_sample_has_shown_fits(expected: Evidence, tapped: Tapped) -> None:
    nothing = {"range": Range(), "histogram": Histogram()}
    unseen = {one: nothing[one.kind] for one in TAPS if one.tensor == "logits"}
    statistics = MappingProxyType({**expected.statistics, **unseen})
    assert fits(replace(expected, statistics=statistics), tapped, len(SAMPLES))
