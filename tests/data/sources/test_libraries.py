"""Data sets of other libraries: each is recognized, and only what is wanted is read."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader
from PIL import Image

from onnxq.calibration.data import Data
from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
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


class Pipeline:
    """What `tf.data.Dataset` has."""

    def as_numpy_iterator(self) -> Iterator[tuple[Any, int]]:
        return ((np.full((2, 2), batch, np.float32), batch) for batch in range(3))


def test_its_batches_are_samples() -> None:
    assert [float(sample["x"][0, 0]) for sample in open_samples(Pipeline(), [X])] == [0, 0, 1, 1, 2, 2]


def test_tensorflows_own() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    given = tensorflow.data.Dataset.from_tensor_slices({"x": np.ones((5, 2), np.float32)}).batch(2)
    assert len(open_samples(given, [X])) == 5


FLOAT = np.dtype(np.float32)


def saved(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def shard(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_members_of_one_key_are_a_sample(suffix: str, tmp_path: Path) -> None:
    members = {}
    for number in range(3):
        members[f"d/{number}.x.npy"] = saved(np.full((1, 2), number, np.float32))
        members[f"d/{number}.ids.npy"] = saved(np.array([number]))
        members[f"d/{number}.cls"] = b"7"
    inputs = (X, Input("ids", np.dtype(np.int64), (1,)))
    samples = open_samples(shard(tmp_path / f"a{suffix}", members), inputs)
    assert [(float(one["x"][0, 0]), int(one["ids"][0])) for one in samples] == [(0, 0), (1, 1), (2, 2)]


def test_images_are_decoded_as_the_options_say(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 0, 51)).save(stream, "PNG")
    shard(tmp_path / "a.tar", {"0.png": stream.getvalue(), "0.json": b"{}"})
    entry = Input("x", FLOAT, (1, 3, 4, 4))
    ((sample,),) = ([*open_samples(tmp_path, [entry], images=ImageOptions(mean=(0.5,)))],)
    assert sample["x"][0, :, 0, 0].tolist() == pytest.approx([0.5, -0.5, -0.3])


def test_a_limit_takes_some_of_each_shard(tmp_path: Path) -> None:
    for number in range(3):
        members = {f"{place}.npy": saved(np.full((1, 2), 10 * number + place, np.float32)) for place in range(4)}
        shard(tmp_path / f"{number}.tar", members)
    assert [int(one["x"][0, 0]) for one in open_samples(tmp_path, [X], limit=6)] == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize("content", [b"no tar", saved(np.array([None], object))], ids=["shard", "member"])
def test_damage_and_pickles_are_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content) if content == b"no tar" else shard(path, {"0.npy": content})
    with pytest.raises(DataError, match=r"a.tar.* cannot be read"):
        open_samples(tmp_path, [X])


def test_members_of_other_names_are_no_input_of_a_model_that_has_one(tmp_path: Path) -> None:
    members = {}
    for number in range(3):
        members[f"{number}.x.npy"] = saved(np.full((1, 2), number, np.float32))
        members[f"{number}.y.npy"] = saved(np.full((1, 2), 1000, np.float32))
        members[f"{number + 3}.npy"] = saved(np.full((1, 2), number + 3, np.float32))
    samples = open_samples(shard(tmp_path / "a.tar", dict(sorted(members.items()))), [X])
    assert [float(one["x"][0, 0]) for one in samples] == [0, 1, 2, 3, 4, 5]
