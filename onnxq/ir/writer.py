"""Writing: a Graph becomes a ModelProto, or files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError, OutputError
from onnxq.ir.elements import Constant
from onnxq.ir.emit import emit_model
from onnxq.ir.external import DataFolder
from onnxq.ir.model import Graph
from onnxq.ir.payload import Payload
from onnxq.ir.placement import attribute_constants, place_constants
from onnxq.ir.protos import EncodeError
from onnxq.ir.sidecar import SidecarWriter, refer
from onnxq.ir.spill import place_of
from onnxq.ir.stored import ProtoPayload
from onnxq.ir.surgeon import restore_classes
from onnxq.system.publish import NO_ROOM, data_file, publish, staging

_LARGEST_MODEL = 2**31 - 1
_LARGEST_INLINE = 1900 * 2**20


def to_model(graph: Graph, *, folder: str | os.PathLike[str] | None = None) -> ModelProto:
    """Return the model in memory, with external data read in.

    Args:
        graph: the main graph.
        folder: external data that lies in this folder stays there, and the model keeps its references to it; arrays
            that lie in a file there stay as well.

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
        place = place_of(payload.stored) if kept is not None and payload.stored is not None else None
        if place is not None and place[0].resolve().parent == kept:
            payload.fill_without_values(proto, name)
            refer(proto, place[0].name, place[1], payload.nbytes)
            return
        total += payload.nbytes
        if total > _LARGEST_MODEL:
            raise ModelError("the model exceeds the 2 GiB that ONNX allows in one piece; write it with save instead")
        payload.fill(proto, name)

    return emit_model(restore_classes(graph), place_constants(graph), store)


def save(graph: Graph, path: str | os.PathLike[str], *, external_data: bool | None = None) -> None:
    """Write a model file and, where wanted, its weights to ``<file name>.data`` beside it.

    Weights are streamed, so memory is bounded by the largest of them. Files are written into a temporary folder and
    renamed when complete; a graph may be saved over the files that it was read from.

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
    replaced: Mapping[Payload, TensorProto] = {}
    with staging(target) as folder:
        staged = folder / target.name
        try:
            if external_data:
                replaced = _write_with_sidecar(graph, placed, staged, data_file(target))
            else:
                model = emit_model(graph, placed, lambda proto, payload, name: payload.fill(proto, name))
                staged.write_bytes(_serialize(model))
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
        publish(staged, target)
    data_folder = DataFolder.of_model(target)
    for tensor in _stored(placed):
        if tensor.payload in replaced:
            tensor.values = ProtoPayload(replaced[tensor.payload], data_folder)


def _write_with_sidecar(
    graph: Graph, placed: Mapping[Graph, list[Constant]], staged: Path, sidecar: Path
) -> Mapping[Payload, TensorProto]:
    """Write a model and its data, and return the payloads that lie in the data file that is going to be replaced."""
    with data_file(staged).open("xb") as file:
        writer = SidecarWriter(file, sidecar)
        model = emit_model(graph, placed, writer.store)
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
