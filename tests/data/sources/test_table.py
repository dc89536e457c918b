"""Sources are named with their options, and packages add some."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.data.sources import SOURCES, Audio, Source, find_source, source_for
from onnxq.errors import DataError, OnnxqError


class Lines:
    """A package's: each line of a ``.lines`` file is two numbers."""

    def takes(self, given: object) -> bool:
        return isinstance(given, Path) and given.suffix == ".lines"

    def rows(self, given: Path, inputs: object, images: object) -> list[np.ndarray]:  # type: ignore[type-arg]
        return [np.array(line.split(), np.float32) for line in given.read_text().splitlines()]


def test_each_of_ours_is_made_from_its_name() -> None:
    for name, made in SOURCES.items():
        source = find_source(name)
        assert isinstance(source, made)
        assert isinstance(source, Source)
    assert find_source("audio:rate=8000:seconds=0.5") == Audio(8000, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adio", r"source 'adio' is not one of audio, .*did you mean 'audio'"),
        (
            "audio:rat=8",
            r"source 'audio' has no option 'rat=8', expected rate=VALUE, seconds=VALUE.*did you mean 'rate'",
        ),
        ("audio:rate=x", r"option 'rate' of source 'audio' is 'x', expected int"),
        ("tar:x=1", r"source 'tar' has no option 'x=1', expected none"),
    ],
)
def test_what_is_not_there_is_told(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_source(text)


def test_a_package_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("lines", f"{__name__}:Lines", "onnxq.sources")
    monkeypatch.setattr(
        "onnxq.system.plugins.entry_points", lambda **wanted: [entry] * (wanted["group"] == entry.group)
    )
    (tmp_path / "a.lines").write_text("0 1\n2 3\n")
    samples = open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 2))])
    assert [sample["x"].tolist() for sample in samples] == [[[0, 1]], [[2, 3]]]
    monkeypatch.undo()
    assert source_for(tmp_path / "a.lines") is None


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("rows", lambda *given: 1 / 0, r"a\.lines: source Lines failed: ZeroDivisionError"),
        ("rows", lambda *given: (1 / 0 for _ in range(3)), r"a\.lines: source Lines failed: ZeroDivisionError"),
        ("rows", lambda *given: None, r"a\.lines: source Lines failed: TypeError: 'NoneType'"),
        ("takes", lambda *given: 1 / 0, "source Lines failed: ZeroDivisionError"),
        ("rows", lambda *given: [np.zeros(5)], r"a\.lines, sample 0: 'x' has shape \[1, 5\]"),
        ("__init__", lambda *given: 1 / 0, "source 'lines' failed: ZeroDivisionError"),
        ("__new__", lambda *given: None, "source 'lines' failed: TypeError: it is None, which has no takes and rows"),
    ],
)
def test_a_source_of_a_package_that_fails_is_told(
    method: str, given: Callable[..., Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("lines", f"{__name__}:Lines", "onnxq.sources")
    monkeypatch.setattr(
        "onnxq.system.plugins.entry_points", lambda **wanted: [entry] * (wanted["group"] == entry.group)
    )
    monkeypatch.setattr(Lines, method, given)
    (tmp_path / "a.lines").write_text("0 1\n2 3\n")
    with pytest.raises(OnnxqError, match=message):
        open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 2))], source="lines")


def test_a_source_that_fails_when_it_is_asked_for_any_samples_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("lines", f"{__name__}:Lines", "onnxq.sources")
    monkeypatch.setattr(
        "onnxq.system.plugins.entry_points", lambda **wanted: [entry] * (wanted["group"] == entry.group)
    )
    monkeypatch.setattr(Lines, "takes", lambda *given: 1 / 0)
    with pytest.raises(DataError, match=r"source Lines failed: ZeroDivisionError: .*; correct it, or do without it"):
        source_for(tmp_path / "a.npz")
