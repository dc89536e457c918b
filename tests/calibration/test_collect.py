"""Samples run in chunks, in threads: what is observed, who reads it, and how much is in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import model
from observations import observe, statistic, wanted, with_outputs

from calibration.clustered import MODEL, SAMPLES, TAPS, files
from onnxq.calibration import collect as collecting
from onnxq.calibration import instrumented as running
from onnxq.calibration import segments
from onnxq.calibration.accumulators import Range
from onnxq.calibration.collect import collect, cut
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.instrumented import Chunk, InstrumentedModel, InstrumentedRunError, OpenedModel, instrument
from onnxq.calibration.kinds import default_request
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample
from onnxq.data.samples import Samples
from onnxq.errors import CandidateError, DataError, ModelError, RunError
from onnxq.runtime.sessions import runtime_version

WEIGHT = np.array([[2, 0], [0, -3]], np.float32)
# A chain that onnxruntime would fuse or fold were its tensors not observed.
LAYERS = "(float[N,2] x) => (float[N,2] y) { h = MatMul(x, w) y = Relu(h) }"
ROWS = [np.float32(rows) for rows in ([[1, 1]], [[2, 0], [-1, 4]], [[0, 0]])]
FED: list[Sample] = [{"x": rows} for rows in ROWS]


def layers() -> onnx.ModelProto:
    return model(LAYERS, w=WEIGHT)


def saved(path: Path, location: str = "m.data") -> Path:
    onnx.save(layers(), path, save_as_external_data=True, size_threshold=0, location=location)
    return path


def test_node_outputs_inputs_outputs_and_initializers_are_observed() -> None:
    statistics = collect(layers(), FED, wanted("hxyw"))
    assert statistics.samples == tuple(sorted(map(sample_digest, FED)))
    assert statistics.provenance == Provenance("", runtime_version(), (instruction_set(),))
    assert list(statistics.statistics) == wanted("hxyw")
    arrays = {
        "h": lambda x: x @ WEIGHT,
        "x": lambda x: x,
        "y": lambda x: np.maximum(x @ WEIGHT, 0),
        "w": lambda x: WEIGHT,
    }
    for name, compute in arrays.items():
        parts = [observe({name: compute(x)}, wanted([name]), sample_digest({"x": x})) for x in ROWS]
        assert statistics.of(name) == reduce(CalibrationStatistics.plus, parts).of(name)


def test_however_samples_and_tensors_are_split_the_statistics_are_the_same() -> None:
    whole = collect(layers(), FED, wanted("hxy"))
    first, second = (collect(layers(), part, wanted("hxy")) for part in (FED[:1], FED[1:]))
    assert first.merge(second) == whole == second.merge(first)
    assert collect(with_outputs(layers(), ["h"]), FED, wanted("hxy")) == whole
    assert collect(layers(), FED, wanted("x"), others="hxy") == whole.select(wanted("x"))
    assert collect(layers(), [FED[0], FED[0]], wanted("hxy")) == first.plus(first)
    empty = [{"x": np.zeros((0, 2), np.float32)}]
    assert collect(layers(), empty + FED, wanted("h")).of("h") == whole.of("h")
    nothing = collect(layers(), FED, [])
    assert (len(nothing.samples), dict(nothing.statistics)) == (3, {})


def test_large_tensors_are_counted_at_a_selection_unless_all_are_requested() -> None:
    large = [{"x": np.random.default_rng(0).normal(size=(1000, 2)).astype(np.float32)}]
    some, whole = (
        collect(layers(), large, wanted("h", "histogram", elements=count)).of("h").need(Histogram).whole
        for count in (100, 0)
    )
    assert (some.minimum, some.maximum, some.counts.sum() <= 101) == (whole.minimum, whole.maximum, True)
    assert whole.counts.sum() == 2000


def test_external_data_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx")
    before = {entry.name: entry.stat().st_mtime_ns for entry in tmp_path.iterdir()}
    assert collect(path, FED, wanted("h")) == collect(layers(), FED, wanted("h"))
    assert {entry.name: entry.stat().st_mtime_ns for entry in tmp_path.iterdir()} == before


MIXED = """(int64[N] ids, bool[N] keep, string[N] names) => (float[N] y) {
    rows = Gather(table, ids) share = Cast <to = 1> (keep) h = Mul(rows, share)
    a = Constant <value_strings = ["a"]> () same = Equal(names, a) bonus = Cast <to = 1> (same) y = Add(h, bonus)
}"""


def picked(*rows: tuple[int, str]) -> Sample:
    ids, names = zip(*rows, strict=True) if rows else ((), ())
    return {"ids": np.array(ids, np.int64), "keep": np.ones(len(ids), bool), "names": np.array(names, str)}


def test_inputs_of_any_type_and_values_of_any_size_come_in() -> None:
    mixed = model(MIXED, opset=19, table=np.float32([0, -5, 1e30, 2]))
    cases = {(0.0, 0.0): [(0, "b")] * 3, (-5.0, -5.0): [(1, "b")] * 3, (-5.0, np.float32(1e30)): [(2, "b"), (1, "b")]}
    for ends, rows in cases.items():
        assert collect(mixed, [picked(*rows), picked()], wanted("h")).of("h").need(Range) == statistic(
            np.float32([*ends] * 2)[: len(rows)], "range"
        )
    both = collect(mixed, [picked((1, "a"), (3, "b"))], wanted("y")).of("y").need(Range)
    assert (both.minimum, both.maximum) == (-4, 2)
    with pytest.raises(DataError, match=r"Tensor 'ids' is int64, expected a float type"):
        collect(mixed, [picked((1, "a"))], wanted(["ids"]))


BROKEN = layers()
BROKEN.graph.node[1].op_type = "NoSuchOperator"


@pytest.mark.parametrize(
    ("made", "samples", "tensor", "error", "message"),
    [
        (layers(), FED, "hh", ModelError, "Tensor 'hh' is not in the main graph"),
        (BROKEN, FED, "h", ModelError, "the model cannot be loaded by onnxruntime: .*NoSuchOperator"),
        (
            layers(),
            [FED[0], {"x": np.float32([[3e38, 3e38]])}],
            "h",
            DataError,
            "Tensor 'h' holds 2 NaN or infinite values of 2 in sample 1",
        ),
        (
            layers(),
            [FED[0], {"x": np.zeros((1, 3), np.float32)}],
            "h",
            RunError,
            "sample 1 cannot be run by onnxruntime: .*x.*; check shapes",
        ),
        (Path("text.onnx"), FED, "h", ModelError, "text.onnx is not an ONNX model"),
        (Path("gone.onnx"), FED, "h", ModelError, "gone.onnx cannot be read: No such file"),
        (Path("bare.onnx"), FED, "h", ModelError, "the model cannot be loaded by onnxruntime"),
    ],
)
def test_a_model_or_sample_that_does_not_run_is_told(
    made: onnx.ModelProto | Path,
    samples: list[Sample],
    tensor: str,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "text.onnx").write_bytes(b"\xff\xff not a model")
    saved(tmp_path / "bare.onnx")
    (tmp_path / "m.data").unlink()
    with pytest.raises(error, match=message) as caught:
        collect(tmp_path / made if isinstance(made, Path) else made, samples, wanted([tensor]))
    assert not isinstance(caught.value, InstrumentedRunError)


def test_an_instrumented_model_that_fails_is_not_told_of_as_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, index: int) -> list[object]:
        raise RunError(f"sample {index} cannot be run by onnxruntime") from RuntimeError("no kernel")

    monkeypatch.setattr(segments, "run", fail)
    with pytest.raises(CandidateError, match=r"the float model runs sample 0, but not with .*\(no kernel\)") as caught:
        collect(layers(), FED, wanted("h"))
    assert "cannot be run" not in str(caught.value)


# Chunks and threads.


class Stream:
    """Samples that can only be iterated."""

    def __init__(self, end: int = len(SAMPLES)) -> None:
        self.end, self.read = end, 0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[Sample]:
        for sample in SAMPLES[: self.end]:
            self.read += 1
            yield sample


@pytest.mark.parametrize(
    ("count", "nbytes", "sizes"),
    [
        (0, 8, []),
        (3, 8, [1, 1, 1]),
        (20, 8, [3] * 6 + [2]),
        (600, 8, [64] * 9 + [24]),
        (600, 10**6, [8] * 75),
        (3, 10**8, [1, 1, 1]),
    ],
)
def test_chunks_hold_all_samples_in_order(count: int, nbytes: int, sizes: list[int]) -> None:
    samples = [{"x": np.broadcast_to(np.uint8(index % 7), nbytes)} for index in range(count)]
    for sent in (True, False):
        chunks = list(cut(samples, sent=sent))
        assert [len(chunk.indices) for chunk in chunks] == sizes
        assert [index for chunk in chunks for index in chunk.indices] == list(range(count))
        assert [sample["x"][0] for chunk in chunks for sample in chunk.samples] == [one["x"][0] for one in samples]


def test_the_number_of_threads_and_the_reader_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    taps = [*TAPS, default_request("logits", "channel-means", 1), default_request("logits", "hessian", 1)]
    expected = collect(MODEL, SAMPLES, taps)
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(collecting, "available_cores", lambda threads=threads: threads)
        assert collect(MODEL, SAMPLES, taps) == expected
    assert collect(MODEL, Stream(), taps) == expected


def test_threads_read_files_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, here = files(tmp_path), threading.get_ident()
    read = Samples.read_samples
    places: list[tuple[bool, int]] = []

    def noted(samples: Samples, indices: list[int]) -> Iterator[Sample]:
        places.extend((threading.get_ident() == here, index) for index in indices)
        return read(samples, indices)

    monkeypatch.setattr(Samples, "read_samples", noted)
    assert collect(MODEL, samples, TAPS) == collect(MODEL, SAMPLES, TAPS)
    # Here, the first sample is read for its size, and the indices of all for a stream that is not used.
    assert sorted(index for ours, index in places if not ours) == list(range(64))


def test_a_stream_is_read_as_far_as_it_is_needed_and_may_not_end_early() -> None:
    stream = Stream()
    chunks = cut(stream, sent=True)
    assert [len(next(chunks).samples), len(next(chunks).samples)] == [8, 8]  # type: ignore[arg-type]
    # The first sample is read once more, for its size.
    assert stream.read == 1 + 2 * 8
    with pytest.raises(DataError, match="The samples end before sample 50, expected it"):
        collect(MODEL, Stream(end=50), TAPS)


def test_progress_counts_samples() -> None:
    done: list[tuple[int, int]] = []
    collect(MODEL, SAMPLES[:20], TAPS, progress=lambda *counts: done.append(counts))
    assert done == [(3, 20), (6, 20), (9, 20), (12, 20), (15, 20), (18, 20), (20, 20)]


@pytest.mark.parametrize(("room", "together"), [(0, 1), (100, 1), (250, 2), (10**9, 4)])
def test_as_many_samples_run_at_a_time_as_their_tensors_have_room(
    room: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "OBSERVED_BYTES", room)
    opened = OpenedModel(InstrumentedModel((), None, ()))
    opened._largest = 100
    inside, leave = threading.Semaphore(0), threading.Event()

    def sample() -> None:
        with opened._turn():
            inside.release()
            leave.wait(60)

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    # As many as have room come in while none leaves, and no more, however long that takes.
    assert all(inside.acquire(timeout=60) for _ in range(together))
    assert not inside.acquire(timeout=0.05)
    assert opened._running == together
    leave.set()
    for thread in threads:
        thread.join()
    assert (opened._running, all(inside.acquire(timeout=0) for _ in range(4 - together))) == (0, True)


# Peak memory in kilobytes after some samples of a megabyte, and after ten times as many.
GROWING = """
import resource, sys
from pathlib import Path
import numpy as np
from onnxq.calibration.collect import collect
from onnxq.calibration.kinds import default_request

class Stream:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __iter__(self):
        for index in range(self.count):
            yield {"x": np.full((131072, 2), index % 7, np.float32)}

for count in (20, 200):
    collect(Path(sys.argv[1]), Stream(count), [default_request(name, "histogram") for name in "xhy"])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell the peak memory of a process")
def test_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROWING, saved(tmp_path / "m.onnx")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    few, many = map(int, done.stdout.split())
    # 180 further samples of three tensors take half a gigabyte.
    assert many - few < 50_000


# Models that are sent.


def test_weights_travel_with_the_model_unless_they_are_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model" / "inner").mkdir(parents=True)
    path = saved(tmp_path / "model" / "m.onnx", "inner/w.data")
    instrumented = instrument(path, wanted("hx"))
    sent, chunk = instrumented.with_weights(), Chunk(range(3), FED)
    expected = OpenedModel(instrumented).observe(chunk)
    (path.parent / "inner" / "w.data").rename(tmp_path / "w.data")
    assert OpenedModel(sent).observe(chunk) == expected
    assert sent.with_weights() is sent
    (path.parent / "inner" / "w.data").symlink_to(tmp_path / "w.data")
    with pytest.raises(ModelError, match=r"is not below .*, expected it there"):
        instrument(path, wanted("hx")).with_weights()


def test_a_bad_tensor_names_itself_and_the_sample() -> None:
    opened: Any = OpenedModel(instrument(layers(), wanted("hx")))
    with pytest.raises(DataError, match=r"'x' holds 2 NaN or infinite values of 2 in sample 7"):
        opened.observe(Chunk([7], [{"x": np.full((1, 2), np.nan, np.float32)}]))
