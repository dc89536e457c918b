"""External data: find a tensor's bytes in a file beside the model, without trusting the model."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.errors import ModelError

Stamp = tuple[int, int, int, int]

ALIGNMENT = 4096
"""Tensors start at multiples of this many bytes, so that a runtime can map them."""

# Mapping a part of a file takes 50 microseconds, longer than reading this many bytes.
_SMALL = 1 << 18


@dataclass(frozen=True, eq=False)
class DataFolder:
    """The folder that a model's external data must lie in.

    Attributes:
        real: if the model file is a link, the folder of its target; data may lie there as well.
    """

    path: Path
    real: Path | None = None
    _files: dict[str, tuple[Path, Stamp]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_model(cls, path: Path) -> DataFolder:
        """Return the folder of the model file at ``path``."""
        return cls(path.parent, path.resolve().parent)

    def locate(self, tensor: str, location: str) -> tuple[Path, Stamp]:
        """Return the data file at ``location``, and its identity when it was first looked up.

        Raises:
            ModelError: the location is absolute, leaves the folder, or is not a regular file.
        """
        if location not in self._files:
            self._files[location] = self._resolve(tensor, location)
        return self._files[location]

    def _resolve(self, tensor: str, location: str) -> tuple[Path, Stamp]:
        subject = f"tensor {tensor!r} keeps its data in {location!r}"
        parts = Path(location.replace("\\", "/")).parts
        if not location or "\0" in location or Path(location).is_absolute() or ".." in parts or "/" in parts:
            raise ModelError(
                f"{subject}, which is not a path inside the model's folder; move the file beside the model"
            )
        try:
            real = (self.path / location).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"{subject}, but {self.path / location} cannot be found; put that file beside the model"
            ) from error
        roots = [root.resolve() for root in (self.path, self.real) if root is not None]
        if not any(real.is_relative_to(root) for root in roots):
            raise ModelError(
                f"{subject}, which links to {real} outside the model's folder; copy the file there instead"
            )
        status = real.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{subject}, but {real} is not a regular file")
        return real, stamp(status)


@dataclass(frozen=True)
class DataRange:
    """The bytes of one tensor in a data file.

    Attributes:
        tensor: name of the tensor, for messages.
        stamp: identity of the file when the model was read.
    """

    tensor: str
    path: Path
    offset: int
    length: int
    stamp: Stamp

    def check(self) -> None:
        """Raise ModelError if the file was replaced or changed after the model was read."""
        try:
            current = stamp(self.path.stat())
        except OSError as error:
            raise self.unreadable(error) from error
        if current != self.stamp:
            raise ModelError(
                f"{self.path}, which holds tensor {self.tensor!r}, changed after the model was read; "
                "load the model again"
            )

    def view(self) -> npt.NDArray[np.uint8]:
        """Return the bytes as an array. Up to 256 KiB are read; larger ranges are mapped read-only from the file."""
        self.check()
        try:
            if self.length <= _SMALL:
                with self.path.open("rb", buffering=0) as file:
                    file.seek(self.offset)
                    return np.frombuffer(file.read(self.length), np.uint8)
            return np.asarray(np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=(self.length,)))
        except OSError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: OSError) -> ModelError:
        """Return the error to raise if the file cannot be opened."""
        return ModelError(f"tensor {self.tensor!r} cannot be read from {self.path}: {error.strerror or error}")


def stamp(status: os.stat_result) -> Stamp:
    """Return device, inode, size and time of change, which together identify one version of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def locate(proto: TensorProto, folder: DataFolder | None, nbytes: int) -> DataRange:
    """Return where the data of an external tensor lies; its shape and type require ``nbytes``.

    Raises:
        ModelError: there is no folder, or location, offset and length do not name ``nbytes`` bytes of a file in it.
    """
    name = proto.name
    entries = {entry.key: entry.value for entry in proto.external_data}
    if folder is None:
        raise ModelError(
            f"tensor {name!r} keeps its data in {entries.get('location', '')!r}, but the model has no folder; "
            "load the model from its path"
        )
    path, identity = folder.locate(name, entries.get("location", ""))
    offset = _number(name, path, "offset", entries.get("offset", "0"))
    length = _number(name, path, "length", entries.get("length", str(nbytes)))
    if length != nbytes:
        raise ModelError(f"tensor {name!r} declares {length} bytes of {path}, expected {nbytes} by its shape and type")
    size = identity[2]
    if offset + length > size:
        raise ModelError(
            f"tensor {name!r} needs bytes {offset} to {offset + length} of {path}, which has only {size}; "
            "the file is cut short or belongs to another model"
        )
    return DataRange(name, path, offset, length, identity)


def _number(tensor: str, path: Path, key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelError(f"tensor {tensor!r} gives {text!r} as the {key} of its data in {path}; expected a number >= 0")
    return int(text)
