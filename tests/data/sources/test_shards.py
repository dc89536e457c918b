"""Shards of WebDataset are read member by member."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.errors import DataError

FLOAT = np.dtype(np.float32)
X = Input("x", FLOAT, ("N", 2))


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
