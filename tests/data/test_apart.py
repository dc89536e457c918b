"""Samples of one file stay together, where there are files enough."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as some

from onnxq.data.dataset import Origin, Subset, group_by_file, halves, list_shared_files
from onnxq.data.inputs import Input, Sample
from onnxq.data.samples import Samples, open_samples

INPUTS = (Input("x", np.dtype(np.float32), ("N", 2)),)


class Filed(list[Sample]):
    """Samples of files with so many each."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__({"x": np.array(place)} for place in range(sum(counts)))
        self.files = [file for file, count in enumerate(counts) for _ in range(count)]

    def origin(self, index: int) -> Origin:
        return Origin(index, f"file{self.files[index]}")


def stacks(folder: Path, counts: list[int]) -> Samples:
    for file, count in enumerate(counts):
        np.savez(folder / f"{file}.npz", x=np.arange(count * 2, dtype=np.float32).reshape(count, 2))
    return open_samples(folder, INPUTS, batch=1)


def test_rows_of_a_stack_share_their_file_wherever_some_are_selected(tmp_path: Path) -> None:
    samples = stacks(tmp_path, [3] * 8)
    assert group_by_file(samples) == [list(range(first, first + 3)) for first in range(0, 24, 3)]
    assert group_by_file(Subset(samples, range(1, 24))) == [
        [0, 1],
        *([first, first + 1, first + 2] for first in range(2, 23, 3)),
    ]


@pytest.mark.parametrize("counts", [[24], [12] * 7, [1] * 24, [30, *[3] * 20]])
def test_samples_stand_for_themselves_where_files_tell_no_parts_apart(tmp_path: Path, counts: list[int]) -> None:
    assert group_by_file(stacks(tmp_path, counts)) == [[place] for place in range(sum(counts))]


def test_samples_share_files_where_these_can_be_told_apart_among_all_there_are(tmp_path: Path) -> None:
    samples = stacks(tmp_path, [3] * 8)
    assert [Path(file).stem for file in list_shared_files(samples)] == [
        f"{file}" for file in range(8) for _ in range(3)
    ]
    # The few that judge are of few files, but not of too few.
    few = list_shared_files(Subset(Subset(samples, range(6, 12)), [0, 1, 2, 4]))
    assert [file and Path(file).stem for file in few] == ["2", "2", "2", ""]
    assert list_shared_files(Subset(samples, range(0, 24, 3))) == ()


@pytest.mark.parametrize("counts", [[12] * 7, [1] * 24, [30, *[3] * 20]])
def test_samples_count_by_themselves_where_files_tell_no_parts_apart(tmp_path: Path, counts: list[int]) -> None:
    assert list_shared_files(stacks(tmp_path, counts)) == ()


def test_single_files_of_one_folder_share_nothing(tmp_path: Path) -> None:
    for file in range(9):
        np.savez(tmp_path / f"{file}.npz", x=np.full((1, 2), file, np.float32))
    assert list(map(len, group_by_file(open_samples(tmp_path, INPUTS)))) == [1] * 9


def test_windows_of_a_recording_share_it(tmp_path: Path) -> None:
    for file in range(8):
        soundfile.write(tmp_path / f"{file}.wav", np.zeros(800, np.float32), 16_000)
    samples = open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 400))])
    assert group_by_file(samples) == [[first, first + 1] for first in range(0, 16, 2)]


@given(some.lists(some.integers(1, 9), min_size=1, max_size=40), some.integers(2, 64))
def test_halves_share_no_file_and_are_as_many_as_wanted(counts: list[int], count: int) -> None:
    samples = Filed(counts)
    one, other = halves(samples, count)
    assert len({*one, *other}) == len(one) + len(other) == min(count, len(samples))
    assert (one, other) == (sorted(one), sorted(other))
    for origin in group_by_file(samples):
        assert set(one).isdisjoint(origin) or set(other).isdisjoint(origin)


def test_halves_leave_files_to_others_and_are_alike_in_size() -> None:
    samples = Filed([8] * 64)
    one, other = halves(samples, 16)
    assert (len(one), len(other)) == (8, 8)
    assert len({place // 8 for place in chain(one, other)}) == 16
