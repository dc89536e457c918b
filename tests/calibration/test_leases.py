from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import pytest

from calibration.clustered import MODEL, SAMPLES, TAPS, collected_here, ledger
from onnxq.calibration import dask_cluster as leases
from onnxq.calibration.accumulators import Range
from onnxq.calibration.collect import collect, tap
from onnxq.calibration.dask_cluster import Cluster, fits
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import InstrumentedModel, Shard, Work, observe_shard
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
    observe = leases.observe_shard

    def slow(*given: Any, **more: Any) -> CalibrationStatistics:
        shards.append(0)
        time.sleep(0.1)
        return observe(*given, **more)

    monkeypatch.setattr(leases, "observe_shard", slow)
    start = time.monotonic()
    fetched = [len(one.samples) for one in Cluster(running, lease=0.4).run(tap(MODEL, TAPS), Work(SAMPLES, range(64)))]
    assert sum(fetched) == 64
    assert len(fetched) <= (time.monotonic() - start) / 0.4 + 1
    assert len(shards) > 2 * len(fetched)


def test_garbage_of_a_worker_is_run_again(
    running: Any, expected: CalibrationStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []

    def once(found: object, *rest: Any) -> bool:
        looked.append(found)
        return len(looked) > 1 and fits(found, *rest)

    monkeypatch.setattr(leases, "fits", once)
    found = collect(MODEL, SAMPLES, TAPS, workers=Cluster(running), ledger=ledger())
    assert len(looked) > 1
    assert same(found, expected)


@pytest.mark.parametrize(
    "garbage", [None, Range(), Range(1, -math.inf, math.inf, 1, -math.inf, math.inf), HessianAccumulator()]
)
def test_garbage_of_one_shard_spoils_nothing(
    running: Any, expected: CalibrationStatistics, monkeypatch: pytest.MonkeyPatch, garbage: Any
) -> None:
    shards = count()

    def spoilt(*given: Any, **more: Any) -> CalibrationStatistics:
        found = observe_shard(*given, **more)
        if next(shards) != 1:
            return found
        statistics = {one: garbage if one.kind == "range" else kept for one, kept in found.statistics.items()}
        return replace(found, statistics=MappingProxyType(statistics))

    monkeypatch.setattr(leases, "observe_shard", spoilt)
    found = collect(MODEL, SAMPLES, TAPS, workers=Cluster(running, lease=0.2), ledger=ledger())
    assert next(shards) > 2
    assert same(found, expected)


def test_garbage_again_and_again_ends_in_a_sentence(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the workers themselves look at is as it should be.
    elsewhere = partial(lambda main, *_: threading.current_thread() is not main, threading.current_thread())
    monkeypatch.setattr(leases, "fits", elsewhere)
    with pytest.raises(DataError, match=r"failed 3 times on .* \(nothing came back, or no statistics\)"):
        collect(MODEL, SAMPLES[:8], TAPS, workers=Cluster(running))


def test_workers_of_different_versions_end_in_a_sentence(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = count()

    def another(tapped: InstrumentedModel, shard: Shard, **more: Any) -> CalibrationStatistics:
        found = observe_shard(tapped, shard, **more)
        return replace(found, provenance=replace(found.provenance, runtime=f"onnxruntime {next(versions)}"))

    monkeypatch.setattr(leases, "observe_shard", another)
    with pytest.raises(DataError, match=r"Statistics of onnxruntime \d and of onnxruntime \d cannot be merged"):
        collect(MODEL, SAMPLES, TAPS, workers=Cluster(running, lease=0), ledger=ledger())
