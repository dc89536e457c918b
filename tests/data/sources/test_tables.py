"""DataFrames and Parquet files give their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.data.sources import _cell
from onnxq.errors import DataError

pandas = pytest.importorskip("pandas")
X = Input("x", np.dtype(np.float32), ("N", 2))
NAMED = pytest.param({"x": [[float(row), 1.0] for row in range(9)], "label": [0] * 9}, id="a column of lists")
NUMBERS = pytest.param({"a": np.arange(9.0), "b": np.ones(9)}, id="columns of numbers")


@pytest.mark.parametrize("columns", [NAMED, NUMBERS])
@pytest.mark.parametrize("stored", [False, True], ids=["frame", "parquet"])
def test_rows_are_samples_and_a_limit_spreads_over_them(
    columns: dict[str, object], stored: bool, tmp_path: Path
) -> None:
    given = frame = pandas.DataFrame(columns)
    if stored:
        pytest.importorskip("pyarrow")
        frame.to_parquet(given := tmp_path / "a.parquet")
    for limit, firsts in ((None, list(range(9))), (3, [0, 4, 8])):
        samples = open_samples(given, [X], limit=limit)
        assert [sample["x"].tolist() for sample in samples] == [[[float(first), 1.0]] for first in firsts]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], id="lists of lists of lists"),
        pytest.param([1.0, 2.0, 3.0], id="a list"),
        pytest.param([[1.0, 2.0], [3.0]], id="lists of several lengths"),
        pytest.param([[1.0], None], id="a list that is missing"),
        pytest.param([], id="nothing"),
        pytest.param([[], []], id="lists of nothing"),
        pytest.param(2.5, id="a number"),
        pytest.param("text", id="a text"),
        pytest.param(None, id="nothing at all"),
    ],
)
def test_cells_of_parquet_are_what_was_written(cell: object) -> None:
    arrow = pytest.importorskip("pyarrow")
    found = _cell(arrow.array([cell])[0])
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == cell


def test_what_is_no_parquet_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR0")
    with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet"):
        open_samples(tmp_path, [X])
