from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser

from onnxq.errors import ModelError
from onnxq.ir import load, read_model, save, to_model

WEIGHT = np.arange(1024, dtype=np.float32)


def write_model(folder: Path, location: str = "w.bin", name: str = "m.onnx", dims: int = 1024, **entries: str) -> Path:
    """Write a model whose one weight is external, without its data file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{dims}] x) => (float[{dims}] y) {{ y = Add(x, w) }}'
    )
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[dims], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    model.graph.initializer.append(weight)
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def write_data(path: Path, array: np.ndarray = WEIGHT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(array.tobytes())
    return path


def weight_of(path: Path) -> np.ndarray:
    return load(path).initializers[0].values


def test_external_values_are_mapped_from_the_file(tmp_path) -> None:
    write_data(tmp_path / "w.bin", np.concatenate([np.zeros(4, np.float32), WEIGHT]))
    path = write_model(tmp_path, offset="16", length="4096")

    values = weight_of(path)

    assert values.tolist() == WEIGHT.tolist()
    assert not values.flags.writeable
    assert not values.flags.owndata


def test_data_may_lie_in_a_folder_below_the_model(tmp_path) -> None:
    write_data(tmp_path / "data" / "w.bin")

    assert weight_of(write_model(tmp_path, "data/w.bin")).tolist() == WEIGHT.tolist()


def test_reading_a_model_does_not_read_its_data(tmp_path, monkeypatch) -> None:
    write_data(tmp_path / "w.bin")
    path = write_model(tmp_path)
    monkeypatch.setattr(np, "memmap", None)

    assert load(path).initializers[0].shape == (1024,)


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../w.bin", "data/../../w.bin", "..\\w.bin", "", "\0", "data/../w.bin", "."]
)
def test_a_location_outside_of_the_folder_is_refused(tmp_path, location: str) -> None:
    write_data(tmp_path / "w.bin")
    write_data(tmp_path / "model" / "data" / "w.bin")

    with pytest.raises(ModelError, match="tensor 'w' keeps its data in"):
        load(write_model(tmp_path / "model", location))


@pytest.mark.parametrize(
    ("location", "link", "to", "message"),
    [
        ("w.bin", "w.bin", "../elsewhere/w.bin", "outside the model's folder; copy the file there"),
        ("data/w.bin", "data", "../elsewhere", "outside the model's folder"),
        ("w.bin", "w.bin", "w.bin", "cannot be found"),
    ],
    ids=["a file outside", "a folder outside", "itself"],
)
def test_a_link_that_leads_elsewhere_is_refused(tmp_path, location: str, link: str, to: str, message: str) -> None:
    write_data(tmp_path / "elsewhere" / "w.bin")
    path = write_model(tmp_path / "model", location)
    (tmp_path / "model" / link).symlink_to(to)

    with pytest.raises(ModelError, match=message):
        load(path)


def test_model_and_data_may_both_be_links_into_one_folder(tmp_path) -> None:
    """Download caches keep files under their checksums, and folders of links that give them their names."""
    stored = write_model(tmp_path / "blobs", name="aaa")
    data = write_data(tmp_path / "blobs" / "bbb")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "m.onnx").symlink_to(stored)
    (tmp_path / "snapshot" / "w.bin").symlink_to(data)

    assert weight_of(tmp_path / "snapshot" / "m.onnx").tolist() == WEIGHT.tolist()


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"m\.onnx: tensor 'w'.*w\.bin cannot be found; put that file beside"):
        load(write_model(tmp_path))


def test_what_is_no_regular_file_is_refused(tmp_path) -> None:
    os.mkfifo(tmp_path / "w.bin")

    with pytest.raises(ModelError, match="not a regular file"):
        load(write_model(tmp_path))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "4"}, "needs bytes 4 to 4100 of .*w.bin, which has only 4096"),
        ({"offset": "99999999999999"}, "has only 4096"),
        ({"length": "4095"}, "4095 bytes of .*w.bin, expected 4096 by its shape and type"),
        ({"length": "0"}, "expected 4096"),
        ({"offset": "-1"}, "'-1' as the offset"),
        ({"length": "-4096"}, "'-4096' as the length"),
        ({"offset": "one"}, "'one' as the offset"),
        ({"offset": "1" * 5000}, "as the offset"),
        ({"offset": "²"}, "'²' as the offset"),
    ],
)
def test_a_range_that_does_not_fit_is_refused(tmp_path, entries: dict[str, str], message: str) -> None:
    write_data(tmp_path / "w.bin")

    with pytest.raises(ModelError, match=message):
        load(write_model(tmp_path, **entries))


def test_a_file_that_changed_after_reading_is_not_trusted(tmp_path) -> None:
    write_data(tmp_path / "w.bin")
    graph = load(write_model(tmp_path))
    (tmp_path / "w.bin").unlink()
    write_data(tmp_path / "w.bin", WEIGHT[::-1].copy())

    with pytest.raises(ModelError, match="changed after the model was read; load the model again"):
        _ = graph.initializers[0].values
    with pytest.raises(ModelError, match="changed after"):
        save(graph, tmp_path / "out.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "w.bin"]


def test_a_file_that_vanished_after_reading_is_named(tmp_path) -> None:
    data = write_data(tmp_path / "w.bin")
    graph = load(write_model(tmp_path))
    data.unlink()

    with pytest.raises(ModelError, match=r"tensor 'w' cannot be read from .*w\.bin"):
        to_model(graph)


def test_a_model_in_memory_needs_its_folder_only_for_values(tmp_path) -> None:
    write_data(tmp_path / "w.bin")
    model = onnx.load(write_model(tmp_path), load_external_data=False)
    graph = read_model(model)

    assert graph.initializers[0].shape == (1024,)
    with pytest.raises(ModelError, match="load the model from its path"):
        _ = graph.initializers[0].values
    assert read_model(model, tmp_path).initializers[0].values.tolist() == WEIGHT.tolist()
