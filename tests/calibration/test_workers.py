"""Worker processes and batches: what is given out, and how much."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, process
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as some
from observations import wanted
from onnx import TensorProto, helper, numpy_helper

from onnxq.calibration import calibrate
from onnxq.calibration.accumulators import Range
from onnxq.calibration.calibrate import (
    group_by_bytes,
    hungriest,
    largest_segment,
    measure_tensor_bytes,
    peak_memory,
    plan_passes,
    statistics_bytes,
    workers_for,
)
from onnxq.calibration.collect import collect, instrument
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.kinds import default_request
from onnxq.calibration.segments import Segment
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import (
    _OPENED,
    AdaptiveBatchSizer,
    InstrumentedModel,
    Pool,
    Processes,
    Shard,
    Threads,
    Work,
    Workers,
    _Opened,
    carrying_weights,
    forget_sessions,
    observe_samples,
    run_pool,
)
from onnxq.data.inputs import Sample, model_inputs
from onnxq.data.samples import Samples, open_samples
from onnxq.errors import CandidateError, DataError, ModelError, RunError, SchemeError
from onnxq.runtime.sessions import Session, run

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
        _, reported = process.communicate(timeout=20)
    assert process.returncode in (1, -signal.SIGINT)
    # The trace is that of the process that was asked; the workers say nothing.
    assert reported.count("Traceback") == 1
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


def model(path: Path, location: str = "w.data") -> Path:
    """Write x -> MatMul(w) -> h -> Relu -> y with w in a file of its own."""
    (path.parent / location).parent.mkdir(exist_ok=True)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64]) for name in "xy")
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, path, save_as_external_data=True, location=location)
    return path


@pytest.fixture
def instrumented(tmp_path: Path) -> InstrumentedModel:
    return instrument(model(tmp_path / "m.onnx"), [default_request(name, "range") for name in "hx"])


def numbered(*rows: np.ndarray, first: int = 0) -> Iterable[tuple[int, Sample]]:
    return enumerate(({"x": row[None]} for row in rows), first)


ROWS = np.random.default_rng(1).normal(size=(11, 64)).astype(np.float32)


def test_a_bad_tensor_names_itself_and_the_sample(instrumented: InstrumentedModel) -> None:
    with pytest.raises(DataError, match=r"'x' holds 64 NaN or infinite values of 64 in sample 7"):
        observe_samples(instrumented, numbered(np.full(64, np.nan, np.float32), first=7))


@pytest.mark.parametrize(("room", "together"), [(0, 1), (100, 1), (250, 2), (10**9, 4)])
def test_so_many_samples_run_at_a_time_as_their_taps_have_room(room: int, together: int) -> None:
    opened = _Opened((), ())
    with opened.turn(room):
        opened._largest = 100
    running, most = 0, 0
    lock, barrier = threading.Lock(), threading.Barrier(4)

    def sample() -> None:
        nonlocal running, most
        barrier.wait()
        with opened.turn(room):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == together


def test_sessions_end_with_the_model(instrumented: InstrumentedModel) -> None:
    others = set(_OPENED)
    copy = replace(instrumented)
    observe_samples(instrumented, numbered(*ROWS))
    observe_samples(copy, numbered(*ROWS))
    assert set(_OPENED) - others == {instrumented, copy}
    alive = weakref.ref(_OPENED[copy])
    del copy
    gc.collect()
    assert alive() is None
    forget_sessions(instrumented)
    assert instrumented not in _OPENED


def test_a_worker_without_the_folder_uses_the_weights_that_it_was_sent(tmp_path: Path) -> None:
    instrumented = instrument(
        model(tmp_path / "m.onnx", "inner/w.data"), [default_request(name, "range") for name in "hx"]
    )
    sent = carrying_weights(instrumented, [tmp_path / "inner" / "w.data"])
    expected = observe_samples(instrumented, numbered(*ROWS))
    (tmp_path / "inner" / "w.data").unlink()
    assert observe_samples(sent, numbered(*ROWS)) == expected


def test_weights_outside_the_folder_are_not_carried(instrumented: InstrumentedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not below .*, expected it there"):
        carrying_weights(instrumented, [tmp_path.parent / "w.data"])


SAMPLE = {"image": np.load(MODEL.parent / "data" / "calib.npz")["image"][:3]}


def test_sizes_are_those_of_the_tensors() -> None:
    graph = onnx.load(MODEL).graph
    names = [node.output[0] for node in graph.node if node.op_type == "Conv"]
    sizes = measure_tensor_bytes(MODEL, SAMPLE, [*names, "image", graph.output[0].name])
    seen = collect(MODEL, [SAMPLE], wanted(names))
    assert {name: sizes[name] for name in names} == {name: 4 * seen.of(name).need(Range).count for name in names}
    assert sizes["image"] == sizes[graph.output[0].name] == 0


def test_a_model_of_sizes_that_fails_is_not_told_of_as_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [onnx.load(MODEL).graph.node[0].output[0]]
    with pytest.raises(RunError, match="the sample cannot be run"):
        measure_tensor_bytes(MODEL, {"image": SAMPLE["image"][0]}, names)

    def fail(session: Session, sample: Sample, outputs: list[str] | None = None) -> list[object]:
        if outputs:
            raise RunError("the sample cannot be run") from RuntimeError("no kernel")
        return run(session, sample)

    monkeypatch.setattr(calibrate, "run", fail)
    with pytest.raises(CandidateError, match=r"the float model runs a sample, but not with the sizes .*\(no kernel\)"):
        measure_tensor_bytes(MODEL, SAMPLE, names)


@pytest.mark.parametrize(
    ("limit", "groups"),
    [(9, (("a", "b", "c"),)), (8, (("a", "b"), ("c",))), (5, (("a", "b"), ("c",))), (4, (("a",), ("b",), ("c",)))],
)
def test_groups_keep_the_order_and_the_limit(limit: int, groups: tuple[tuple[str, ...], ...]) -> None:
    assert group_by_bytes({"a": 3, "b": 2, "c": 4}, limit) == groups


@pytest.mark.parametrize("limit", [3, 0, -1])
def test_a_tensor_beyond_the_limit_is_named(limit: int) -> None:
    with pytest.raises(DataError, match=rf"Tensor 'c' takes 4 bytes, expected at most the {max(limit, 0)} that"):
        group_by_bytes({"c": 4}, limit)


PARTS = (
    Segment(b"", ("x",), ("a", "b", "c"), frozenset("c")),
    Segment(b"", ("c",), ("d", "e"), frozenset()),
)


SIZES = {"x": 0, "a": 3, "b": 2, "c": 4, "d": 6, "e": 1}


@pytest.mark.parametrize(
    ("limit", "passes"),
    [
        (13, (("x", "a", "b", "c", "d", "e"),)),
        (11, (("x", "a", "b", "d", "e"), ("c",))),
        (10, (("x", "a", "b", "d"), ("c", "e"))),
    ],
)
def test_each_pass_takes_a_share_of_every_segment(limit: int, passes: tuple[tuple[str, ...], ...]) -> None:
    assert plan_passes(PARTS, SIZES, SIZES, limit) == passes
    assert plan_passes(PARTS, SIZES, ["e", "x"], limit) == (("x", "e"),)


def test_what_crosses_counts_beside_the_tensors_of_a_segment() -> None:
    assert largest_segment(PARTS, SIZES) == 4 + 3 + 2 + 4
    with pytest.raises(DataError, match="Tensor 'd' takes 6 bytes, expected at most the 5"):
        plan_passes(PARTS, SIZES, SIZES, 9)
    assert hungriest(PARTS, SIZES, SIZES) == ("d", 10)
    assert hungriest(PARTS, SIZES, ["x"]) == ("", 0)


def test_memory_is_counted_in_bytes() -> None:
    before = peak_memory()
    ballast = np.ones(50_000_000, np.uint8)
    assert 10_000_000 < before <= peak_memory() < 10**12
    assert peak_memory() > ballast.nbytes


def test_the_bytes_of_evidence_are_about_those_that_it_takes() -> None:
    names = [node.output[0] for node in onnx.load(MODEL).graph.node if node.op_type == "Conv"]
    kinds = (("range", None), ("histogram", None), ("sample-extremes", None), ("channel-means", 1), ("hessian", 1))
    samples = [{"image": image[None]} for image in np.load(MODEL.parent / "data" / "calib.npz")["image"][:4]]
    sizes = measure_tensor_bytes(MODEL, samples[0], names)
    for kind, axis in kinds:
        requests = [default_request(name, kind, axis) for name in names]
        found = sys.getsizeof(collect(MODEL, samples, requests))
        said = sum(statistics_bytes(requests, sizes, len(samples)).values())
        assert found / 4 < said < found * 20, kind


def samples(count: int) -> list[Sample]:
    return [{"x": np.float32([index])} for index in range(count)]


def values(shard: Shard, count: int) -> list[float]:
    return [float(sample["x"][0]) for _, sample in shard.numbered(samples(count))]


class Stream:
    """Can only be iterated, and counts how much of it was."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        for sample in samples(self.count):
            self.read += 1
            yield sample


@given(some.data(), some.integers(1, 40), some.booleans())
def test_every_sample_is_run_once_whatever_is_given_back(data: some.DataObject, count: int, streamed: bool) -> None:
    indices = sorted(data.draw(some.sets(some.integers(0, count - 1))))
    work = Work(Stream(count) if streamed else samples(count), indices)
    finished: list[float] = []
    while work.left:
        shard = work.take(data.draw(some.integers(1, 9)), carried=data.draw(some.booleans()))
        assert values(shard, count) == list(shard.indices)
        if data.draw(some.integers(0, 3)):
            finished += values(shard, count)
        else:
            work.give_back(shard.indices)
    assert sorted(finished) == indices


def test_samples_keep_their_index_among_all() -> None:
    work = Work(samples(4), [1, 3])
    shard = work.take(9, carried=True)
    assert (shard.indices, values(shard, 4), len(shard)) == ([1, 3], [1, 3], 2)
    work.give_back(shard.indices)
    assert work.take(1, carried=False).indices == [1]


def test_samples_in_memory_fill_a_shard_by_their_bytes() -> None:
    work = Work(samples(10), range(10))
    assert [len(work.take(9, carried=True, nbytes=12)) for _ in range(4)] == [3, 3, 3, 1]


def test_a_stream_is_read_as_far_as_it_is_needed() -> None:
    stream = Stream(100)
    Work(stream, range(100)).take(3, carried=True)
    assert stream.read <= 4


@pytest.mark.parametrize(
    ("seconds", "left", "workers", "size"),
    [(0.1, 10**6, 2, 32), (8.0, 10**6, 2, 5), (80.0, 10**6, 2, 1), (0.1, 20, 2, 5), (0.1, 3, 9, 1)],
)
def test_a_shard_lasts_as_long_as_wanted_and_the_last_ones_are_shared(
    seconds: float, left: int, workers: int, size: int
) -> None:
    pace = AdaptiveBatchSizer(5.0)
    assert 1 <= pace.size(left, workers) <= 8
    pace.learn(8, seconds)
    assert pace.size(left, workers) == size
