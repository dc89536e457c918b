"""Read model files, ModelProtos and plain GraphSurgeon graphs as a Graph, without loading external data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto, TensorProto
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from onnx_graphsurgeon.util.exception import OnnxGraphSurgeonException

from onnxq.errors import ModelError, OutputError
from onnxq.ir.data_types import data_type_name, data_type_of, is_packed
from onnxq.ir.deserialize import check_text, deserialize_graph
from onnxq.ir.elements import canonical_domain
from onnxq.ir.external_data import DataFolder
from onnxq.ir.graph import Graph, without_graph
from onnxq.ir.order import toposort
from onnxq.ir.queries import constants
from onnxq.ir.tensor_data import ProtoTensor, TensorData
from onnxq.system.publish import check_output, data_file

_GIT_LFS = b"version https://git-lfs"


def load(path: str | os.PathLike[str]) -> Graph:
    """Read a model file. Its external data must exist in the same folder and fit, but is not loaded.

    Args:
        path: .onnx file.

    Raises:
        ModelError: the file is missing, is not ONNX, is damaged, or holds a graph that cannot be executed.

    >>> len(load("models/gru.onnx").nodes)
    34
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
    tensor_data: Callable[[TensorProto], TensorData] | None = None,
) -> Graph:
    """Read a model in memory. The graph refers to the proto, which must not be changed afterwards.

    Args:
        model: the model.
        folder: the folder of its external data; without one, external constants cannot be loaded.
        tensor_data: wraps each stored tensor; by default a ProtoTensor.

    Raises:
        ModelError: the model is incomplete, or holds a graph that cannot be executed.
    """
    data_folder = folder if isinstance(folder, DataFolder | None) else DataFolder(Path(folder))
    _check_model(model)
    imports = {canonical_domain(entry.domain): entry.version for entry in model.opset_import}
    if not imports and model.ir_version < 3:
        imports[""] = 1
    graph = deserialize_graph(model.graph, imports, tensor_data or (lambda proto: ProtoTensor(proto, data_folder)))
    graph.model_source = model
    graph.ir_version = model.ir_version
    graph.producer_name, graph.producer_version = model.producer_name, model.producer_version
    graph.functions = list(model.functions)
    graph.folder = data_folder
    toposort(graph)
    return graph


def as_graph(model: str | os.PathLike[str] | ModelProto | gs.Graph) -> Graph:
    """Return a Graph that the caller may edit. The given model stays as it is; the values of its constants are shared.

    An ONNXProgram of torch.onnx.export is taken by its ``model_proto``.

    Raises:
        ModelError: the model cannot be read, or is not a path, a ModelProto or a GraphSurgeon graph.
    """
    if isinstance(model, Graph):
        return model.copy()
    if isinstance(model, str | os.PathLike):
        return load(model)
    if (proto := as_proto(model)) is not None:
        graph = read_model(proto)
        graph.model_source = without_graph(proto)
        return graph
    raise ModelError(
        f"the model is of type {type(model).__name__}, expected a path, an onnx.ModelProto or a GraphSurgeon graph"
    )


def as_proto(model: object) -> ModelProto | None:
    """Return the ModelProto of a caller's model in memory; None for a `Graph`, which only `save` writes.

    Raises:
        ModelError: GraphSurgeon cannot export a plain graph of its own, or would change it.
    """
    if isinstance(model, ModelProto):
        return model
    if isinstance(model, gs.Graph):
        return None if isinstance(model, Graph) else export_plain_graph(model)
    exported = getattr(model, "model_proto", None)
    return exported if isinstance(exported, ModelProto) else None


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
        if not canonical_domain(entry.domain) and not 1 <= entry.version <= newest:
            raise ModelError(
                f"the model asks for ONNX opset {entry.version}, but the installed onnx {onnx.__version__} "
                f"knows 1 to {newest}"
            )


def open_model(model: str | Path | Any, output: str | Path | None) -> tuple[Graph, Path | None, Path | None]:
    """Open a model, and refuse an output path that would overwrite it; return the graph and both paths.

    The first path is None if the model was not given as a path, the second if ``output`` is None.

    Raises:
        ModelError: the model cannot be read.
        OutputError: the output cannot be written, or is the model itself or its data.
    """
    source = Path(model) if isinstance(model, (str, Path)) else None
    file = Path(output) if output is not None else None
    if file is not None:
        check_output(file, source)
    graph = as_graph(model)
    if file is not None:
        refuse_overwriting(graph, data_file(file))
    return graph, source, file


def refuse_overwriting(graph: Graph, data: Path) -> None:
    """Raise OutputError if ``data``, the external data file to write, is read by the model."""
    external = (tensor.tensor_data for tensor in constants(graph) if tensor.tensor_data.external)
    read = {tensor_data.data_range().path for tensor_data in external if isinstance(tensor_data, ProtoTensor)}
    if data.exists() and any(data.samefile(path) for path in read):
        raise OutputError(f"output data {data} is the external data of the model itself; give another name")


# Plain GraphSurgeon graphs, which are exported only if that loses nothing

_ADVICE = "read the model with onnxq.load instead of GraphSurgeon's import"


def export_plain_graph(graph: gs.Graph) -> ModelProto:
    """Return the model of a plain GraphSurgeon graph, which is not changed.

    Raises:
        ModelError: GraphSurgeon cannot export the graph, or would change the type of a constant or the name of a shared
            one.
    """
    constants = list(_constants(graph))
    _refuse_losses(constants)
    domains = graph.import_domains
    imported = [(tensor._values, tensor._values.tensor) for tensor in constants if _is_imported(tensor)]
    try:
        # The exporter writes names into the protos that the graph was imported from, so give it copies.
        for values, proto in imported:
            values.tensor = TensorProto()
            values.tensor.CopyFrom(proto)
        # The exporter also adds domains to the graph's list, which belongs to the imported model.
        graph.import_domains = None if domains is None else list(domains)
        model: ModelProto = gs.export_onnx(graph, do_type_check=False)  # noqa: TID251 - losses are refused above
    except (
        OnnxGraphSurgeonException,
        AssertionError,
        AttributeError,
        TypeError,
        UnboundLocalError,
        ValueError,
    ) as error:
        raise ModelError(f"GraphSurgeon cannot export the graph {graph.name!r}: {error}") from error
    finally:
        graph.import_domains = domains
        for values, proto in imported:
            values.tensor = proto
    for entry in model.opset_import:
        if not canonical_domain(entry.domain):
            # The exporter ignores an opset that was set after the import.
            entry.version = graph.opset
    if graph.ir_version is None:
        # GraphSurgeon writes onnx's newest IR version, which onnxruntime may not load. The writer sets the lowest one.
        model.ClearField("ir_version")
    return model


def _constants(graph: gs.Graph) -> Iterator[Any]:
    pending = [graph]
    seen: set[int] = set()
    while pending:
        scope = pending.pop()
        for node in scope.nodes:
            pending.extend(node.subgraphs())
            for value in (*node.inputs, *node.attrs.values()):
                if isinstance(value, gs.Constant) and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def _is_imported(tensor: Any) -> bool:
    return isinstance(tensor._values, LazyValues) and not isinstance(tensor._values, SparseValues)


def _refuse_losses(constants: list[Any]) -> None:
    owner: dict[int, str] = {}
    for tensor in constants:
        if isinstance(tensor._values, SparseValues):
            continue
        if isinstance(tensor._values, LazyValues):
            first = owner.setdefault(id(tensor._values), tensor.name)
            if first != tensor.name:
                raise ModelError(
                    f"constants {first!r} and {tensor.name!r} share one stored tensor, and GraphSurgeon would give "
                    f"both the same name; {_ADVICE}"
                )
            continue
        try:
            data_type = data_type_of(np.asarray(tensor._values).dtype)
        except TypeError as error:
            raise ModelError(f"constant {tensor.name!r} cannot be stored: {error}") from error
        # GraphSurgeon writes packed types one to a byte, fails on strings, and writes FLOAT8E4M3FNUZ as another type.
        if is_packed(data_type) or data_type in (TensorProto.STRING, TensorProto.FLOAT8E4M3FNUZ):
            raise ModelError(
                f"constant {tensor.name!r} holds {data_type_name(data_type)} values, which GraphSurgeon cannot export; "
                f"make it with onnxq.ir.constant in a graph from onnxq.load"
            )
