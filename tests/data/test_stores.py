from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from data.single_inputs import SINGLE, firsts
from onnxq.data.arrays import npz_arrays
from onnxq.data.images import ImageOptions, read_image
from onnxq.data.samples import Input, Sample, open_samples
from onnxq.data.stores import StorePath, check_there, location, size_of
from onnxq.errors import DataError

fsspec = pytest.importorskip("fsspec", reason="needs pip install 'onnxq[stores]'")


@pytest.fixture
def store() -> str:
    """Return the URL of a folder in memory that holds three samples, one of them in a folder of its own."""
    url = f"memory://{uuid4().hex}"
    for name, number in (("10.npz", 3), ("2.npz", 2), ("1/0.npz", 1)):
        stream = io.BytesIO()
        np.savez_compressed(stream, x=np.full((1, 2), number, np.float32))
        fsspec.filesystem("memory").pipe(f"{url}/{name}", stream.getvalue())
    return url


@pytest.mark.parametrize("url", ["file://{}", "file:{}"])
def test_a_url_of_a_file_here_is_its_path(url: str, tmp_path: Path) -> None:
    assert location(url.format(tmp_path)) == location(Path(url.format(tmp_path))) == tmp_path


def test_samples_come_from_a_store_in_natural_order(store: str) -> None:
    samples = open_samples(store, SINGLE)
    assert firsts(samples) == [1, 2, 3]
    assert firsts(open_samples(f"{store}/10.npz", SINGLE)) == [3]
    # The command line makes paths of what it is given.
    assert firsts(open_samples(Path(store), SINGLE)) == [1, 2, 3]


@pytest.mark.parametrize("suffix", ["npy", "pb", "png"])
def test_every_kind_of_file_comes_from_a_store(suffix: str, store: str) -> None:
    from onnx import numpy_helper
    from PIL import Image

    array, stream = np.full((1, 2, 4, 3), 7, np.uint8), io.BytesIO()
    if suffix == "npy":
        np.save(stream, array)
    elif suffix == "pb":
        stream.write(numpy_helper.from_array(array, "x").SerializeToString())
    else:
        Image.fromarray(array[0]).save(stream, "png")
    name = "input_0.pb" if suffix == "pb" else f"0.{suffix}"
    fsspec.filesystem("memory").pipe(f"{store}/files/{name}", stream.getvalue())
    (sample,) = open_samples(f"{store}/files", (Input("x", np.dtype(np.uint8), (1, 2, 4, 3)),), images=ImageOptions())
    assert np.array_equal(sample["x"], array)


def test_what_is_not_there_is_named(store: str) -> None:
    with pytest.raises(DataError, match=r"memory://\w+/gone does not exist; give a file or folder"):
        open_samples(f"{store}/gone", SINGLE)


def test_a_store_that_disappears_ends_in_a_sentence(store: str) -> None:
    samples = open_samples(store, SINGLE)
    fsspec.filesystem("memory").rm(store, recursive=True)
    with pytest.raises(DataError, match=r"memory://\w+/1/0.npz: 'x' cannot be read: "):
        list(samples)


class Unreachable:
    """A file system whose server does not answer, in a way of its own."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("the server hung up")


def test_a_store_that_cannot_be_reached_ends_in_a_sentence() -> None:
    path = StorePath("memory://calib")
    path.__dict__["_found"] = (Unreachable(), "calib")
    with pytest.raises(DataError, match="memory://calib cannot be opened: the server hung up; expected a file or"):
        check_there(path)


@pytest.mark.parametrize("url", ["nosuchprotocol://x", "nosuchprotocol://x/y.npz"])
def test_an_unknown_protocol_is_named(url: str) -> None:
    with pytest.raises(DataError, match=f"{url} cannot be opened: Protocol not known: nosuchprotocol"):
        open_samples(url, SINGLE)


def test_without_fsspec_its_installation_is_named(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"expected fsspec to read it; run pip install 'onnxq\[stores\]'"):
        open_samples(store, SINGLE)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("calib", Path("calib")),
        ("C:/calib", Path("C:/calib")),
        ("a:b", Path("a:b")),
        ("s3://bucket/a b", StorePath("s3://bucket/a b")),
        (Path("s3://bucket/x.npz"), StorePath("s3://bucket/x.npz")),
        ("simplecache::s3://bucket", StorePath("simplecache::s3://bucket")),
    ],
    ids=str,
)
def test_urls_are_told_from_paths(source: str | Path, found: object) -> None:
    assert location(source) == found


def test_a_file_of_this_machine_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory:").mkdir()
    (tmp_path / "memory:" / "x").write_bytes(b"abc")
    assert size_of(location("memory://x")) == 3


def test_a_path_of_a_store_looks_like_a_path(store: str) -> None:
    path = location(store) / "2.npz"
    assert (path.name, path.stem, path.suffix, str(path)) == ("2.npz", "2", ".npz", f"{store}/2.npz")
    assert (path.is_file(), path.is_dir(), location(store).is_dir()) == (True, False, True)
    assert size_of(path) == len(path.read_bytes())
    assert sorted(found.name for found in location(store).iterdir()) == ["1", "10.npz", "2.npz"]
    assert sorted(found.name for found in location(store).rglob("*")) == ["0.npz", "10.npz", "2.npz"]
    sample: Sample = open_samples(str(path), SINGLE)[0]
    assert sample["x"].tolist() == [[2, 2]]


class HttpError(Exception):
    """What some stores raise, which is no error of the system."""


class Expired:
    """A file system that refuses to answer some questions, from some time on.

    Args:
        refused: these.
        reads: how often an open file is read before.
    """

    def __init__(self, files: Any, refused: str, reads: int = 0) -> None:
        self._files, self._refused, self._reads = files, refused, reads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name == self._refused:
            if not self._reads:
                return self._refuse
            self._reads -= 1
        return Expired(found, self._refused, self._reads) if name == "open" else found

    def __call__(self, *given: Any, **more: Any) -> Any:
        return Expired(self._files(*given, **more), self._refused, self._reads)

    def _refuse(self, *given: Any, **more: Any) -> Any:
        raise HttpError("403 token expired")


def expired(url: str, refused: str, reads: int = 0) -> StorePath:
    path = StorePath(url)
    files, inside = path._found
    path.__dict__["_found"] = Expired(files, refused, reads), inside
    return path


ASKED: dict[str, Callable[[StorePath], object]] = {
    "info": StorePath.exists,
    "isdir": StorePath.is_dir,
    "ls": lambda path: list(path.iterdir()),
    "find": lambda path: list(path.rglob("*")),
    "size": StorePath.size,
    "open": StorePath.open,
    "cat_file": StorePath.read_bytes,
}


@pytest.mark.parametrize("question", ASKED)
def test_whatever_a_store_refuses_ends_in_a_sentence(question: str, store: str) -> None:
    name = "gone" if question == "info" else "1/0.npz"
    with pytest.raises(DataError, match=rf"memory://\w+/{name} cannot be opened: 403 token .* your credentials"):
        ASKED[question](expired(f"{store}/{name}", question))


def test_a_file_that_a_store_refuses_to_look_at_is_not_left_out(store: str) -> None:
    with pytest.raises(DataError, match="cannot be opened: 403 token expired"):
        expired(f"{store}/1/0.npz", "info").is_file()
    assert not StorePath(f"{store}/gone").is_file()
    assert not StorePath(f"{store}/1").is_file()


@pytest.mark.parametrize("reads", range(3))
def test_a_store_that_refuses_while_a_file_is_read_ends_in_a_sentence(store: str, reads: int) -> None:
    with pytest.raises(DataError, match=r"memory://\w+/1/0.npz cannot be opened: 403 token expired"):
        npz_arrays(expired(f"{store}/1/0.npz", "read", reads))["x"].read()


def test_an_image_that_a_store_refuses_is_named(store: str) -> None:
    pytest.importorskip("PIL", reason="needs pip install 'onnxq[images]'")
    entry = Input("x", np.dtype(np.uint8), (1, 2, 4, 3))
    fsspec.filesystem("memory").pipe(f"{store}/0.png", b"\x89PNG")
    for question in ("open", "read"):
        with pytest.raises(DataError, match=r"0.png cannot be opened: 403 token expired"):
            read_image(expired(f"{store}/0.png", question), entry, ImageOptions())


def test_a_file_of_a_store_has_lines_too(store: str) -> None:
    fsspec.filesystem("memory").pipe(f"{store}/rows", b"a\nb")
    with StorePath(f"{store}/rows").open() as stream:
        assert list(stream) == [b"a\n", b"b"]
