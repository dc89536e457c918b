from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibration.clustered import MODEL, SAMPLES, TAPS, collected_here, ledger
from onnxq.calibration.collect import collect
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import Samples, open_samples
from onnxq.errors import DataError, SchemeError
from onnxq.ir import read_model, save

distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")

SHORT = 0.2
"""A lease of so many seconds ends several times in the run of these samples."""


def started(workers: int, threads: int = 1) -> Any:
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=threads, processes=True, dashboard_address=None, host="127.0.0.1"
    )


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    """Return a client of a cluster of two workers, one of them with two threads."""
    with started(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> CalibrationStatistics:
    return collected_here()


def files(folder: Path) -> Samples:
    """Write each sample to a file of its own."""
    for index, sample in enumerate(SAMPLES):
        np.savez(folder / f"{index}.npz", **sample)
    return open_samples(folder, model_inputs(onnx.load(MODEL)))


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


@pytest.mark.parametrize("lease", [0.0, SHORT, 60.0])
def test_leases_do_not_show(lease: float, running: Any, expected: CalibrationStatistics) -> None:
    assert same(collect(MODEL, SAMPLES, TAPS, workers=Cluster(running, lease=lease), ledger=ledger()), expected)


def test_workers_read_files_themselves(running: Any, expected: CalibrationStatistics, tmp_path: Path) -> None:
    samples = files(tmp_path)
    read: list[int] = []

    class Noted(Samples):
        def __iter__(self) -> Iterator[Sample]:
            read.append(0)
            return super().__iter__()

    samples.__class__ = Noted
    assert same(collect(MODEL, samples, TAPS, workers=Cluster(running), ledger=ledger()), expected)
    assert read == []


@pytest.mark.parametrize("hidden", ["gone", "another"])
def test_samples_are_sent_to_workers_that_see_other_disks(
    hidden: str, running: Any, expected: CalibrationStatistics, tmp_path: Path
) -> None:
    samples = files(tmp_path)
    running.run(_hide, str(tmp_path), hidden)
    try:
        found = collect(MODEL, samples, TAPS, workers=Cluster(running, lease=SHORT), ledger=ledger())
    finally:
        running.run(_show)
    assert same(found, expected)


def _hide(folder: str, how: str) -> None:
    """Let this process find nothing, or other arrays, in a folder, as on a machine with other disks."""
    from onnxq.data import arrays

    opened = arrays._open_member

    def elsewhere(path: Path, name: str) -> Any:
        if not str(path).startswith(folder):
            return opened(path, name)
        if how == "gone":
            raise FileNotFoundError(path)
        return opened(Path(folder) / "63.npz", name)

    arrays._seen = opened  # type: ignore[attr-defined]
    arrays._open_member = elsewhere  # type: ignore[assignment]


def _show() -> None:
    from onnxq.data import arrays

    arrays._open_member = arrays._seen  # type: ignore[attr-defined]


def test_a_damaged_file_is_the_same_sentence_from_a_cluster(running: Any, tmp_path: Path) -> None:
    samples = files(tmp_path)
    (tmp_path / "5.npz").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"5.npz: 'image' cannot be read"):
        collect(MODEL, samples, TAPS, workers=Cluster(running))


def test_an_error_of_a_sample_is_the_same_sentence_from_a_cluster(running: Any) -> None:
    bad = [SAMPLES[0], {"image": np.zeros((1, 2, 2, 2), np.float32)}]
    with pytest.raises(DataError, match=r"sample 1 cannot be run by onnxruntime"):
        collect(MODEL, bad, TAPS, workers=Cluster(running))


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
    expected = collect(tmp_path / "m.onnx", samples, taps, ledger=ledger())
    assert same(collect(tmp_path / "m.onnx", samples, taps, workers=Cluster(running), ledger=ledger()), expected)


def test_sessions_end_with_the_job(running: Any) -> None:
    collect(MODEL, SAMPLES[:8], TAPS, workers=Cluster(running))
    gc.collect()
    until = time.monotonic() + 10
    while any(running.run(_sessions).values()) and time.monotonic() < until:
        time.sleep(0.1)
    assert set(running.run(_sessions).values()) == {0}


def _sessions() -> int:
    from onnxq.calibration.workers import _OPENED

    gc.collect()
    return len(_OPENED)


def test_all_threads_of_a_worker_run(expected: CalibrationStatistics) -> None:
    with started(1, threads=3) as cluster:
        address = cluster.scheduler_address
        assert same(collect(MODEL, SAMPLES, TAPS, workers=Cluster(address), ledger=ledger()), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_killed_worker_had_is_run_again(workers: int, expected: CalibrationStatistics) -> None:
    with started(workers) as cluster:
        victim = next(iter(cluster.workers.values())).pid
        stream = Slowly(33, lambda: os.kill(victim, signal.SIGKILL))
        found = collect(MODEL, stream, TAPS, workers=Cluster(cluster.scheduler_address), ledger=ledger())
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
        address = cluster.scheduler_address
        found = collect(MODEL, stream, TAPS, workers=Cluster(address, lease=SHORT), ledger=ledger())
    assert stream.struck
    assert same(found, expected)


def test_a_cluster_without_workers_ends_in_a_sentence() -> None:
    with started(0) as cluster, pytest.raises(SchemeError, match="has no workers, expected at least one"):
        collect(MODEL, SAMPLES, TAPS, workers=Cluster(cluster.scheduler_address, patience=0.5))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "nowhere", "tcp://nowhere.invalid:1"])
def test_a_cluster_that_is_not_there_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SchemeError, match=rf"No Dask scheduler answers at {address}, expected one as in tcp://"):
        collect(MODEL, SAMPLES, TAPS, workers=Cluster(address, patience=0.5))
    gc.collect()
    assert capsys.readouterr().err == ""


def test_a_scheduler_that_dies_ends_in_a_sentence(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "nthreads", lambda: (_ for _ in ()).throw(OSError("connection closed")))
    with pytest.raises(DataError, match=r"no longer answers \(connection closed\); start it"):
        collect(MODEL, SAMPLES[:8], TAPS, workers=Cluster(running))
