"""Samples that come once are kept in a folder."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, Sample
from onnxq.data.samples import from_files, from_rows, spool
from onnxq.data.sources import Parquet
from onnxq.errors import DataError

X = Input("x", np.dtype(np.float32), ("N", 1000))


def test_a_thousand_samples_take_no_memory(tmp_path: Path) -> None:
    def endless() -> Iterator[Sample]:
        while True:
            yield {"x": np.zeros((1, 1000), np.float32)}

    tracemalloc.start()
    parts = spool(from_rows(endless(), [X], None, "samples"), [X], tmp_path, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(parts) == 1000
    assert peak < 4_000_000 / 2


def test_samples_are_as_given_or_fitted() -> None:
    (given,) = from_rows([{"x": np.zeros(1000)}], [X], None, "samples", as_given=True)
    (fitted,) = from_rows([{"x": np.zeros(1000)}], [X], None, "samples")
    assert (given[1]["x"].shape, fitted[1]["x"].shape, fitted[1]["x"].dtype) == ((1000,), (1, 1000), np.float32)


def test_a_source_that_takes_no_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"holds no files that Parquet\(\) takes"):
        list(from_files(Parquet(), tmp_path, [X], ImageOptions(), None))
