"""Shards of WebDataset: tar files in which members that share a name up to the first dot are one sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from onnxq.data.arrays import ARRAY_LIMIT
from onnxq.data.images import IMAGE_SUFFIXES, ImageOptions, read_image
from onnxq.data.inputs import Input, required
from onnxq.data.sources.source import has_suffix
from onnxq.data.stores import EnclosedFile
from onnxq.errors import DataError


@dataclass(frozen=True)
class Shards:
    """``.tar`` and ``.tar.gz``: ``KEY.INPUT.npy``, ``KEY.npz``, or for models with one input ``KEY.npy`` or an image.

    Other members, such as labels in ``KEY.cls``, are left out.
    """

    def takes(self, given: object) -> bool:
        """Return whether it is such a file."""
        return has_suffix(given, ".tar", ".tgz") or (has_suffix(given, ".gz") and str(given).endswith(".tar.gz"))

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the samples in the order of the file, which is read once and never unpacked to disk."""
        try:
            with given.open("rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
                members = (
                    EnclosedFile(str(given), one.name, _content(archive, one)) for one in archive if one.isfile()
                )
                for _, group in groupby(members, _key):
                    if row := dict(_fields(group, required(inputs), images)):
                        yield row
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{given} cannot be read as a tar file: {str(error)[:200]}; write it again") from error


def _key(member: EnclosedFile) -> str:
    """Return what members of one sample share."""
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _field(member: EnclosedFile) -> str:
    """Return what stands between the key and the suffix; empty where nothing does."""
    return member.name.rpartition("/")[2].partition(".")[2].rpartition(".")[0]


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > ARRAY_LIMIT:
        raise DataError(f"{member.name} has {member.size} bytes, expected at most {ARRAY_LIMIT}; split it into samples")
    stream = archive.extractfile(member)
    return stream.read() if stream is not None else b""


def _fields(
    members: Iterable[EnclosedFile], wanted: Sequence[Input], images: ImageOptions
) -> Iterator[tuple[str, object]]:
    known = {entry.name: entry for entry in wanted}
    for member in members:
        suffix = PurePosixPath(member.name).suffix.lower()
        field = _field(member)
        entry = known.get(field) if field or len(wanted) > 1 else wanted[0]
        try:
            if suffix == ".npz":
                yield from np.load(member.open(), allow_pickle=False).items()
            elif suffix == ".npy" and entry is not None:
                yield entry.name, np.load(member.open(), allow_pickle=False)
            elif suffix in IMAGE_SUFFIXES and entry is not None:
                yield entry.name, read_image(member, entry, images)
        except (ValueError, EOFError) as error:
            raise DataError(f"{member} cannot be read: {str(error)[:200]}; write it again") from error
