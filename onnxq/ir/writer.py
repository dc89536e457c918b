"""Write a Graph as a ModelProto, or as files that appear completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import EncodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError, OutputError
from onnxq.ir.elements import Constant
from onnxq.ir.external_data import ALIGNMENT, DataFolder, DataRange, stamp
from onnxq.ir.graph import Graph, restore_classes
from onnxq.ir.serialize import attribute_constants, place_constants, serialize_model
from onnxq.ir.spilling import place_of
from onnxq.ir.tensor_data import CHUNK_BYTES, ProtoTensor, TensorData
from onnxq.system.publish import NO_ROOM, data_file, publish, staging

_LARGEST_MODEL = 2**31 - 1
LINKED = "linked."
"""How names of data files begin that are hard links to files of another model."""

LARGEST_INLINE = 1900 * 2**20
"""Bytes of weights up to which a model is written into one file, below the 2 GiB that a ModelProto may take."""


def to_model(graph: Graph, *, folder: str | os.PathLike[str] | None = None) -> ModelProto:
    """Return the model in memory, with external data read in.

    If ``folder`` is given, values that lie in a file of this folder stay there, and the model refers to them.

    Raises:
        ModelError: the graph is not consistent, its external data cannot be read, or the model would exceed 2 GiB.
    """
    kept = None if folder is None else Path(folder).resolve()
    total = 0

    def store(proto: TensorProto, tensor_data: TensorData, name: str) -> None:
        nonlocal total
        if kept is not None and isinstance(tensor_data, ProtoTensor) and tensor_data.lies_in(kept):
            tensor_data.fill_reference(proto, name)
            return
        place = place_of(tensor_data.stored) if kept is not None and tensor_data.stored is not None else None
        if place is not None and place[0].resolve().parent == kept:
            tensor_data.fill_without_values(proto, name)
            refer(proto, place[0].name, place[1], tensor_data.nbytes)
            return
        total += tensor_data.nbytes
        if total > _LARGEST_MODEL:
            raise ModelError("the model exceeds the 2 GiB that ONNX allows in one piece; write it with save instead")
        tensor_data.fill(proto, name)

    return serialize_model(restore_classes(graph), place_constants(graph), store)


def save(
    graph: Graph, path: str | os.PathLike[str], *, external_data: bool | None = None, linked: bool = False
) -> None:
    """Write a model file, and optionally its weights to ``<file name>.data`` beside it.

    Weights are streamed, so memory is bounded by the largest one. Files are written into a temporary folder and renamed
    when complete. A graph may be saved over the files that it was read from.

    With ``external_data``, tensors of 1 KiB and more go to the data file. It is the default if the graph was read with
    external data or is larger than 1.9 GiB. With ``linked``, values that lie in other data files stay there: the model
    refers to hard links of these files beside it, for files that only this process uses. Where the file system makes no
    hard links, the values are copied.

    Args:
        graph: main graph of the model.
        path: .onnx file to write.
        external_data: True writes weights beside the file, False inside it; None decides by size.
        linked: True links to existing data files instead of copying them.

    Raises:
        ModelError: the graph is not consistent, its external data cannot be read, or it exceeds 2 GiB in one file.
        OutputError: the folder does not exist, cannot be written, or is full.

    >>> save(load("model.onnx"), "copy.onnx")  # doctest: +SKIP
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise OutputError(f"cannot write {target}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise OutputError(f"cannot write {target}: it is a folder; give the name of a file in it")
    placed = place_constants(restore_classes(graph))
    payloads = [tensor.tensor_data for tensor in _stored(placed)]
    total = sum(tensor_data.nbytes for tensor_data in payloads)
    if external_data is None:
        external_data = total > LARGEST_INLINE or any(tensor_data.external for tensor_data in payloads)
    if not external_data and total > _LARGEST_MODEL:
        raise ModelError(f"the model of {total} bytes exceeds the 2 GiB of one ONNX file; save it with external data")
    replaced: Mapping[TensorData, TensorProto] = {}
    with staging(target) as folder:
        staged = folder / target.name
        try:
            if external_data:
                replaced = _write_with_sidecar(graph, placed, staged, data_file(target), linked=linked)
            else:
                model = serialize_model(graph, placed, lambda proto, tensor_data, name: tensor_data.fill(proto, name))
                staged.write_bytes(_serialize(model))
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
        publish(staged, target)
    data_folder = DataFolder.of_model(target)
    for tensor in _stored(placed):
        if tensor.tensor_data in replaced:
            tensor.values = ProtoTensor(replaced[tensor.tensor_data], data_folder)


def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants of a graph, as `save` writes them."""
    return sum(tensor.tensor_data.nbytes for tensor in _stored(place_constants(restore_classes(graph))))


def _write_with_sidecar(
    graph: Graph, placed: Mapping[Graph, list[Constant]], staged: Path, sidecar: Path, *, linked: bool
) -> Mapping[TensorData, TensorProto]:
    """Return the values that lie in the data file that is going to be replaced, with their new tensors."""
    with data_file(staged).open("xb") as file:
        writer = SidecarWriter(file, sidecar, linked=linked)
        model = serialize_model(graph, placed, writer.store)
    staged.write_bytes(_serialize(model))
    if not writer.end:
        data_file(staged).unlink()
        return {}
    return writer.replaced


def _stored(placed: Mapping[Graph, list[Constant]]) -> Iterator[Constant]:
    for scope, tensors in placed.items():
        yield from tensors
        yield from attribute_constants(scope)


def _serialize(model: ModelProto) -> bytes:
    try:
        data: bytes = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError("the model exceeds the 2 GiB of one ONNX file; save it with external data") from error
    return data


# External data

SMALLEST_EXTERNAL_BYTES = 1024
"""Smaller tensors stay in the model."""

# Errors of a system kernel that cannot copy between these two files.
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class SidecarWriter:
    """Stream tensors into the external data file of a model.

    Attributes:
        end: bytes written so far.
        replaced: values that lie in the file which this one will replace, with their new tensors.
    """

    def __init__(self, file: BinaryIO, final: Path, *, linked: bool = False) -> None:
        """Write into ``file``, which will be renamed to ``final``; see `save` for ``linked``."""
        self.end = 0
        self._linked = linked
        self.replaced: dict[TensorData, TensorProto] = {}
        self._file = file
        self._final = final
        self._written: dict[TensorData, tuple[int, int]] = {}

    def store(self, proto: TensorProto, tensor_data: TensorData, name: str) -> None:
        """Write a tensor into the file and a reference into ``proto``.

        Strings and tensors below 1 KiB are written into ``proto`` itself.
        """
        source = self._source(tensor_data)
        if tensor_data.nbytes < SMALLEST_EXTERNAL_BYTES:
            tensor_data.fill(proto, name)
        elif source is not None and self._linked and (location := self._link(source)):
            tensor_data.fill_without_values(proto, name)
            refer(proto, location, source.offset, source.length)
        else:
            if tensor_data not in self._written:
                self._written[tensor_data] = self._append(tensor_data, source)
            offset, length = self._written[tensor_data]
            tensor_data.fill_without_values(proto, name)
            refer(proto, self._final.name, offset, length)
        if source is not None and source.path == self._final.resolve():
            self.replaced[tensor_data] = proto

    def _source(self, tensor_data: TensorData) -> DataRange | None:
        """Return where values lie in a file: external data, or an array that is mapped from a file beside the model."""
        if isinstance(tensor_data, ProtoTensor) and tensor_data.external:
            return tensor_data.data_range()
        place = None if tensor_data.stored is None else place_of(tensor_data.stored)
        if place is None or place[0].parent.resolve() != self._final.parent.resolve() or not place[0].exists():
            return None
        return DataRange("", place[0].resolve(), place[1], tensor_data.nbytes, stamp(place[0].stat()))

    def _link(self, source: DataRange) -> str:
        """Return the name of a data file in the model's folder, linked now or before; an empty string if it cannot be.

        The file that is going to be replaced gets none.
        """
        source.check()
        folder = self._final.parent.resolve()
        if source.path.parent == folder:
            return source.path.name if source.path.name != self._final.name else ""
        link = folder / f"{LINKED}{source.stamp[0]}.{source.stamp[1]}.data"
        try:
            os.link(source.path, link)
        except FileExistsError:
            return link.name if link.samefile(source.path) else ""
        except (OSError, NotImplementedError):
            return ""
        return link.name

    def _append(self, tensor_data: TensorData, source: DataRange | None) -> tuple[int, int]:
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        if source is not None:
            self._file.flush()
            _copy(source, self._file, offset)
            self._file.seek(offset + source.length)
        else:
            for chunk in tensor_data.chunks():
                self._file.write(chunk)
        self.end = self._file.tell()
        if self.end - offset != tensor_data.nbytes:
            raise ModelError(f"{tensor_data} gave {self.end - offset} bytes, expected {tensor_data.nbytes}")
        return offset, tensor_data.nbytes


def refer(proto: TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor without values refer to ``length`` bytes at ``offset`` of the file called ``location``."""
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        proto.external_data.add(key=key, value=value)


def _copy(source: DataRange, target: BinaryIO, offset: int) -> None:
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
    # Return the number of bytes copied, which may be less than all.
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
