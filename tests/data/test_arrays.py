from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from onnxq.data.arrays import npy_array, npz_arrays, read_tensor
from onnxq.errors import DataError

ARRAYS = [
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    np.arange(4, dtype=">f4").reshape(4, 1),
    np.zeros((3, 0), np.float16),
    np.array(["a", "bc"]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_npy_arrays_are_read_whole_and_by_row(array: NDArray[np.generic], tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    stored = npy_array(path)
    assert (stored.shape, stored.dtype) == (array.shape, array.dtype.newbyteorder("="))
    assert np.array_equal(stored.read(), array)
    assert [row.tolist() for row in stored.rows(range(len(array)))] == array.tolist()
    assert [row.tolist() for row in stored.rows([len(array) - 1])] == array[-1:].tolist()
    assert stored.read().dtype.isnative


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_archives_give_their_arrays_by_key(save: object, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, **{"x": np.float32([1, 2]), "scope/y:0": np.int64(7)})  # type: ignore[operator]
    stored = npz_arrays(path)
    assert {key: value.read().tolist() for key, value in stored.items()} == {"x": [1, 2], "scope/y:0": 7}


def test_rows_hold_one_row_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((100, 10), np.float32))
    monkeypatch.setattr("onnxq.data.arrays.ARRAY_LIMIT", 40)
    assert len(list(npy_array(path).rows(range(100)))) == 100
    with pytest.raises(DataError, match="declares 4000 bytes, expected at most 40"):
        npy_array(path).read()


def test_a_test_data_tensor_gives_name_and_values(tmp_path: Path) -> None:
    path = tmp_path / "input_0.pb"
    path.write_bytes(numpy_helper.from_array(np.float32([[1, 2]]), "x").SerializeToString())
    name, array = read_tensor(path)
    assert (name, array.tolist()) == ("x", [[1, 2]])


def test_a_newer_npy_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(1), version=(3, 0))
    path.write_bytes(stream.getvalue())
    with pytest.raises(DataError, match=r"is .npy version \(3, 0\)"):
        npy_array(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_of_an_archive_are_picked(save: Callable[..., None], tmp_path: Path) -> None:
    array = np.arange(200_000, dtype=np.float32).reshape(100, 2000)
    save(tmp_path / "a.npz", x=array)
    picked = npz_arrays(tmp_path / "a.npz")["x"].rows([0, 7, 99])
    assert [row[0] for row in picked] == [0, 14_000, 198_000]
