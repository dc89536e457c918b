"""Data sets of other libraries: each is recognized, and only what is wanted is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader

from onnxq.calibration.data import Data
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.data.sources import REMOVED
from onnxq.errors import DataError

X = Input("x", np.dtype(np.float32), ("N", 2))


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """As onnxruntime's examples write it, which cannot be rewound."""

    def __init__(self) -> None:
        self.feeds = iter({"x": np.full((1, 2), number, np.float32)} for number in range(5))

    def get_next(self) -> dict[str, Any] | None:
        return next(self.feeds, None)


class Rewindable(Reader):
    """One that is at its end, and can start again."""

    def __init__(self) -> None:
        self.feeds = iter([])

    def rewind(self) -> None:
        super().__init__()


def test_its_feeds_are_samples() -> None:
    for given in (Reader(), Rewindable()):
        samples = open_samples(Data(given).calibration, [X])
        assert [sample["x"].tolist() for sample in samples] == [[[number, number]] for number in range(5)]


def rows() -> list[dict[str, Any]]:
    return [{"x": np.full(2, number, np.float32), "label": number} for number in range(5)]


class Columns:
    """What `datasets.Dataset` has."""

    column_names = ("x", "label")

    def __init__(self, kept: tuple[str, ...] = column_names) -> None:
        self.kept = kept

    def select_columns(self, columns: list[str]) -> Columns:
        return Columns(tuple(columns))

    def with_format(self, kind: str) -> Columns:
        assert kind == "numpy"
        return self

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {name: rows()[place][name] for name in self.kept}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(5))


def test_its_rows_are_samples() -> None:
    samples = open_samples(Columns(), [X])
    assert [sample["x"].tolist() for sample in samples] == [[[number, number]] for number in range(5)]


def test_of_a_data_set_no_more_is_read_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(Columns, "__getitem__", lambda _, place: read.append(place) or rows()[place])
    samples = open_samples(Columns(), [X], limit=3)
    assert [sample["x"].tolist() for sample in samples] == [[[place, place]] for place in (0, 2, 4)]
    assert set(read) == {0, 2, 4}


def test_hugging_faces_own_data_set() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"x": [[float(number)] * 2 for number in range(5)], "label": list(range(5))})
    for given in (made, made.to_iterable_dataset()):
        assert [sample["x"][0, 0] for sample in open_samples(given, [X])] == list(range(5))


class Frame:
    """What `pandas.DataFrame` has."""

    columns, iloc = ("x",), None

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def test_a_frame_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(DataError, match=r"a Frame is no longer read, .*; give the rows of the frame"):
        open_samples(Frame(), [X])


@pytest.mark.parametrize(
    ("name", "instead"), [("a.parquet", "datasets.Dataset"), ("a.tar", "webdataset's"), ("a.tar.gz", "webdataset's")]
)
def test_files_of_removed_sources_are_refused_with_what_to_give_instead(
    name: str, instead: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"")
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=f"{name} is no longer read, expected files or an iterable; .*{instead}"):
            open_samples(given, [X])


@pytest.mark.parametrize("name", REMOVED)
def test_names_of_removed_sources_are_refused_with_what_to_give_instead(name: str) -> None:
    with pytest.raises(DataError, match=f"source '{name}' was removed, expected an object; give "):
        Data("calib", source=name)
