"""Files of samples, and where they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from data.single_inputs import FLOAT, SINGLE, firsts
from onnxq.data.samples import Input, open_samples
from onnxq.errors import DataError

PAIR = (Input("x", FLOAT, (2,)), Input("y", FLOAT, (2,)))


def value(number: float) -> np.ndarray:
    return np.full((1, 2), number, np.float32)


def numbers(path: Path) -> list[float]:
    return firsts(open_samples(path, SINGLE))


def write_tensor(path: Path, number: float, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(numpy_helper.from_array(np.full(2, number, np.float32), name).SerializeToString())


def test_files_are_read_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 1, 100):
        np.savez(tmp_path / f"s{number}.npz", x=value(number))
    assert numbers(tmp_path) == [1, 9, 10, 100]


def test_folders_nest_and_mix(tmp_path: Path) -> None:
    (tmp_path / "b" / "calib").mkdir(parents=True)
    np.save(tmp_path / "a.npy", value(1))
    np.savez(tmp_path / "b" / "calib" / "0.npz", x=value(2))
    np.savez(tmp_path / "c.NPZ.npz", x=np.concatenate([value(3), value(4)]))
    (tmp_path / "labels.json").write_text("{}")
    (tmp_path / ".hidden.npz").write_bytes(b"")
    assert numbers(tmp_path) == [1, 2, 3, 4]


def test_a_link_to_a_parent_does_not_repeat_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", x=value(1))
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert numbers(tmp_path) == [1]


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


def test_a_folder_with_one_file_per_input_is_a_sample(tmp_path: Path) -> None:
    for number in (10, 9):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        np.save(folder / "x.npy", np.full(2, number, np.float32))
        np.save(folder / "y.npy", np.zeros(2, np.float32))
    assert [sample["x"][0] for sample in open_samples(tmp_path, PAIR)] == [9, 10]


ONE, TWO = np.zeros(2, np.float32), {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}
NAMED = (Input("image", FLOAT, (2,)), Input("y", FLOAT, (2,)))


@pytest.mark.parametrize(
    ("files", "place", "inputs", "sentence"),
    [
        ({"input_0.pb": 5}, "", PAIR, r"input 'y' .* is missing"),
        (dict.fromkeys(("input_0.pb", "input_1.pb", "input_2.pb"), 1), "", PAIR, "input_2.pb is one input too many, "),
        ({"imaeg.npy": ONE}, "", NAMED, r"imaeg.npy matches no input .*did you mean 'image'"),
        ({"x.npy": ONE, "0.npz": TWO}, "", PAIR, r"mixes 0.npz with files of one input"),
        ({"x.npy": ONE}, "x.npy", PAIR, "holds one array, expected arrays for 'x', 'y'"),
        ({}, "", SINGLE, r"has no files, expected .npz"),
        (dict.fromkeys(("a.txt", "b.json", "c.pb"), ""), "", SINGLE, r"has .json, .pb, .txt, expected"),
        ({"a.txt": "1 2 3"}, "a.txt", SINGLE, r"a.txt has suffix '.txt', expected .pb or one of"),
    ],
)
def test_files_that_are_no_samples_are_told_why(
    files: dict[str, Any], place: str, inputs: tuple[Input, ...], sentence: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        match content:
            case str():
                (tmp_path / name).write_text(content)
            case int():
                write_tensor(tmp_path / name, content)
            case dict():
                np.savez(tmp_path / name, **content)
            case _:
                np.save(tmp_path / name, content)
    with pytest.raises(DataError, match=sentence):
        list(open_samples(tmp_path / place, inputs))


def test_a_single_tensor_file_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "t.pb").write_bytes(numpy_helper.from_array(value(3)).SerializeToString())
    assert numbers(tmp_path / "t.pb") == [3]
