from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from observations import statistic

from calibration.clustered import MODEL, SAMPLES, TAPS, collected_here, ledger
from onnxq.calibration.accumulators import ChannelMeans, ChannelRanges, Range, Request, SampleExtremes
from onnxq.calibration.collect import collect, tap
from onnxq.calibration.dask_cluster import fits
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.histogram import Bins, Histogram
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import InstrumentedModel


@pytest.fixture(scope="module")
def expected() -> CalibrationStatistics:
    return collected_here()


@pytest.fixture(scope="module")
def tapped() -> InstrumentedModel:
    return replace(tap(MODEL, TAPS), model="model")


def test_evidence_fits_when_it_is_of_the_samples_the_requests_and_the_model(
    expected: CalibrationStatistics, tapped: InstrumentedModel
) -> None:
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
def test_what_is_hardly_evidence_does_not_fit(
    expected: CalibrationStatistics, tapped: InstrumentedModel, spoilt: dict[str, Any]
) -> None:
    assert not fits(replace(expected, **spoilt), tapped, len(SAMPLES))


def test_equal_samples_fit(expected: CalibrationStatistics, tapped: InstrumentedModel) -> None:
    assert fits(replace(expected, samples=("0" * 32,) * len(SAMPLES)), tapped, len(SAMPLES))


@pytest.mark.parametrize(
    ("kind", "garbage"),
    [
        ("range", None),
        ("range", Range),
        ("range", HessianAccumulator()),
        ("range", Range()),
        ("range", Range(3, math.nan, math.nan, 3, math.nan, math.nan)),
        ("range", Range(3, -math.inf, math.inf, 3, -math.inf, math.inf)),
        ("range", Range(-3, -1.0, 1.0, -3, -1.0, 1.0)),
        ("histogram", Histogram()),
        ("histogram", Histogram(Bins(0.0, 1.0, np.int64([-1])))),
        ("histogram", Histogram(Bins(0.0, 0.0, np.float64([1])))),
    ],
)
def test_a_statistic_that_cannot_be_does_not_fit(
    expected: CalibrationStatistics, tapped: InstrumentedModel, kind: str, garbage: Any
) -> None:
    request = next(one for one in TAPS if one.kind == kind)
    statistics = MappingProxyType({**expected.statistics, request: garbage})
    assert not fits(replace(expected, statistics=statistics), tapped, len(SAMPLES))


@pytest.fixture(scope="module")
def thorough() -> tuple[CalibrationStatistics, InstrumentedModel]:
    """Return evidence of all kinds, and what it is of."""
    kinds = ("range", "channel-means", "channel-ranges", "sample-extremes", "hessian")
    axes = {"channel-means": 1, "channel-ranges": 1, "hessian": 1}
    requests = [default_request("image", kind, axes.get(kind)) for kind in kinds]
    patches = Request.of("image", "hessian", 1, rows=9, kernel="3,3", pads="1,1,1,1")
    found = collect(MODEL, SAMPLES, [*requests, patches], ledger=ledger())
    return found, replace(tap(MODEL, [*requests, patches]), model="model")


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("channel-means", lambda one: ChannelMeans(one.count, one.sums.repeat(2, 0))),
        ("channel-means", lambda one: ChannelMeans(one.count - 1, one.sums)),
        ("channel-means", lambda one: ChannelMeans(2 * one.count, one.sums)),
        ("channel-ranges", lambda one: ChannelRanges(one.ends.repeat(2, 0))),
        ("channel-ranges", lambda one: ChannelRanges(2 * one.ends)),
        ("channel-ranges", lambda one: ChannelRanges(one.ends / 2)),
        ("sample-extremes", lambda one: SampleExtremes(one.samples, 2 * one.ends)),
        ("sample-extremes", lambda one: SampleExtremes(one.samples + np.uint64(1), one.ends)),
        ("hessian", lambda one: HessianAccumulator(one.count, one.multiplied().sums, -one.multiplied().products)),
        ("hessian", lambda one: statistic(np.ones((one.count, 2), np.float32), "hessian", 1, rows=0)),
    ],
)
def test_statistics_that_contradict_each_other_do_not_fit(
    kind: str, change: Change, thorough: tuple[CalibrationStatistics, InstrumentedModel]
) -> None:
    found, tapped = thorough
    assert fits(found, tapped, len(SAMPLES))
    request = next(one for one in found.statistics if one.kind == kind)
    statistics = MappingProxyType({**found.statistics, request: change(found.statistics[request])})
    assert not fits(replace(found, statistics=statistics), tapped, len(SAMPLES))


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32])
def test_malformed_digests_do_not_fit(digest: str, expected: CalibrationStatistics, tapped: InstrumentedModel) -> None:
    assert not fits(replace(expected, samples=(digest, *expected.samples[1:])), tapped, len(SAMPLES))


def test_a_tensor_that_no_sample_has_shown_fits(expected: CalibrationStatistics, tapped: InstrumentedModel) -> None:
    nothing = {"range": Range(), "histogram": Histogram()}
    unseen = {one: nothing[one.kind] for one in TAPS if one.tensor == "logits"}
    statistics = MappingProxyType({**expected.statistics, **unseen})
    assert fits(replace(expected, statistics=statistics), tapped, len(SAMPLES))
