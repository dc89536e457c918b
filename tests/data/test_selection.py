"""A selection is some of the samples, and reads no others."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from onnxq.data.dataset import Subset, reads_by_index, split
from onnxq.data.inputs import Input, Sample
from onnxq.data.samples import open_samples
from onnxq.errors import DataError


class Stream:
    """Samples that can only be read one after the other."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Sample]:
        return ({"x": np.array(index)} for index in (count() if self.endless else range(3)))

    endless = True


def test_a_stream_is_read_up_to_the_last_one_again_and_again() -> None:
    chosen = Subset(Stream(), (2, 3, 7))
    for _ in range(2):
        assert [int(sample["x"]) for sample in chosen] == [2, 3, 7]
    assert len(chosen) == 3


def test_a_stream_that_has_become_shorter_is_told() -> None:
    shorter = Stream()
    shorter.endless = False
    with pytest.raises(DataError, match="end before sample 7"):
        list(Subset(shorter, (2, 7)))


def test_a_selection_counts_its_own_samples() -> None:
    chosen = Subset([{"x": np.array(index)} for index in range(10)], (2, 3, 7, 9))
    assert [int(sample["x"]) for sample in chosen.read_samples([1, 3])] == [3, 9]
    assert (reads_by_index(chosen), reads_by_index(Subset(Stream(), (2, 3)))) == (True, False)


def test_a_selection_of_files_is_read_by_another_process(tmp_path: Path) -> None:
    inputs = [Input("x", np.dtype(np.float32), ("N", 2))]
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=np.full((3, 2), number, np.float32) + np.float32([[0], [0.25], [0.5]]))
    chosen = Subset(open_samples(tmp_path, inputs, batch=1), (1, 4, 5, 8))
    found = pickle.loads(pickle.dumps(chosen))
    assert found.stored
    assert [float(sample["x"].flat[0]) for sample in found.read_samples([0, 2, 3])] == [0.25, 1.5, 2.5]


def test_errors_name_samples_as_their_file_counts_them(tmp_path: Path) -> None:
    values = np.zeros((5, 2), np.float32)
    values[3] = np.nan
    np.savez(tmp_path / "a.npz", x=values)
    chosen = Subset(open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 2))]), (1, 3))
    with pytest.raises(DataError, match=r"a\.npz, sample 3: 'x' holds 2 NaN"):
        list(chosen.read_samples([0, 1]))


@pytest.mark.parametrize(("count", "judging"), [(1, 1), (7, 7), (8, 2), (16, 4), (63, 15), (400, 64)])
def test_every_fourth_sample_judges_and_nothing_else(count: int, judging: int) -> None:
    parts = split([{"x": np.array(index)} for index in range(count)])
    select, gate = ([int(sample["x"]) for sample in part] for part in parts)
    assert len(gate) == judging
    if count < 8:
        assert select == gate == list(range(count))
    else:
        assert sorted(select + gate) == list(range(count))


@pytest.mark.parametrize(("files", "rows", "judging"), [(8, 3, 2), (64, 8, 8), (64, 100, 8), (200, 2, 32)])
def test_what_shares_a_file_with_a_sample_that_judges_chooses_nothing(
    files: int, rows: int, judging: int, tmp_path: Path
) -> None:
    inputs = [Input("x", np.dtype(np.float32), ("N", 1))]
    for number in range(files):
        np.savez(tmp_path / f"{number}.npz", x=np.full((rows, 1), number, np.float32))
    parts = split(open_samples(tmp_path, inputs, batch=1))
    select, gate = ([int(sample["x"].item()) for sample in part] for part in parts)
    assert len(set(gate)) == judging
    assert len(gate) == min(judging * rows, 64)
    assert set(select) == set(range(files)).difference(gate)
    assert len(select) == rows * (files - judging)
