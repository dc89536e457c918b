"""Data sets of Hugging Face are told by what they have, and only what is wanted of them is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples

X = Input("x", np.dtype(np.float32), ("N", 2))


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
