from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from data.single_inputs import SINGLE, firsts
from onnxq.data.dataset import picked
from onnxq.data.files import SampleFile
from onnxq.data.samples import Samples, open_samples
from onnxq.errors import DataError

COUNT = 12


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Return twelve samples that count from 0: stacks in several files and single ones between them."""
    folder, number = tmp_path_factory.mktemp("samples"), 0
    for name, count, save in (
        ("a", 3, np.savez),
        ("b", 1, np.savez),
        ("c", 1, np.savez),
        ("d", 5, np.savez_compressed),
    ):
        save(folder / f"{name}.npz", x=rows(number, count))
        number += count
    np.save(folder / "e.npy", np.asfortranarray(rows(number, 2)))
    return open_samples(folder, SINGLE)


def rows(first: int, count: int) -> np.ndarray:
    return np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], 2, 1)


@given(indices=some.sets(some.integers(0, COUNT - 1)).map(sorted))
def test_any_samples_are_picked_from_files_and_lists(indices: list[int], stored: Samples) -> None:
    assert len(stored) == COUNT
    assert firsts(picked(stored, indices)) == indices
    assert firsts(picked(list(stored), indices)) == indices
    assert firsts(picked(iter(stored), indices)) == indices
    assert [firsts(iter([stored[index]])) for index in indices] == [[index] for index in indices]


def test_only_what_is_picked_is_read(tmp_path: Path) -> None:
    for number in range(4):
        np.savez(tmp_path / f"{number}.npz", x=rows(number, 1))
    samples = open_samples(tmp_path, SINGLE)
    for number in (0, 3):
        (tmp_path / f"{number}.npz").write_bytes(b"damaged")
    assert firsts(picked(samples, [1, 2])) == [1, 2]
    with pytest.raises(DataError, match=r"3.npz"):
        samples[3]
    with pytest.raises(IndexError):
        samples[4]


def test_a_stream_is_read_no_further_than_needed() -> None:
    read = []

    def stream() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    assert list(picked(stream(), [1, 4])) == [1, 4]
    assert read == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="The samples end before sample 100, expected it"):
        list(picked(stream(), [99, 100]))


def test_a_file_that_has_become_shorter_is_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(0, 5))
    samples = open_samples(tmp_path, SINGLE)
    np.savez(tmp_path / "a.npz", x=rows(0, 3))
    with pytest.raises(DataError, match=r"a\.npz"):
        list(samples)
    short = SampleFile("samples", "samples", 5, lambda positions: iter([{"x": np.zeros((1, 2), np.float32)}] * 3))
    with pytest.raises(DataError, match="samples lacks sample 3, which it had when opened"):
        list(short.checked(range(5), SINGLE))
