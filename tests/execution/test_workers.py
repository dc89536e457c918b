from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from observations import wanted

from onnxq.errors import DataError, SchemeError
from onnxq.execution.runner import collect
from onnxq.execution.shards import Workers
from onnxq.execution.workers import Cluster, Processes, Threads, available_cores, workers_for
from onnxq.samples.data import Samples, open_samples
from onnxq.samples.inputs import StoredSample, model_inputs

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:64]]
TAPS = wanted(["image", "logits"])


class Slowly:
    """Samples, one after the other finished shard, so that a worker can be killed in between."""

    def __init__(self, strike: int, kill: Any) -> None:
        self.strike, self.kill = strike, kill

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for index, sample in enumerate(SAMPLES):
            if index == self.strike:
                self.kill()
            yield sample


def kill_a_child() -> None:
    """Kill the youngest process that this one started through multiprocessing."""
    import multiprocessing

    os.kill(multiprocessing.active_children()[-1].pid or 0, signal.SIGKILL)


def test_a_killed_process_is_replaced_and_does_not_show() -> None:
    # Three shards are handed out before the fourth is read, so the processes have started.
    found = collect(MODEL, Slowly(25, kill_a_child), TAPS, workers=Processes(2))
    assert found == collect(MODEL, SAMPLES, TAPS)


def files(folder: Path) -> Samples:
    """Write each sample to a file of its own."""
    for index, sample in enumerate(SAMPLES):
        np.savez(folder / f"{index}.npz", **sample)
    return open_samples(folder, model_inputs(onnx.load(MODEL)))


@pytest.mark.parametrize("workers", [Threads(2), Processes(2)], ids=str)
def test_workers_read_files_themselves(workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = files(tmp_path)
    expected = collect(MODEL, list(samples), TAPS, workers=Threads(1))
    here = threading.get_ident()
    load = StoredSample.load
    monkeypatch.setattr(StoredSample, "load", lambda self: load(self) if threading.get_ident() != here else None)
    assert collect(MODEL, samples, TAPS, workers=workers) == expected


def test_an_unreadable_file_is_the_same_sentence_from_a_process(tmp_path: Path) -> None:
    samples = files(tmp_path)
    (tmp_path / "5.npz").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"5.npz: 'image' cannot be read"):
        collect(MODEL, samples, TAPS, workers=Processes(1))


def test_a_cluster_is_sent_what_is_in_the_files(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")
    samples = files(tmp_path)
    expected = collect(MODEL, SAMPLES, TAPS)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        assert collect(MODEL, samples, TAPS, workers=Cluster(cluster.scheduler_address)) == expected


def test_an_error_of_a_process_is_the_same_sentence() -> None:
    bad = [SAMPLES[0], {"image": np.zeros((1, 2, 2, 2), np.float32)}]
    with pytest.raises(DataError, match=r"sample 1 cannot be run by onnxruntime"):
        collect(MODEL, bad, TAPS, workers=Processes(1))


def test_a_cluster_that_loses_a_worker_gives_the_same_bits() -> None:
    distributed = pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        victim = next(iter(cluster.workers.values())).pid
        killed = threading.Event()

        def kill() -> None:
            os.kill(victim, signal.SIGKILL)
            killed.set()

        found = collect(MODEL, Slowly(33, kill), TAPS, workers=Cluster(cluster.scheduler_address))
    assert killed.is_set()
    assert found == collect(MODEL, SAMPLES, TAPS)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "nowhere", "tcp://nowhere.invalid:1"])
def test_a_cluster_that_is_not_there_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("distributed", reason="needs pip install 'onnxq[dask]'")
    with pytest.raises(SchemeError, match=rf"No Dask scheduler answers at {address}, expected one as in tcp://"):
        collect(MODEL, SAMPLES, TAPS, workers=Cluster(address, patience=0.5))
    gc.collect()
    assert capsys.readouterr().err == ""


def test_workers_are_chosen_by_what_was_asked_for() -> None:
    assert workers_for() == Threads()
    assert workers_for(jobs=3) == Processes(3)
    assert workers_for(cluster="tcp://a:1") == Cluster("tcp://a:1")
    with pytest.raises(SchemeError, match="both given, expected one"):
        workers_for(jobs=1, cluster="tcp://a:1")


@pytest.mark.parametrize("workers", [Threads, Processes])
def test_a_count_below_one_is_refused(workers: type[Threads] | type[Processes]) -> None:
    with pytest.raises(SchemeError, match="is 0, expected at least 1"):
        workers(0)


def test_there_is_at_least_one_core() -> None:
    assert available_cores() >= 1
