"""Files of samples, and where they end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from onnxq.data.samples import Input, open_samples
from onnxq.errors import DataError

FLOAT = np.dtype(np.float32)
SINGLE = (Input("x", FLOAT, (1, 2)),)
PAIR = (Input("x", FLOAT, (2,)), Input("y", FLOAT, (2,)))


def value(number: float) -> np.ndarray:
    return np.full((1, 2), number, np.float32)


def firsts(path: Path) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in open_samples(path, SINGLE)]


def write_tensor(path: Path, number: float, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(numpy_helper.from_array(np.full(2, number, np.float32), name).SerializeToString())


def test_files_are_read_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 1, 100):
        np.savez(tmp_path / f"s{number}.npz", x=value(number))
    assert firsts(tmp_path) == [1, 9, 10, 100]


def test_folders_nest_and_mix(tmp_path: Path) -> None:
    (tmp_path / "b" / "calib").mkdir(parents=True)
    np.save(tmp_path / "a.npy", value(1))
    np.savez(tmp_path / "b" / "calib" / "0.npz", x=value(2))
    np.savez(tmp_path / "c.NPZ.npz", x=np.concatenate([value(3), value(4)]))
    (tmp_path / "labels.json").write_text("{}")
    (tmp_path / ".hidden.npz").write_bytes(b"")
    assert firsts(tmp_path) == [1, 2, 3, 4]


def test_a_link_to_a_parent_does_not_repeat_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", x=value(1))
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert firsts(tmp_path) == [1]


def test_test_data_folders_are_samples_by_position(tmp_path: Path) -> None:
    for number in (0, 1, 10, 2):
        write_tensor(tmp_path / f"test_data_set_{number}" / "input_0.pb", number)
        write_tensor(tmp_path / f"test_data_set_{number}" / "input_1.pb", -number)
        write_tensor(tmp_path / f"test_data_set_{number}" / "output_0.pb", 99)
    samples = list(open_samples(tmp_path, PAIR))
    assert [(sample["x"][0], sample["y"][0]) for sample in samples] == [(0, 0), (1, -1), (2, -2), (10, -10)]


def test_test_data_tensors_are_matched_by_name_where_all_names_fit(tmp_path: Path) -> None:
    write_tensor(tmp_path / "input_0.pb", 5, "y")
    write_tensor(tmp_path / "input_1.pb", 7, "x")
    (sample,) = open_samples(tmp_path, PAIR)
    assert (sample["x"][0], sample["y"][0]) == (7, 5)


def test_test_data_with_a_missing_input_is_an_error(tmp_path: Path) -> None:
    write_tensor(tmp_path / "input_0.pb", 5)
    with pytest.raises(DataError, match=r"input 'y' .* is missing"):
        list(open_samples(tmp_path, PAIR))


def test_test_data_with_an_extra_input_is_an_error(tmp_path: Path) -> None:
    for index in range(3):
        write_tensor(tmp_path / f"input_{index}.pb", index)
    with pytest.raises(DataError, match=r"input_2.pb is one input too many, expected 2"):
        list(open_samples(tmp_path, PAIR))


def test_a_folder_with_one_file_per_input_is_a_sample(tmp_path: Path) -> None:
    for number in (10, 9):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        np.save(folder / "x.npy", np.full(2, number, np.float32))
        np.save(folder / "y.npy", np.zeros(2, np.float32))
    assert [sample["x"][0] for sample in open_samples(tmp_path, PAIR)] == [9, 10]


def test_a_file_that_stands_for_no_input_gets_a_suggestion(tmp_path: Path) -> None:
    inputs = (Input("image", FLOAT, (2,)), Input("y", FLOAT, (2,)))
    np.save(tmp_path / "imaeg.npy", np.zeros(2, np.float32))
    with pytest.raises(DataError, match=r"imaeg.npy matches no input .*did you mean 'image'"):
        list(open_samples(tmp_path, inputs))


def test_mixing_whole_samples_and_single_inputs_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(2, np.float32))
    np.savez(tmp_path / "0.npz", x=np.zeros(2, np.float32), y=np.zeros(2, np.float32))
    with pytest.raises(DataError, match=r"mixes 0.npz with files of one input"):
        open_samples(tmp_path, PAIR)


def test_one_array_does_not_feed_two_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(2, np.float32))
    with pytest.raises(DataError, match="holds one array, expected arrays for 'x', 'y'"):
        open_samples(tmp_path / "x.npy", PAIR)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no files, expected .npz"):
        open_samples(tmp_path, SINGLE)


def test_a_folder_without_usable_files_lists_what_it_has(tmp_path: Path) -> None:
    for name in ("a.txt", "b.json", "c.pb"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=r"has .json, .pb, .txt, expected"):
        open_samples(tmp_path, SINGLE)


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(DataError, match=r"a.txt has suffix '.txt', expected .pb or one of"):
        open_samples(tmp_path / "a.txt", SINGLE)


def test_a_single_tensor_file_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "t.pb").write_bytes(numpy_helper.from_array(value(3)).SerializeToString())
    assert firsts(tmp_path / "t.pb") == [3]
