"""Samples are traced back to their numbers and files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from onnxq.data.dataset import Origin, Subset, TraceableSamples, origin_of, ranges_of, split
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples

INPUTS = (Input("x", np.dtype(np.float32), ("batch", 2)),)


def sample(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 2), value, np.float32)}


def test_the_samples_that_judge_are_traced_through_every_selection() -> None:
    given = open_samples([sample(index) for index in range(40)], INPUTS)
    _, judging = split(Subset(given, range(40)))
    places = [origin_of(judging, index).place for index in range(len(judging))]
    assert places[8] == 35
    # Each number is that of the sample itself.
    assert places == [int(one["x"][0, 0]) for one in judging]
    assert isinstance(judging, TraceableSamples)


def test_a_limit_leaves_the_numbers_as_they_were_given() -> None:
    given = open_samples([sample(index) for index in range(10)], INPUTS, limit=4)
    assert [origin_of(given, index) for index in range(4)] == [Origin(0), Origin(3), Origin(6), Origin(9)]


def test_samples_name_the_file_that_holds_them(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", sample(0)["x"])
    np.savez(tmp_path / "b.npz", x=np.concatenate([sample(index)["x"] for index in (1, 2, 3)]))
    np.save(tmp_path / "c.npy", sample(4)["x"])
    given = open_samples(tmp_path, INPUTS, batch=1)
    files = [tmp_path / name for name in ("a.npy", "b.npz", "b.npz", "b.npz", "c.npy")]
    assert [origin_of(given, index) for index in range(5)] == [
        Origin(place, str(file)) for place, file in enumerate(files)
    ]


def test_samples_that_a_source_reads_name_its_files(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name in ("a.csv", "b.csv"):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([["x"], ["1"], ["2"]])
    given = open_samples(tmp_path, (Input("x", np.dtype(np.float32), ("batch",)),))
    assert [Path(origin_of(given, index).file).name for index in range(len(given))] == ["a.csv"] * 2 + ["b.csv"] * 2


def test_samples_from_memory_have_no_file() -> None:
    assert origin_of([sample(0), sample(1)], 1) == Origin(1)
    spooled = open_samples((sample(index) for index in range(3)), INPUTS)
    assert origin_of(spooled, 2) == Origin(2)


def test_runs_of_numbers_are_told_by_their_ends() -> None:
    assert ranges_of([]) == ()
    assert ranges_of([3, 5, 6, 7, 9]) == ((3, 3), (5, 7), (9, 9))
