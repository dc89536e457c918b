"""Files of the user's that are replaced as a whole."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.ir.replacing import replacing, write_text


def test_a_text_takes_the_place_of_another_and_is_alone_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_text(path, "first\nsecond ä\n", "report")
    assert path.read_bytes() == "first\nsecond ä\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path, "report") as fresh:
            fresh.write_text("half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match=r"^report .*report\.json cannot be written: No space left on device; make"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_interrupted_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def write() -> None:
        with replacing(path, "report") as fresh:
            fresh.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to("there/report.json")
    write_text(tmp_path / "link.json", "new", "report")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "report.json").read_text() == "new"


@pytest.mark.parametrize("taken", ["folder", "/dev/null"])
def test_folders_and_devices_are_not_replaced(taken: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"^page .* cannot be written: it is no file; give another name"):
        write_text(tmp_path / taken, "new", "page")
    assert (tmp_path / taken).exists()
    assert not (tmp_path / taken).is_file()
