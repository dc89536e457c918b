from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from onnxq.errors import DataError, OutputError
from onnxq.evidence.observer import observe
from onnxq.evidence.provenance import Provenance
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.storage import load_statistics, save_statistics

PROVENANCE = Provenance("model", ((0, "a"), (3, "b")), 100, "onnxruntime 1.2.3")


def statistics(samples: int, **tensors: list[float]) -> Statistics:
    seen = {name: observe(np.array(values, np.float64), sample=3) for name, values in tensors.items()}
    return Statistics(samples, seen, PROVENANCE)


CASES = [
    Statistics(),
    statistics(3, a=[0.1, 1e-300, -7], b=[], c=[-1e4, -9e9, 1], d=[1e30]),
    Statistics(1, {"a": observe(np.arange(5000, dtype=np.float32), histogram_elements=100)}),
    Statistics(2, {"a": observe(np.float32([1]), sample=4), "b": observe(np.float32([1]))}),
]


@pytest.mark.parametrize("saved", CASES)
def test_statistics_survive_a_file_exactly(saved: Statistics, tmp_path: Path) -> None:
    save_statistics(saved, tmp_path / "s.npz")
    loaded = load_statistics(tmp_path / "s.npz")
    assert loaded == saved
    assert loaded.provenance == saved.provenance
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def test_equal_statistics_are_equal_bytes_whatever_the_order_of_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_statistics(statistics(1, a=[1], b=[2]), tmp_path / "a.npz")
    monkeypatch.setattr("time.time", lambda: 4e9)
    save_statistics(statistics(1, b=[2], a=[1]), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_numpy_reads_the_file_without_pickles(tmp_path: Path) -> None:
    save_statistics(statistics(1, a=[1, 2]), tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        assert arrays["counts"].sum() == 2
    assert header["data"] == [[0, "a"], [3, "b"]]


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No such file"):
        save_statistics(Statistics(), tmp_path / "gone" / "s.npz")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.npz"
    save_statistics(statistics(1, a=[1]), path)
    (tmp_path / f".s.npz.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"s.npz cannot be written: No space left on device; free space"):
        save_statistics(statistics(1, a=[2]), path)
    assert load_statistics(path) == statistics(1, a=[1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.npz"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "onnxq statistics 3"}, "has format 'onnxq statistics 3', expected 'onnxq statistics 5'"),
        ({"tensors": {"a": [[2, 1.0, 3.0, 2, 1]]}}, "does not hold calibration statistics"),
        ({"tensors": {"a": [[2, 5.0, 2.0, 2, 1]]}}, "does not hold calibration statistics"),
        ({"data": 7}, "does not hold calibration statistics"),
    ],
)
def test_a_header_that_is_not_ours_is_one_sentence(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_statistics(statistics(1, a=[1, 2]), path)
    with np.load(path) as arrays:
        content = {**arrays, "header": json.loads(arrays["header"].tobytes()) | change}
    np.savez(path, **(content | {"header": np.frombuffer(json.dumps(content["header"]).encode(), np.uint8)}))
    with pytest.raises(DataError, match=message):
        load_statistics(path)
