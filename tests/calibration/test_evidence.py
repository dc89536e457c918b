from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
from observations import evidence

from onnxq.calibration.accumulators import ChannelMeans, Range, Request
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.statistics import CalibrationStatistics, StatisticsSum, observe
from onnxq.errors import DataError


def sample(digest: str, **tensors: list[float]) -> CalibrationStatistics:
    return evidence({name: np.float64(values) for name, values in tensors.items()}, sample=digest)


def test_evidence_merges_by_request_and_keeps_its_samples_in_order() -> None:
    a, b = sample("b", a=[1.0], b=[2.0]), sample("a", b=[4.0], c=[5.0])
    merged = a.merge(b)
    assert merged == b.merge(a)
    assert merged.samples == ("a", "b")
    assert (merged.of("b").need(Range).minimum, merged.of("b").need(Range).maximum) == (2, 4)
    assert merged.of("c") == b.of("c")


def test_evidence_shows_as_a_line() -> None:
    assert repr(CalibrationStatistics()) == "CalibrationStatistics(0 samples, 0 tensors: nothing)"
    assert repr(sample("a", x=[1.0], y=[2.0])).startswith("CalibrationStatistics(1 samples, 2 tensors: range")
    assert len(repr(sample("a", x=[1.0]))) < 120


def test_the_same_sample_is_not_merged_twice_but_may_be_run_twice() -> None:
    one = sample("a", x=[1.0])
    with pytest.raises(DataError, match="Both hold the same 1 samples, such as 'a', expected each sample once"):
        one.merge(one)
    twice = one.plus(one)
    assert (twice.samples, twice.of("x").need(Range).count) == (("a", "a"), 2)
    assert (twice.lacks(["a", "a", "b"]), one.lacks(["a", "a", "b"])) == (1, 2)


def test_a_total_is_the_sum_and_never_holds_more_than_it_and_what_is_added() -> None:
    requests = [Request.of(f"t{number}", "channel-means", 0) for number in range(8)]

    def seen(digest: str) -> CalibrationStatistics:
        sums = {request: ChannelMeans(1 << 14, np.ones((1 << 14, 2), np.int64)) for request in requests}
        return CalibrationStatistics((digest,), sums)

    tracemalloc.start()
    total, bytes_of_one = StatisticsSum(seen("a")), tracemalloc.get_traced_memory()[0]
    for digest in "bcd":
        tracemalloc.reset_peak()
        total.add(seen(digest))
        assert tracemalloc.get_traced_memory()[1] < 2.7 * bytes_of_one
    tracemalloc.stop()
    assert total.evidence == seen("d").plus(seen("c")).plus(seen("b")).plus(seen("a"))


def test_joining_keeps_the_statistics_of_both() -> None:
    joined = sample("5", a=[1.0]).join(sample("5", b=[2.0]))
    assert joined == sample("5", a=[1.0], b=[2.0])
    assert joined.select(one for one in joined.statistics if one.tensor == "b") == sample("5", b=[2.0])


def test_what_is_known_of_a_tensor_is_found_by_its_kind_and_axis() -> None:
    found = observe({"x": np.float32([[1, 2]])}, [Request("x", "range"), Request("x", "channel-means", 1)]).of("x")
    assert found.need(Range).maximum == 2
    assert found.find(ChannelMeans, 0) is None
    assert found.need(ChannelMeans, 1).means.tolist() == [1, 2]
    with pytest.raises(DataError, match="statistics of tensor 'x' hold no histogram, expected one; calibrate again"):
        found.need(Histogram)
    with pytest.raises(DataError, match="statistics of tensor 'y' hold no range"):
        CalibrationStatistics().of("y").need(Range)


def test_the_bytes_of_evidence_are_those_of_its_arrays() -> None:
    one = observe({"x": np.float32(range(100))}, [Request("x", "histogram")], sample="a")
    assert 200 <= sys.getsizeof(one) < 100_000
    assert sys.getsizeof(one) > sys.getsizeof(CalibrationStatistics())
