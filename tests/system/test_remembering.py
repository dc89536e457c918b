"""A file is read again when it has changed, and an array looked at again when it is another one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from onnxq.system.remembering import remembered, remembered_of_array


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    read: list[str] = []

    @remembered
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


def test_what_was_not_there_is_asked_for_again(tmp_path: Path) -> None:
    content = remembered(Path.read_text)
    with pytest.raises(FileNotFoundError):
        content(tmp_path / "a")
    (tmp_path / "a").write_text("there")
    assert content(tmp_path / "a") == "there"


def test_an_array_is_looked_at_once_as_long_as_it_lives() -> None:
    seen: list[float] = []

    @remembered_of_array
    def total(array: np.ndarray) -> float:
        seen.append(float(array.sum()))
        return seen[-1]

    ones, twos = np.ones(3), np.full(3, 2.0)
    assert [total(ones), total(twos), total(ones)] == [3.0, 6.0, 3.0]
    # Arrays that come and go lie in the same place in memory.
    assert [total(np.full(3, float(value))) for value in range(9)] == [3.0 * value for value in range(9)]
    assert len(seen) == 11
