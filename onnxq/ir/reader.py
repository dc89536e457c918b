"""Reading: model files, ModelProtos and plain GraphSurgeon graphs become a Graph, without loading external data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError
from onnxq.ir.copies import without_graph
from onnxq.ir.elements import domain_named
from onnxq.ir.external import DataFolder
from onnxq.ir.model import Graph
from onnxq.ir.order import toposort
from onnxq.ir.parse import check_text, parse_graph
from onnxq.ir.payload import Payload
from onnxq.ir.plain_graphs import export_plain_graph
from onnxq.ir.protos import DecodeError
from onnxq.ir.stored import ProtoPayload
from onnxq.ir.surgeon import restore_classes

_GIT_LFS = b"version https://git-lfs"


def load(path: str | os.PathLike[str]) -> Graph:
    """Read a model file.

    External data is checked to be there and to fit, but not loaded.

    Args:
        path: an ONNX file; its external data lies in the same folder.

    Raises:
        ModelError: the file is missing, is not ONNX, is damaged, or holds a graph that cannot be executed.
    """
    file = Path(path)
    if file.is_dir():
        raise ModelError(f"{file} is a folder; give the path of an .onnx file")
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{file} does not exist; give the path of an .onnx file") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not data:
        raise ModelError(f"{file} is empty; expected an ONNX model")
    if data.startswith(_GIT_LFS):
        raise ModelError(f"{file} is a Git LFS pointer and not the model; fetch the model with `git lfs pull`")
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(
            f"{file} is not an ONNX model, is cut short, or nests control flow too deeply; download or export it again"
        ) from error
    del data
    try:
        return read_model(model, DataFolder.of_model(file))
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error


def read_model(
    model: ModelProto,
    folder: str | os.PathLike[str] | DataFolder | None = None,
    *,
    payload: Callable[[TensorProto], Payload] | None = None,
) -> Graph:
    """Read a model in memory; the graph refers to the proto, which must not be changed afterwards.

    Args:
        model: the model.
        folder: where its external data lies; without one external constants cannot be loaded.
        payload: makes the payload of each stored tensor; a ProtoPayload by default.

    Raises:
        ModelError: the model is incomplete, or holds a graph that cannot be executed.
    """
    data_folder = folder if isinstance(folder, DataFolder | None) else DataFolder(Path(folder))
    _check_model(model)
    imports = {domain_named(entry.domain): entry.version for entry in model.opset_import}
    if not imports and model.ir_version < 3:
        imports[""] = 1
    graph = parse_graph(model.graph, imports, payload or (lambda proto: ProtoPayload(proto, data_folder)))
    graph.model_source = model
    graph.ir_version = model.ir_version
    graph.producer_name, graph.producer_version = model.producer_name, model.producer_version
    graph.functions = list(model.functions)
    graph.folder = data_folder
    toposort(graph)
    return graph


def from_graphsurgeon(graph: gs.Graph) -> Graph:
    """Return our form of a GraphSurgeon graph; one that is ours already is returned as it is.

    A plain graph is exported by GraphSurgeon first, so nothing is shared but the stored tensors it was imported with.

    Raises:
        ModelError: GraphSurgeon cannot export the graph, or would change it.
    """
    if isinstance(graph, Graph):
        return restore_classes(graph)
    return read_model(export_plain_graph(graph))


def as_graph(model: str | os.PathLike[str] | ModelProto | gs.Graph) -> Graph:
    """Return a Graph of whatever holds a model, for the caller to edit: what was given stays as it is.

    Args:
        model: a path, a ModelProto or a GraphSurgeon graph. The values of its constants are shared, not copied.

    Raises:
        ModelError: it cannot be read, or is nothing of these.
    """
    if isinstance(model, ModelProto):
        graph = read_model(model)
        graph.model_source = without_graph(model)
        return graph
    if isinstance(model, Graph):
        return model.copy()
    if isinstance(model, gs.Graph):
        return from_graphsurgeon(model)
    if isinstance(model, str | os.PathLike):
        return load(model)
    raise ModelError(
        f"the model is of type {type(model).__name__}, expected a path, an onnx.ModelProto or a GraphSurgeon graph"
    )


def _check_model(model: ModelProto) -> None:
    if not model.HasField("graph"):
        raise ModelError("the file holds no graph; expected an ONNX model")
    if not model.graph.node and not model.graph.output:
        raise ModelError("the graph is empty: it has no nodes and no outputs")
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"the model has IR version {model.ir_version}, but the installed onnx {onnx.__version__} reads up to "
            f"{onnx.IR_VERSION}; upgrade onnx"
        )
    domains = [entry.domain for entry in model.opset_import]
    check_text(model.producer_name, model.producer_version, model.domain, model.doc_string, *domains)
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if not domain_named(entry.domain) and not 1 <= entry.version <= newest:
            raise ModelError(
                f"the model asks for ONNX opset {entry.version}, but the installed onnx {onnx.__version__} "
                f"knows 1 to {newest}"
            )
