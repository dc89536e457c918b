"""A file is read again when it has changed, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onnxq.remembering import remembered


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
