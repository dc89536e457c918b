"""Writing: a Graph becomes a ModelProto, or files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError, OutputError
from onnxq.graph.elements import Constant
from onnxq.graph.emit import emit_model
from onnxq.graph.external import DataFolder
from onnxq.graph.model import Graph
from onnxq.graph.payload import Payload
from onnxq.graph.placement import attribute_constants, place_constants
from onnxq.graph.protos import EncodeError
from onnxq.graph.sidecar import SidecarWriter
from onnxq.graph.stored import ProtoPayload
from onnxq.graph.surgeon import restore_classes

_LARGEST_MODEL = 2**31 - 1
_LARGEST_INLINE = 1900 * 2**20


def to_model(graph: Graph, *, folder: str | os.PathLike[str] | None = None) -> ModelProto:
    """Return the model in memory, with external data read in.

    Args:
        graph: the main graph.
        folder: external data that lies in this folder stays there, and the model keeps its references to it.

    Raises:
        ModelError: the graph is not whole, its external data cannot be read, or the model would exceed 2 GiB.
    """
    kept = None if folder is None else Path(folder).resolve()
    total = 0

    def store(proto: TensorProto, payload: Payload, name: str) -> None:
        nonlocal total
        if kept is not None and isinstance(payload, ProtoPayload) and payload.lies_in(kept):
            payload.fill_reference(proto, name)
            return
        total += payload.nbytes
        if total > _LARGEST_MODEL:
            raise ModelError("the model exceeds the 2 GiB that ONNX allows in one piece; write it with save instead")
        payload.fill(proto, name)

    return emit_model(restore_classes(graph), place_constants(graph), store)


def save(graph: Graph, path: str | os.PathLike[str], *, external_data: bool | None = None) -> None:
    """Write a model file and, where wanted, its weights to ``<file name>.data`` beside it.

    Weights are streamed, so memory is bounded by the largest of them. Files are written under temporary names and
    renamed when complete, data first; a graph may be saved over the files that it was read from.

    Args:
        graph: the main graph.
        path: the model file, replaced if it exists.
        external_data: whether tensors of 1 KiB and more go to the data file; by default when the graph was read with
            external data, or is larger than 1.9 GiB.

    Raises:
        ModelError: the graph is not whole, its external data cannot be read, or it exceeds 2 GiB in one file.
        OutputError: the folder does not exist, cannot be written, or is full.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise OutputError(f"cannot write {target}: the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise OutputError(f"cannot write {target}: it is a folder; give the name of a file in it")
    placed = place_constants(restore_classes(graph))
    payloads = [tensor.payload for tensor in _stored(placed)]
    total = sum(payload.nbytes for payload in payloads)
    if external_data is None:
        external_data = total > _LARGEST_INLINE or any(payload.external for payload in payloads)
    if not external_data and total > _LARGEST_MODEL:
        raise ModelError(f"the model of {total} bytes exceeds the 2 GiB of one ONNX file; save it with external data")
    try:
        if external_data:
            _save_with_sidecar(graph, placed, target)
        else:
            model = emit_model(graph, placed, lambda proto, payload, name: payload.fill(proto, name))
            with _temporary(target) as temporary:
                temporary.write_bytes(_serialize(model))
                temporary.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


def _save_with_sidecar(graph: Graph, placed: Mapping[Graph, list[Constant]], target: Path) -> None:
    sidecar = target.with_name(target.name + ".data")
    with _temporary(target) as temporary, _temporary(sidecar) as temporary_data:
        with temporary_data.open("xb") as file:
            writer = SidecarWriter(file, sidecar)
            model = emit_model(graph, placed, writer.store)
        temporary.write_bytes(_serialize(model))
        if writer.end:
            temporary_data.replace(sidecar)
        temporary.replace(target)
    folder = DataFolder.of_model(target)
    for tensor in _stored(placed):
        if tensor.payload in writer.replaced:
            tensor.values = ProtoPayload(writer.replaced[tensor.payload], folder)


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


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yield an unused path beside the target, and remove what is left there at the end."""
    path = target.with_name(f".onnxq-{secrets.token_hex(8)}.tmp")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
