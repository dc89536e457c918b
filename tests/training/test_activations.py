"""Activations of samples, in memory and in files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxq.errors import OutputError
from onnxq.training import activations as module
from onnxq.training.activations import Activations

ARRAYS = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(5, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "flags": np.array([True, False]),
}


@pytest.mark.parametrize("memory", [0, 20, 1 << 20])
def test_stored_arrays_are_there(memory: int, tmp_path: Path) -> None:
    with Activations(memory, tmp_path) as held:
        held.put(0, ARRAYS)
        held.put(3, {"floats": ARRAYS["floats"] + 1})
        found = held.of(0)
        assert {name: (a.dtype, a.shape, a.tolist()) for name, a in found.items()} == {
            name: (a.dtype, a.shape, a.tolist()) for name, a in ARRAYS.items()
        }
        assert held.of(3)["floats"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert set(held.of(0, ["scalar", "unknown"])) == {"scalar"}
        assert held.of(1) == {}
    assert list(tmp_path.iterdir()) == []


def test_only_arrays_without_room_in_memory_are_written(tmp_path: Path) -> None:
    def files() -> int:
        return len(list(tmp_path.glob("*/*.npy")))

    with Activations(100, tmp_path) as held:
        for sample in range(4):
            held.put(sample, {"a": np.full(10, sample, np.float32)})
        assert files() == 2
        held.put(0, {"a": np.zeros(10, np.float32)})
        assert files() == 2
        held.put(2, {"a": np.zeros(10, np.float32)})
        assert files() == 2
        held.keep({"b"})
        assert files() == 0
        held.put(0, {"b": np.zeros(25, np.float32)})
        assert files() == 0


def test_only_kept_tensors_stay(tmp_path: Path) -> None:
    with Activations(0, tmp_path) as held:
        for sample in range(2):
            held.put(sample, {name: np.ones(1) for name in "abc"})
        held.keep({"b", "d"})
        assert [set(held.of(sample)) for sample in range(2)] == [{"b"}, {"b"}]
        assert len(list(tmp_path.glob("*/*.npy"))) == 2


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "save", full)
    with Activations(0, tmp_path) as held, pytest.raises(OutputError, match="No space left on device; free disk space"):
        held.put(0, ARRAYS)


def test_files_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys, numpy, pathlib; from onnxq.training.activations import Activations; "
        "held = Activations(0, pathlib.Path(sys.argv[1])); held.put(0, {'a': numpy.ones(3)}); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    with Activations(0, tmp_path) as held:
        held.put(0, {"a": np.ones(3)})
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
