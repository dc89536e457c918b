"""Clusters of processes on this machine give the same statistics, whatever happens to their workers."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import model

from calibration.clustered import MODEL, SAMPLES, TAPS, files
from onnxq.calibration import dask_cluster
from onnxq.calibration.collect import collect
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, ModelError, SchemeError
from onnxq.ir import read_model, save

distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")


def started(workers: int, **options: Any) -> Any:
    return distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, **options)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started(2, processes=True, host="127.0.0.1") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    with distributed.Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> CalibrationStatistics:
    return collect(MODEL, SAMPLES, TAPS)


def same(found: CalibrationStatistics, expected: CalibrationStatistics) -> bool:
    return (found, found.provenance) == (expected, expected.provenance)


def test_a_cluster_gives_the_same_bits(client: Any, expected: CalibrationStatistics, tmp_path: Path) -> None:
    assert same(collect(MODEL, SAMPLES, TAPS, cluster=client), expected)
    assert same(collect(MODEL, files(tmp_path), TAPS, cluster=client.scheduler.address), expected)
    # The sessions of the workers end with the run.
    while any(client.run(_sessions).values()):
        time.sleep(0.1)
    bad = [SAMPLES[0], {"image": np.zeros((1, 2, 2, 2), np.float32)}]
    with pytest.raises(DataError, match=r"sample 1 cannot be run by onnxruntime"):
        collect(MODEL, bad, TAPS, cluster=client)


def _sessions() -> int:
    gc.collect()
    return len(dask_cluster._OPENED)


BRANCHES = """(bool c, float[1,64] x) => (float[1,64] y) {
    y = If (c) <then_branch = t () => (float[1,64] a) { a = MatMul (x, w) },
        else_branch = e () => (float[1,64] b) { b = Neg (x) }>
}"""


def test_weights_of_bodies_travel(client: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    proto = model(BRANCHES)
    weight = onnx.numpy_helper.from_array(random.normal(size=(64, 64)).astype(np.float32), "w")
    proto.graph.node[0].attribute[0].g.initializer.append(weight)
    save(read_model(proto), tmp_path / "m.onnx", external_data=True)
    samples = [
        {"c": np.array(index % 2 == 0), "x": random.normal(size=(1, 64)).astype(np.float32)} for index in range(8)
    ]
    taps = [default_request("y", "range")]
    expected = collect(tmp_path / "m.onnx", samples, taps)
    assert same(collect(tmp_path / "m.onnx", samples, taps, cluster=client), expected)


class Eventful:
    """Samples that are read as they are needed, before some of which something happens once."""

    def __init__(self, events: Mapping[int, Callable[[], None]]) -> None:
        self.events = dict(events)

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[Sample]:
        for index, sample in enumerate(SAMPLES):
            self.events.pop(index, lambda: None)()
            yield sample


def test_what_killed_and_leaving_workers_had_is_run_again(cluster: Any, expected: CalibrationStatistics) -> None:
    killed, left = cluster.workers.values()

    def leave() -> None:
        cluster.sync(cluster.scheduler.retire_workers, workers=[left.worker_address])

    stream = Eventful({20: lambda: os.kill(killed.pid, signal.SIGKILL), 44: leave})
    found = collect(MODEL, stream, TAPS, cluster=cluster.scheduler_address)
    assert (stream.events, same(found, expected)) == ({}, True)


def test_a_cluster_without_workers_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "_PATIENCE", 0.5)
    with (
        started(0, processes=False) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        pytest.raises(SchemeError, match="has no workers, expected at least one; start some"),
    ):
        collect(MODEL, SAMPLES, TAPS, cluster=client)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "nowhere", "4", "tcp://nowhere.invalid:1"])
def test_a_cluster_that_is_not_there_is_named(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "_PATIENCE", 0.5)
    with pytest.raises(SchemeError, match=rf"No Dask scheduler answers at {address}, expected one as in tcp://"):
        collect(MODEL, SAMPLES, TAPS, cluster=address)
    gc.collect()
    assert capsys.readouterr().err == ""


class Future:
    """A result that comes after some others, of which exceptions are raised."""

    def __init__(self, *results: object) -> None:
        self.results = list(results)

    def result(self, timeout: float) -> object:
        result = self.results.pop(0)
        if isinstance(result, Exception) and not isinstance(result, ModelError):
            raise result
        return result


def client_of(*workers: str) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(address="tcp://a:1"), nthreads=lambda: dict.fromkeys(workers, 1))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (TimeoutError(), "All workers of tcp://a:1 have left and none has come for 60 seconds, expected some; start"),
        (
            distributed.KilledWorker("a", SimpleNamespace(address="b"), 3),
            "Workers of tcp://a:1 died again and again, expected them to finish; they may lack memory",
        ),
        (OSError("connection closed"), r"The scheduler at tcp://a:1 no longer answers \(connection closed\); start it"),
        (RuntimeError("no luck"), r"Workers of tcp://a:1 failed \(RuntimeError: no luck\), expected statistics; check"),
    ],
    ids=["absent", "killed", "scheduler", "fault"],
)
def test_a_cluster_that_fails_ends_in_a_sentence(error: Exception, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        dask_cluster._result(client_of(), Future(error))


def test_workers_that_stay_are_waited_for_and_errors_of_onnxq_are_raised_as_they_are() -> None:
    statistics = CalibrationStatistics(("a",))
    waiting: Any = Future(TimeoutError(), TimeoutError(), statistics)
    assert dask_cluster._result(client_of("worker"), waiting) is statistics
    with pytest.raises(ModelError, match="does not load"):
        dask_cluster._result(client_of(), Future(ModelError("does not load")))
