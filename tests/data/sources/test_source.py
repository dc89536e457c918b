"""What sources share: suffixes, and libraries that may not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxq.data.sources import has_suffix, library
from onnxq.data.stores import StorePath
from onnxq.errors import DataError


def test_files_are_told_by_their_names_wherever_they_lie() -> None:
    assert [has_suffix(one, ".wav") for one in (Path("a.WAV"), StorePath("s3://b/a.wav"), "a.wav")] == [
        True,
        True,
        False,
    ]


def test_a_library_that_is_not_there_is_told_with_what_installs_it() -> None:
    with pytest.raises(
        DataError, match=r"a.x needs no_such, expected it to be installed; run pip install 'onnxq\[x\]'"
    ):
        library("no_such.part", "onnxq[x]", "a.x")
