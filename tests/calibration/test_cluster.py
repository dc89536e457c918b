"""Clusters of processes on this machine, and one in this process that can be tampered with."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from calibration.clustered import MODEL, SAMPLES, TAPS, files
from onnxq.calibration import dask_cluster
from onnxq.calibration.collect import collect
from onnxq.calibration.instrumented import Chunk, OpenedModel
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, SchemeError
from onnxq.ir import read_model, save

distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")


def started(workers: int, threads: int = 1) -> Any:
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=threads, processes=True, dashboard_address=None, host="127.0.0.1"
    )


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    """Return a client of a cluster of two workers, in processes of their own."""
    with started(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def here() -> Iterator[Any]:
    """Return a client of a cluster of threads in this process."""
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected() -> CalibrationStatistics:
    return collect(MODEL, SAMPLES, TAPS)


class Slowly:
    """Samples that are read as they are needed, so that something can happen, once, in between."""

    def __init__(self, strike: int, happens: Callable[[], None]) -> None:
        self.strike, self.happens, self.struck = strike, happens, False

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[Sample]:
        for index, sample in enumerate(SAMPLES):
            if index == self.strike and not self.struck:
                self.struck = True
                self.happens()
            yield sample


def same(found: CalibrationStatistics, expected: CalibrationStatistics) -> bool:
    return (found, found.provenance) == (expected, expected.provenance)


def test_a_cluster_gives_the_same_bits(running: Any, expected: CalibrationStatistics, tmp_path: Path) -> None:
    assert same(collect(MODEL, SAMPLES, TAPS, cluster=running), expected)
    assert same(collect(MODEL, files(tmp_path), TAPS, cluster=running.scheduler.address), expected)


def test_an_error_of_a_sample_is_the_same_sentence_from_a_cluster(running: Any) -> None:
    bad = [SAMPLES[0], {"image": np.zeros((1, 2, 2, 2), np.float32)}]
    with pytest.raises(DataError, match=r"sample 1 cannot be run by onnxruntime"):
        collect(MODEL, bad, TAPS, cluster=running)


BRANCHES = """(bool c, float[1,64] x) => (float[1,64] y) {
    y = If (c) <then_branch = t () => (float[1,64] a) { a = MatMul (x, w) },
        else_branch = e () => (float[1,64] b) { b = Neg (x) }>
}"""


def test_weights_of_bodies_travel(running: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> main {BRANCHES}')
    weight = onnx.numpy_helper.from_array(random.normal(size=(64, 64)).astype(np.float32), "w")
    model.graph.node[0].attribute[0].g.initializer.append(weight)
    save(read_model(model), tmp_path / "m.onnx", external_data=True)
    samples = [
        {"c": np.array(index % 2 == 0), "x": random.normal(size=(1, 64)).astype(np.float32)} for index in range(8)
    ]
    taps = [default_request("y", "range")]
    expected = collect(tmp_path / "m.onnx", samples, taps)
    assert same(collect(tmp_path / "m.onnx", samples, taps, cluster=running), expected)


def test_sessions_end_with_the_run(running: Any) -> None:
    collect(MODEL, SAMPLES[:8], TAPS, cluster=running)
    gc.collect()
    until = time.monotonic() + 10
    while any(running.run(_sessions).values()) and time.monotonic() < until:
        time.sleep(0.1)
    assert set(running.run(_sessions).values()) == {0}


def _sessions() -> int:
    gc.collect()
    return len(dask_cluster._OPENED)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_killed_worker_had_is_run_again(workers: int, expected: CalibrationStatistics) -> None:
    with started(workers, threads=2) as cluster:
        victim = next(iter(cluster.workers.values())).pid
        stream = Slowly(60, lambda: os.kill(victim, signal.SIGKILL))
        found = collect(MODEL, stream, TAPS, cluster=cluster.scheduler_address)
    assert stream.struck
    assert same(found, expected)


def test_workers_may_join_and_leave(expected: CalibrationStatistics) -> None:
    with started(1) as cluster:

        def exchange() -> None:
            (old,) = cluster.workers
            cluster.scale(2)
            cluster.sync(cluster._correct_state)
            until = time.monotonic() + 30
            while len(cluster.scheduler.workers) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            cluster.sync(cluster.scheduler.retire_workers, names=[old])

        stream = Slowly(20, exchange)
        found = collect(MODEL, stream, TAPS, cluster=cluster.scheduler_address)
    assert stream.struck
    assert same(found, expected)


def test_a_cluster_without_workers_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "_PATIENCE", 0.5)
    with started(0) as cluster, pytest.raises(SchemeError, match="has no workers, expected at least one"):
        collect(MODEL, SAMPLES, TAPS, cluster=cluster.scheduler_address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "nowhere", "4", "tcp://nowhere.invalid:1"])
def test_a_cluster_that_is_not_there_is_named(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "_PATIENCE", 0.5)
    with pytest.raises(SchemeError, match=rf"No Dask scheduler answers at {address}, expected one as in tcp://"):
        collect(MODEL, SAMPLES, TAPS, cluster=address)
    gc.collect()
    assert capsys.readouterr().err == ""


def failing(error: Exception) -> Any:
    def fail(*given: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RuntimeError("out of luck"),
            r"Workers of .* failed \(RuntimeError: out of luck\), expected statistics; check",
        ),
        (
            distributed.KilledWorker("a", SimpleNamespace(address="b"), 3),
            "Workers of .* died again and again, expected them to finish",
        ),
        (OSError("connection closed"), r"The scheduler at .* no longer answers \(connection closed\); start it"),
    ],
    ids=["fault", "killed", "scheduler"],
)
def test_an_error_that_is_none_of_ours_ends_in_a_sentence(
    error: Exception, sentence: str, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedModel, "observe", failing(error))
    with pytest.raises(DataError, match=sentence):
        collect(MODEL, SAMPLES[:8], TAPS, cluster=here)


def test_a_cluster_that_all_workers_left_is_given_up(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(model: OpenedModel, chunk: Chunk) -> None:
        time.sleep(1)

    monkeypatch.setattr(OpenedModel, "observe", slowly)
    monkeypatch.setattr(dask_cluster, "_LONGEST_ABSENCE", 0.1)
    monkeypatch.setattr(here, "nthreads", dict)
    with pytest.raises(DataError, match=r"have left and none has come for 0 seconds, expected some"):
        collect(MODEL, SAMPLES[:8], TAPS, cluster=here)
