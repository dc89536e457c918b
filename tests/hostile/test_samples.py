from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observations import statistics
from onnx import TensorProto, numpy_helper
from PIL import Image

from hostile.bad_samples import Bomb, npy_bytes, npy_claiming, png_claiming, write_zip, zeros, zipped
from onnxq.calibration.statistics import load_statistics, save_statistics
from onnxq.data.samples import ImageOptions, Input, open_samples
from onnxq.errors import DataError

FLOAT = np.dtype(np.float32)
X = (Input("x", FLOAT, ("N", 2)),)
IMAGE = (Input("x", FLOAT, (1, 3, 8, 8)),)


def read_all(path: Path, inputs: tuple[Input, ...] = X) -> int:
    return sum(1 for _ in open_samples(path, inputs, images=ImageOptions()))


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_pickles_are_never_loaded(kind: str, tmp_path: Path) -> None:
    array = np.array([Bomb(tmp_path / "exploded")], dtype=object)
    path = tmp_path / f"a.{kind}"
    np.save(path, array, allow_pickle=True) if kind == "npy" else np.savez(path, x=array)
    with pytest.raises(DataError, match=rf"a.{kind}.* holds pickled Python objects, which are never loaded"):
        read_all(path)
    assert not (tmp_path / "exploded").exists()


def test_a_bare_pickle_named_npy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(DataError, match=r"a.npy cannot be read"):
        read_all(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["../escaped.npy", "/escaped.npy", "a/../../escaped.npy", "C:\\escaped.npy"])
def test_archive_names_are_keys_and_never_paths(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    path = write_zip(inner / "a.npz", {name: npy_bytes(np.zeros((1, 2), np.float32))})
    with pytest.raises(DataError, match="is not an input of the model"):
        read_all(path)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["a.npz", "inner"]


def test_a_compressed_member_that_unpacks_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.data.arrays.ARRAY_LIMIT", 1000)
    zeros = npy_bytes(np.zeros((1000, 2), np.float32))
    path = write_zip(tmp_path / "a.npz", {"x.npy": zeros}, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match=r"a.npz: 'x' unpacks to 8\d\d\d bytes, expected at most 1000"):
        read_all(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_unpacks_to_an_absurd_size_is_refused_unread(
    compression: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zeros(tmp_path / "a.npz", 65, compression)
    monkeypatch.setattr("onnxq.data.arrays.StoredArray.rows", None)
    with pytest.raises(DataError, match=r"a.npz: 'x' unpacks from \d+ to 68157\d+ bytes, expected at most 1000 times"):
        open_samples(path, X, limit=1)


def test_a_compressed_size_beyond_that_of_the_file_is_not_believed(tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npz", 65)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 20 : entry + 24] = struct.pack("<I", 2**31 - 1)
    path.write_bytes(data)
    with pytest.raises(DataError, match="expected at most 1000 times"):
        open_samples(path, X)


@pytest.mark.parametrize(("mebibytes", "compression"), [(1, zipfile.ZIP_LZMA), (65, zipfile.ZIP_STORED)])
def test_constant_data_is_read_where_it_is_small_or_stored(mebibytes: int, compression: int, tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npz", mebibytes, compression)
    samples = open_samples(path, X, limit=3)
    assert [sample["x"].tolist() for sample in samples] == [[[0, 0]]] * 3


def test_more_samples_than_anyone_means_are_refused_unless_limited(tmp_path: Path) -> None:
    path = zeros(tmp_path / "a.npz", 9)
    with pytest.raises(DataError, match=r"a.npz holds 1179648 samples, expected at most 1000000; .* --limit 500"):
        open_samples(path, X)
    assert len(open_samples(path, X, limit=500)) == 500
    empty = write_zip(tmp_path / "b.npz", {"x.npy": npy_claiming("(1099511627776, 0)")})
    with pytest.raises(DataError, match="holds 1099511627776 samples, expected at most 1000000"):
        open_samples(empty, (Input("x", FLOAT, ("N", "M")),))


@pytest.mark.parametrize("shape", ["(1099511627776, 2)", "(1, 4611686018427387904)", "(-1, 2)", "(3, 1000)"])
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_header_that_promises_more_than_there_is_is_refused(kind: str, shape: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    data = npy_claiming(shape)
    path.write_bytes(data) if kind == "npy" else write_zip(path, {"x.npy": data})
    with pytest.raises(DataError, match=r"declares shape \[.*; the file is damaged"):
        read_all(path)


@pytest.mark.parametrize(
    ("shape", "descr"),
    [
        ("(1, 2)", "'|O'"),
        ("(1, 2)", "[('a', '<f4'), ('b', '|O')]"),
        ("(1, 2)", "'<f5'"),
        ("(1, 2)", "__import__('os')"),
        ("(1.5, 2)", "'<f4'"),
        ("'x'", "'<f4'"),
        ("(" * 300, "'<f4'"),
        ("(0, 9223372036854775807)", "'<f4'"),
    ],
)
def test_a_malformed_header_is_refused(shape: str, descr: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy_claiming(shape, descr))
    with pytest.raises(DataError, match=r"a.npy"):
        read_all(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 40, 128, 131, 200])
@pytest.mark.parametrize("kind", ["npy", "npz", "png"])
def test_a_truncated_file_is_refused(kind: str, keep: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "png":
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    elif kind == "npy":
        np.save(path, np.zeros((20, 2), np.float32))
    else:
        np.savez_compressed(path, x=np.zeros((20, 2), np.float32))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"a\.{kind}"):
        read_all(path, IMAGE if kind == "png" else X)


def test_a_member_that_is_no_array_is_named(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.npz", {"x.npy": npy_bytes(np.zeros((1, 2), np.float32)), "readme.txt": b"hello"})
    with pytest.raises(DataError, match=r"a.npz: 'readme.txt' is not a .npy array"):
        read_all(path)


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.npz", {"x.npy": npy_bytes(np.zeros((1, 2), np.float32))})
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.npz: 'x' cannot be read: .*encrypted"):
        read_all(path)


@pytest.mark.parametrize("kind", ["external", "shape", "type", "junk"])
def test_a_damaged_tensor_file_is_refused(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(8))
    tensor = numpy_helper.from_array(np.zeros((1, 2), np.float32), "x")
    if kind == "external":
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=str(secret))
    elif kind == "shape":
        tensor.dims[0] = 1 << 40
    else:
        tensor.data_type = 99
    data = b"\xff\xff\xff" if kind == "junk" else tensor.SerializeToString()
    (tmp_path / "input_0.pb").write_bytes(data)
    with pytest.raises(DataError, match=r"input_0.pb"):
        read_all(tmp_path)


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_an_image_bomb_is_refused(side: int, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png_claiming(side, side))
    with pytest.raises(DataError, match=r"a.png has more pixels than Pillow's limit"):
        read_all(tmp_path, IMAGE)


def test_a_file_that_only_claims_to_be_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text("<html>")
    with pytest.raises(DataError, match=r"a.jpg cannot be read as an image"):
        read_all(tmp_path, IMAGE)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(DataError, match="has no files"):
        read_all(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_path_that_cannot_exist_is_a_data_error(name: str) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        open_samples(name, X)


SEEDS = {
    "a.npy": npy_bytes(np.zeros((3, 2), np.float32)),
    "a.pb": numpy_helper.from_array(np.zeros((3, 2), np.float32), "x").SerializeToString(),
}

SEEDS |= {"b.npz": zipped(SEEDS["a.npy"], zipfile.ZIP_STORED), "c.npz": zipped(SEEDS["a.npy"], zipfile.ZIP_DEFLATED)}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SEEDS)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_changed_bytes_give_samples_or_a_data_error(
    tmp_path: Path, name: str, changes: list[tuple[float, int]]
) -> None:
    data = bytearray(SEEDS[name])
    for place, value in changes:
        data[int(place * len(data))] = value
    (tmp_path / name).write_bytes(data)
    with contextlib.suppress(DataError):
        read_all(tmp_path / name)


@pytest.mark.parametrize("damage", ["counts", "extremes", "format", "header", "missing", "floats", "infinite"])
def test_damaged_statistics_are_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_statistics(statistics({"a": np.float32([1, 2, 3])}), path)
    with np.load(path) as saved:
        arrays = dict(saved)
    header = json.loads(arrays["header"].tobytes())
    if damage == "counts":
        arrays["histogram.counts"] = arrays["histogram.counts"][:-1]
    elif damage == "floats":
        arrays["histogram.counts"] = arrays["histogram.counts"].astype(np.float64)
    elif damage == "extremes":
        arrays["range.ends"][1] = -1e30
    elif damage == "infinite":
        arrays["range.ends"][1] = float("nan")
    elif damage == "format":
        header["format"] = "onnxq statistics 5"
    elif damage == "missing":
        del header["statistics"]
    arrays["header"] = np.frombuffer(json.dumps([] if damage == "header" else header).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=r"s.npz"):
        load_statistics(path)
