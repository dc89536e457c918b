"""The data file beside a model: tensors streamed into it one after the other."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.ir.external import DataRange
from onnxq.ir.payload import CHUNK_BYTES, Payload
from onnxq.ir.stored import ProtoPayload

ALIGNMENT = 4096
"""Tensors start at multiples of this, so that a runtime can map them."""
THRESHOLD = 1024
"""Tensors of fewer bytes stay in the model."""

# The kernel answers so when it cannot copy between these two files by itself.
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class SidecarWriter:
    """Streams tensors into an open file.

    Attributes:
        end: bytes written so far.
        replaced: payloads that lie in the file which this one is going to replace, with their new tensors.
    """

    def __init__(self, file: BinaryIO, final: Path) -> None:
        """Write into ``file``, which will be renamed to ``final``."""
        self.end = 0
        self.replaced: dict[Payload, TensorProto] = {}
        self._file = file
        self._final = final
        self._written: dict[Payload, tuple[int, int]] = {}

    def store(self, proto: TensorProto, payload: Payload, name: str) -> None:
        """Write a tensor into the file, and the reference to it into ``proto``; small ones and strings go inline."""
        source = payload.data_range() if isinstance(payload, ProtoPayload) and payload.external else None
        if payload.nbytes < THRESHOLD:
            payload.fill(proto, name)
        else:
            if payload not in self._written:
                self._written[payload] = self._append(payload, source)
            offset, length = self._written[payload]
            payload.fill_without_values(proto, name)
            refer(proto, self._final.name, offset, length)
        if source is not None and source.path == self._final.resolve():
            self.replaced[payload] = proto

    def _append(self, payload: Payload, source: DataRange | None) -> tuple[int, int]:
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        if source is not None:
            self._file.flush()
            _copy(source, self._file, offset)
            self._file.seek(offset + source.length)
        else:
            for chunk in payload.chunks():
                self._file.write(chunk)
        self.end = self._file.tell()
        if self.end - offset != payload.nbytes:
            raise ModelError(f"{payload} gave {self.end - offset} bytes, expected {payload.nbytes}")
        return offset, payload.nbytes


def refer(proto: TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor refer to external data."""
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        proto.external_data.add(key=key, value=value)


def _copy(source: DataRange, target: BinaryIO, offset: int) -> None:
    """Copy bytes between files: inside the kernel where it can, else through a small buffer."""
    source.check()
    try:
        opened = source.path.open("rb")
    except OSError as error:
        raise source.unreadable(error) from error
    with opened as file:
        done = _copy_in_kernel(file, source, target, offset)
        file.seek(source.offset + done)
        target.seek(offset + done)
        while done < source.length:
            piece = file.read(min(CHUNK_BYTES, source.length - done))
            if not piece:
                raise ModelError(f"{source.path} ends inside the data of tensor {source.tensor!r}; it is cut short")
            target.write(piece)
            done += len(piece)


def _copy_in_kernel(file: BinaryIO, source: DataRange, target: BinaryIO, offset: int) -> int:
    """Return how many bytes the kernel copied before it gave up."""
    done = 0
    if not hasattr(os, "copy_file_range"):
        return done
    while done < source.length:
        try:
            copied = os.copy_file_range(
                file.fileno(), target.fileno(), source.length - done, source.offset + done, offset + done
            )
        except OSError as error:
            if error.errno in _NO_KERNEL_COPY:
                return done
            raise
        if not copied:
            return done
        done += copied
    return done
