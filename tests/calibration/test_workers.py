from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, process
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.calibration.calibrate import workers_for
from onnxq.calibration.collect import collect
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import Pool, Processes, Shard, Threads, Work, Workers, run_pool
from onnxq.data.inputs import model_inputs
from onnxq.data.samples import Samples, open_samples
from onnxq.errors import DataError, SchemeError

MODEL = Path(__file__).parents[2] / "models" / "resnet.onnx"
SAMPLES = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:64]]
TAPS = [default_request(name, kind) for name in ("image", "logits") for kind in ("range", "histogram")]


class Slowly:
    """Samples that are read as they are needed, so that a worker can be killed, once, in between."""

    def __init__(self, strike: int, kill: Callable[[], None]) -> None:
        self.strike, self.kill, self.struck = strike, kill, False

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for index, sample in enumerate(SAMPLES):
            if index == self.strike and not self.struck:
                self.struck = True
                self.kill()
            yield sample


def kill_a_child() -> None:
    """Kill the youngest process that this one started through multiprocessing."""
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
    read = Samples.read_samples
    monkeypatch.setattr(
        Samples, "read_samples", lambda *given: read(*given) if threading.get_ident() != here else iter(())
    )
    assert collect(MODEL, samples, TAPS, workers=workers) == expected


def test_an_unreadable_file_is_the_same_sentence_from_a_process(tmp_path: Path) -> None:
    samples = files(tmp_path)
    (tmp_path / "5.npz").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"5.npz: 'image' cannot be read"):
        collect(MODEL, samples, TAPS, workers=Processes(1))


def test_an_error_of_a_process_is_the_same_sentence() -> None:
    bad = [SAMPLES[0], {"image": np.zeros((1, 2, 2, 2), np.float32)}]
    with pytest.raises(DataError, match=r"sample 1 cannot be run by onnxruntime"):
        collect(MODEL, bad, TAPS, workers=Processes(1))


def test_nobody_waits_for_the_rest_of_what_a_dead_process_was_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes: list[Any] = []

    class Opened(ProcessPoolExecutor):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            pipes.append(self._result_queue._writer)  # type: ignore[attr-defined]

    def end() -> None:
        # What one that is killed in between leaves: the length of an answer that never comes.
        os.write(pipes[0].fileno(), struct.pack("!i", 1 << 26))
        raise InterruptedError

    monkeypatch.setattr(futures, "ProcessPoolExecutor", Opened)
    before = set(threading.enumerate())
    with pytest.raises(InterruptedError):
        collect(MODEL, Slowly(25, end), TAPS, workers=Processes(2))
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_an_error_comes_back_when_the_threads_of_the_processes_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python's own end, a moment later after Ctrl-C, would write to a pipe that such a thread closes.
    ends = process._ExecutorManagerThread.join_executor_internals  # type: ignore[attr-defined]

    def slowly(thread: threading.Thread) -> None:
        time.sleep(0.3)
        ends(thread)

    def interrupt() -> None:
        raise InterruptedError

    monkeypatch.setattr(process._ExecutorManagerThread, "join_executor_internals", slowly)  # type: ignore[attr-defined]
    before = set(threading.enumerate())
    with pytest.raises(InterruptedError):
        collect(MODEL, Slowly(25, interrupt), TAPS, workers=Processes(2))
    assert set(threading.enumerate()) <= before


class Mortal:
    """Runs at once; of all shards, those numbered in `deaths` find their worker dead, and so do the later ones."""

    def __init__(self, deaths: set[int], count: int = 2) -> None:
        self.deaths, self.count, self.opened = deaths, count, 0
        self.calls = iter(range(10_000))

    @contextmanager
    def open(self) -> Iterator[Pool]:
        self.opened += 1
        dead = False

        def submit(shard: Shard) -> Future[tuple[CalibrationStatistics, float]]:
            nonlocal dead
            if dead:
                raise BrokenExecutor("dead before")
            future: Future[tuple[CalibrationStatistics, float]] = Future()
            if next(self.calls) in self.deaths:
                dead = True
                future.set_exception(BrokenExecutor("dead"))
            else:
                future.set_result((CalibrationStatistics(("",) * len(shard)), 3.0))
            return future

        yield Pool(submit, self.count, carried=True)


@pytest.mark.parametrize("deaths", [set(), {0}, {3}, {0, 1}, {2, 5, 9, 14}, {10}])
def test_every_sample_is_run_once_though_workers_die(deaths: set[int]) -> None:
    pool = Mortal(deaths)
    assert sum(len(one.samples) for one in run_pool(pool.open, Work(SAMPLES, range(40)))) == 40
    assert bool(deaths) < pool.opened <= 1 + len(deaths)


def test_a_sample_that_kills_every_worker_ends_in_a_sentence() -> None:
    pool = Mortal(set(range(4, 100)))
    with pytest.raises(DataError, match=r"Workers died 3 times while running sample \d+ "):
        list(run_pool(pool.open, Work(SAMPLES, range(40))))
    assert pool.opened == 3


def test_no_work_starts_no_workers() -> None:
    pool = Mortal(set())
    assert list(run_pool(pool.open, Work(SAMPLES, []))) == []
    assert pool.opened == 0


# Whoever runs the tests may ignore the signal, which children inherit.
CALIBRATING = """
    import signal, sys, threading
    from pathlib import Path
    import numpy as np
    from onnxq.calibration.kinds import default_request
    from onnxq.calibration.collect import collect
    from onnxq.calibration.workers import Processes

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        samples = [{"image": np.zeros((1, 1, 28, 28), np.float32)}] * 100_000
        threading.Timer(float(sys.argv[2]), lambda: print("go", flush=True)).start()
        collect(Path(sys.argv[1]), samples, [default_request("logits", "range")], workers=Processes(2))
"""


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.4, 3.0])
def test_ctrl_c_ends_all_processes_at_once(seconds: float, tmp_path: Path) -> None:
    script = tmp_path / "calibrating.py"
    script.write_text(textwrap.dedent(CALIBRATING))
    with subprocess.Popen(
        [sys.executable, script, MODEL, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode in (1, -signal.SIGINT)
    # The trace is that of the process that was asked; the workers say nothing.
    assert told.count("Traceback") == 1
    # Every process holds a pipe, so that none is left once these have ended.
    assert time.monotonic() - started < 5


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


def test_a_number_is_no_address_of_a_cluster() -> None:
    with pytest.raises(SchemeError, match=r"the cluster is '4', expected an address such as tcp://host:8786"):
        workers_for(cluster="4")
