"""Cores, deadlines, progress and caches of files and arrays."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS

from onnxq.calibration.data import Data
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.system import resources
from onnxq.system.resources import (
    NEVER,
    Deadline,
    available_cores,
    cached_by_array,
    cached_by_mtime,
    parallel_map,
)


def test_cores_are_counted_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3, 4}, raising=False)
    assert available_cores() == 3


@pytest.mark.parametrize(("counted", "cores"), [(8, 8), (None, 1)])
def test_all_cores_count_where_the_system_tells_no_more(
    counted: int | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert available_cores() == cores


def test_as_many_threads_work_as_there_are_cores_and_results_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.system.resources.available_cores", lambda: 2)
    both = threading.Barrier(2, timeout=10)

    def work(given: int) -> int:
        # Alone it would wait for ever.
        both.wait()
        return -given

    assert list(parallel_map(work, [3, 1, 2, 0])) == [-3, -1, -2, 0]


def test_no_more_arguments_are_taken_than_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.system.resources.available_cores", lambda: 2)
    taken = []

    def given() -> Iterator[int]:
        for one in range(100):
            taken.append(one)
            yield one

    found = parallel_map(abs, given())
    assert (next(found), taken) == (0, [0, 1, 2])


def test_an_error_of_the_function_is_raised_in_its_place() -> None:
    found = parallel_map(lambda one: 1 // one, [1, 0, 1])
    assert next(found) == 1
    with pytest.raises(ZeroDivisionError):
        next(found)


# Deadlines


def test_a_part_of_a_deadline_is_of_the_seconds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(resources.time, "monotonic", lambda: now[0])
    whole = Deadline.within(10.0)
    part = whole.part(1 / 2)
    assert (whole.left, part.left) == (10.0, 5.0)
    now[0] += 7
    assert (whole.left, part.left, whole.part(1 / 3).left) == (3.0, 0.0, 1.0)


def test_parts_of_no_limit_are_no_limit() -> None:
    assert NEVER.left == NEVER.part(1 / 3).left == math.inf
    assert Deadline.within(math.inf) == NEVER


def test_every_stage_is_seen_and_counts_to_its_end() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    quantize(
        MODELS / "resnet.onnx",
        Data(MODELS / "data" / "calib.npz", limit=4),
        budget=Budget(
            latency_seconds=0, progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total))
        ),
    )
    assert seen["calibrate"] == sorted(set(seen["calibrate"]))
    assert seen["calibrate"][-1] == (4, 4)
    assert {"calibrate", "search", "verify"} <= seen.keys()


# Caches


def test_a_file_is_read_again_after_it_changed(tmp_path: Path) -> None:
    read: list[str] = []

    @cached_by_mtime
    def content(path: Path) -> str:
        read.append(path.read_text())
        return read[-1]

    file = tmp_path / "a"
    file.write_text("one")
    assert [content(file), content(file)] == ["one", "one"]
    file.write_text("three")
    os.utime(file, ns=(1, 1))
    assert content(file) == "three"
    file.write_text("THREE")
    os.utime(file, ns=(2, 2))
    assert content(file) == "THREE"
    assert read == ["one", "three", "THREE"]


def test_a_missing_file_is_looked_for_again(tmp_path: Path) -> None:
    content = cached_by_mtime(Path.read_text)
    with pytest.raises(FileNotFoundError):
        content(tmp_path / "a")
    (tmp_path / "a").write_text("there")
    assert content(tmp_path / "a") == "there"


def test_an_array_is_computed_once_as_long_as_it_lives() -> None:
    seen: list[float] = []

    @cached_by_array
    def total(array: np.ndarray) -> float:
        seen.append(float(array.sum()))
        return seen[-1]

    ones, twos = np.ones(3), np.full(3, 2.0)
    assert [total(ones), total(twos), total(ones)] == [3.0, 6.0, 3.0]
    # Arrays that come and go lie in the same place in memory.
    assert [total(np.full(3, float(value))) for value in range(9)] == [3.0 * value for value in range(9)]
    assert len(seen) == 11
