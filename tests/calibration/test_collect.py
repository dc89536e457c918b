"""Samples run in chunks, in threads: which chunk a sample is in, who reads it, and how much is in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration.clustered import MODEL, SAMPLES, TAPS, files
from onnxq.calibration import collect as collecting
from onnxq.calibration import instrumented as running
from onnxq.calibration.collect import collect, cut
from onnxq.calibration.instrumented import Chunk, InstrumentedModel, OpenedModel, instrument
from onnxq.calibration.kinds import default_request
from onnxq.data.inputs import Sample
from onnxq.data.samples import Samples
from onnxq.errors import DataError, ModelError


class Stream:
    """Samples that can only be iterated."""

    def __init__(self, count: int = len(SAMPLES), end: int = len(SAMPLES)) -> None:
        self.count, self.end, self.read = count, end, 0

    def __len__(self) -> int:
        return self.count

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


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_the_threads_do_not_show(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = [*TAPS, default_request("logits", "channel-means", 1), default_request("logits", "hessian", 1)]
    expected = collect(MODEL, SAMPLES, taps)
    monkeypatch.setattr(collecting, "available_cores", lambda: threads)
    assert collect(MODEL, SAMPLES, taps) == expected == collect(MODEL, Stream(), taps)


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


def test_a_stream_is_read_as_far_as_it_is_needed() -> None:
    stream = Stream()
    chunks = cut(stream, sent=True)
    assert [len(next(chunks).samples), len(next(chunks).samples)] == [8, 8]  # type: ignore[arg-type]
    # The first sample is read once more, for its size.
    assert stream.read == 1 + 2 * 8


def test_a_stream_that_ends_early_is_told() -> None:
    with pytest.raises(DataError, match="The samples end before sample 50, expected it"):
        collect(MODEL, Stream(end=50), TAPS)


def test_progress_counts_samples() -> None:
    seen: list[tuple[int, int]] = []
    collect(MODEL, SAMPLES[:20], TAPS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 20), (6, 20), (9, 20), (12, 20), (15, 20), (18, 20), (20, 20)]


@pytest.mark.parametrize(("room", "together"), [(0, 1), (100, 1), (250, 2), (10**9, 4)])
def test_as_many_samples_run_at_a_time_as_their_tensors_have_room(
    room: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "OBSERVED_BYTES", room)
    model = OpenedModel(InstrumentedModel((), None, ()))
    model._largest = 100
    count, most = 0, 0
    lock, barrier = threading.Lock(), threading.Barrier(4)

    def sample() -> None:
        nonlocal count, most
        barrier.wait()
        with model._turn():
            with lock:
                count += 1
                most = max(most, count)
            time.sleep(0.05)
            with lock:
                count -= 1

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == together


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
        random = np.random.default_rng(0)
        for _ in range(self.count):
            yield {"x": random.normal(size=(4096, 64)).astype(np.float32)}

for count in (40, 400):
    collect(Path(sys.argv[1]), Stream(count), [default_request(name, "histogram") for name in "xhy"])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell the peak memory of a process")
def test_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWING, model(tmp_path / "m.onnx")], check=True, capture_output=True, text=True
    )
    few, many = map(int, done.stdout.split())
    # 360 further samples of three tensors take a gigabyte.
    assert many - few < 50_000


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


RANGES = [default_request(name, "range") for name in "hx"]
ROWS = [{"x": row[None]} for row in np.random.default_rng(1).normal(size=(11, 64)).astype(np.float32)]


def test_a_bad_tensor_names_itself_and_the_sample(tmp_path: Path) -> None:
    opened = OpenedModel(instrument(model(tmp_path / "m.onnx"), RANGES))
    with pytest.raises(DataError, match=r"'x' holds 64 NaN or infinite values of 64 in sample 7"):
        opened.observe(Chunk([7], [{"x": np.full((1, 64), np.nan, np.float32)}]))


def test_weights_travel_with_the_model(tmp_path: Path) -> None:
    instrumented = instrument(model(tmp_path / "m.onnx", "inner/w.data"), RANGES)
    sent, chunk = instrumented.with_weights(), Chunk(range(11), ROWS)
    expected = OpenedModel(instrumented).observe(chunk)
    (tmp_path / "inner" / "w.data").unlink()
    assert OpenedModel(sent).observe(chunk) == expected
    assert sent.with_weights() is sent


def test_weights_outside_the_folder_do_not_travel(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = model(tmp_path / "model" / "m.onnx")
    (tmp_path / "w.data").write_bytes((tmp_path / "model" / "w.data").read_bytes())
    (tmp_path / "model" / "w.data").unlink()
    (tmp_path / "model" / "w.data").symlink_to(tmp_path / "w.data")
    with pytest.raises(ModelError, match=r"is not below .*, expected it there"):
        instrument(path, RANGES).with_weights()
