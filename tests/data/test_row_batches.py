"""With how many rows a model is run: those of each file, single ones of a data set, or as many as are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from data.single_inputs import FLOAT, PAIR, SINGLE, X, dicts, rows
from onnxq.calibration.data import Data
from onnxq.data import files
from onnxq.data.dataset import origin_of
from onnxq.data.inputs import Sample
from onnxq.data.samples import Input, Samples, in_batches, open_samples
from onnxq.errors import DataError, SchemeError


def shapes(samples: Samples) -> list[int]:
    return [len(sample["x"]) for sample in samples]


def values(samples: Samples) -> list[float]:
    return [float(value) for sample in samples for value in sample["x"][:, 0]]


def stacks(folder: Path, counts: list[int]) -> Path:
    start = 0
    for number, count in enumerate(counts):
        np.savez(folder / f"{number}.npz", x=rows(start + count)[start:])
        start += count
    return folder


@pytest.mark.parametrize("counts", [[5, 5, 5], [1024, 3, 1], [2, 2]])
def test_several_files_are_run_with_the_rows_that_they_have(counts: list[int], tmp_path: Path) -> None:
    samples = open_samples(stacks(tmp_path, counts), (X,))
    assert shapes(samples) == counts
    assert values(samples) == [2.0 * row for row in range(sum(counts))]


def test_a_single_file_is_a_data_set_of_rows(tmp_path: Path) -> None:
    assert shapes(open_samples(stacks(tmp_path, [5]), (X,))) == [1] * 5
    assert shapes(open_samples(tmp_path / "0.npz", (X,))) == [1] * 5


def test_a_model_of_a_fixed_batch_of_one_is_run_with_single_rows(tmp_path: Path) -> None:
    assert shapes(open_samples(stacks(tmp_path, [3, 2]), SINGLE)) == [1] * 5


def test_an_axis_more_counts_samples_in_several_files_too(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", rows(6).reshape(2, 3, 2))
    assert shapes(open_samples(tmp_path, (X,))) == [3] * 4


def test_a_large_file_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BATCH", 5 * 2 * 4)
    assert shapes(open_samples(stacks(tmp_path, [5, 6]), (X,))) == [5, *[1] * 6]


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 11, 100])
@pytest.mark.parametrize("counts", [[11], [4, 4, 3], [1] * 11, [5, 1, 5]])
def test_rows_are_taken_as_many_at_a_time_as_is_asked_for(batch: int, counts: list[int], tmp_path: Path) -> None:
    samples = open_samples(stacks(tmp_path, counts), (X,), batch=batch)
    assert shapes(samples) == [len(range(start, min(start + batch, 11))) for start in range(0, 11, batch)]
    assert values(samples) == [2.0 * row for row in range(11)]
    starts = np.repeat(range(len(counts)), counts)[::batch]
    assert [int(Path(origin_of(samples, place).file).stem) for place in range(len(samples))] == starts.tolist()
    last = samples[len(samples) - 1]["x"]
    assert float(last[0, 0]) == 2.0 * (len(samples) - 1) * batch


def test_rows_are_taken_together_from_objects_and_other_files(tmp_path: Path) -> None:
    assert shapes(open_samples(dicts(5), (X,), batch=2)) == [2, 2, 1]
    assert shapes(open_samples(({"x": rows(4)} for _ in range(3)), (X,), batch=5)) == [5, 5, 2]
    assert shapes(open_samples(stacks(tmp_path, [1] * 6), (X,), batch=2, limit=2)) == [2, 2]


def test_another_process_reads_the_same_batches(tmp_path: Path) -> None:
    samples = pickle.loads(pickle.dumps(open_samples(stacks(tmp_path, [4, 4]), (X,), batch=5)))
    assert samples.stored
    assert [len(sample["x"]) for sample in samples.read_samples([0, 1])] == [5, 3]


def test_a_fixed_batch_is_never_run_with_fewer_rows(tmp_path: Path) -> None:
    four = (Input("x", FLOAT, (4, 2)),)
    assert shapes(open_samples(stacks(tmp_path, [7, 6]), four, batch=4)) == [4, 4, 4]
    with pytest.raises(DataError, match=r"input 'x' float32\[4, 2\] cannot be run with 8 rows, expected an open"):
        open_samples(tmp_path, four, batch=8)


def test_inputs_without_rows_refuse_a_batch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input 'n' int64\[\] cannot be run with 2 rows"):
        open_samples(stacks(tmp_path, [4]), PAIR, batch=2)


def test_rows_of_different_shapes_refuse_a_batch(tmp_path: Path) -> None:
    for number in (2, 3):
        np.save(tmp_path / f"{number}.npy", np.zeros((1, number), np.float32))
    inputs = (Input("x", FLOAT, ("batch", "length")),)
    assert len(list(open_samples(tmp_path, inputs, batch=1))) == 2
    with pytest.raises(DataError, match=r"rows of 'x' have shapes \[1, 2\] and \[1, 3\]"):
        list(open_samples(tmp_path, inputs, batch=2))


def test_a_chain_runs_one_row_after_the_other() -> None:
    assert Data("samples", chain="stateN=state").rows == 1
    assert Data("samples").rows is None
    assert Data("samples", batch=8).rows == 8
    with pytest.raises(SchemeError, match=r"the batch is 8 and inputs are chained, expected 1"):
        Data("samples", chain="stateN=state", batch=8)
    with pytest.raises(SchemeError, match=r"the batch is 0, expected 1 row or more"):
        Data("samples", batch=0)


def test_many_small_files_are_batched_in_one_pass() -> None:
    looks = 0

    class Row(files.SampleFile):
        def __getattribute__(self, name: str) -> object:
            nonlocal looks
            looks += name == "count"
            return super().__getattribute__(name)

    def read(positions: Sequence[int]) -> Iterator[Sample]:
        return ({"x": np.zeros((1, 2), np.float32)} for _ in positions)

    number = 1000
    parts = in_batches([Row("row", "row", 1, read) for _ in range(number)], SINGLE, number // 2)
    assert [part.count for part in parts] == [1, 1]
    assert [len(sample["x"]) for part in parts for sample in part.read([0])] == [number // 2] * 2
    assert looks < 20 * number
