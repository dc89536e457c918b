from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from calibration.clustered import MODEL, SAMPLES, TAPS, collected_here, ledger
from onnxq.calibration import dask_cluster
from onnxq.calibration.collect import collect, instrument
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import Work, observe_samples
from onnxq.errors import DataError

distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    """Return a client of a cluster of threads in this process, which can be tampered with."""
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected() -> CalibrationStatistics:
    return collected_here()


def same(found: CalibrationStatistics, expected: CalibrationStatistics) -> bool:
    return (found, found.provenance) == (expected, expected.provenance)


def test_evidence_travels_once_a_lease_however_many_shards_it_has(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards: list[int] = []

    def slow(*given: Any, **more: Any) -> CalibrationStatistics:
        shards.append(0)
        time.sleep(0.1)
        return observe_samples(*given, **more)

    monkeypatch.setattr(dask_cluster, "observe_samples", slow)
    start = time.monotonic()
    fetched = [
        len(one.samples) for one in Cluster(running, lease=0.4).run(instrument(MODEL, TAPS), Work(SAMPLES, range(64)))
    ]
    assert sum(fetched) == 64
    assert len(fetched) <= (time.monotonic() - start) / 0.4 + 1
    assert len(shards) > 2 * len(fetched)


def test_an_error_that_is_none_of_ours_is_tried_again(
    running: Any, expected: CalibrationStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = count()

    def once(*given: Any, **more: Any) -> CalibrationStatistics:
        if next(shards) == 1:
            raise RuntimeError("out of luck")
        return observe_samples(*given, **more)

    monkeypatch.setattr(dask_cluster, "observe_samples", once)
    found = collect(MODEL, SAMPLES, TAPS, workers=Cluster(running, lease=0.2), ledger=ledger())
    assert next(shards) > 2
    assert same(found, expected)


def test_an_error_again_and_again_ends_in_a_sentence(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any, **more: Any) -> CalibrationStatistics:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(dask_cluster, "observe_samples", never)
    with pytest.raises(DataError, match=r"failed 3 times on .* \(RuntimeError: out of luck\), expected statistics"):
        collect(MODEL, SAMPLES[:8], TAPS, workers=Cluster(running))


def test_all_workers_may_leave_for_a_lease(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "nthreads", dict)
    with pytest.raises(DataError, match=r"have left and none has come for 0 seconds, expected some"):
        collect(MODEL, SAMPLES[:8], TAPS, workers=Cluster(running, lease=0.1))


def test_workers_of_different_versions_end_in_a_sentence(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = count()

    def another(*given: Any, **more: Any) -> CalibrationStatistics:
        found = observe_samples(*given, **more)
        return replace(found, provenance=replace(found.provenance, runtime=f"onnxruntime {next(versions)}"))

    monkeypatch.setattr(dask_cluster, "observe_samples", another)
    with pytest.raises(DataError, match=r"Statistics of onnxruntime \d and of onnxruntime \d cannot be merged"):
        collect(MODEL, SAMPLES, TAPS, workers=Cluster(running, lease=0), ledger=ledger())
