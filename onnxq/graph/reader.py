"""Reading: model files, ModelProtos and plain GraphSurgeon graphs become a Graph, without loading external data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnxq.errors import ModelError
from onnxq.graph.data_types import numpy_dtype
from onnxq.graph.declarations import read_tensor_type
from onnxq.graph.elements import Constant, Node, Tensor, Variable
from onnxq.graph.external import DataFolder
from onnxq.graph.model import Graph
from onnxq.graph.order import toposort
from onnxq.graph.payload import Payload
from onnxq.graph.protos import DecodeError, read_attribute
from onnxq.graph.schemas import check_arity
from onnxq.graph.scopes import Visible
from onnxq.graph.stored import ProtoPayload
from onnxq.graph.surgeon import export_plain_graph, restore_classes

_GIT_LFS = b"version https://git-lfs"
# Protobuf reads 100 messages inside one another: a model, and three for each level.
_DEEPEST = 32
_SHOWN = 40
_KINDS = {"sequence_type": "sequence_type", "sparse_tensor_type": "sparse_tensor_type"}


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
    imports = {("" if entry.domain == "ai.onnx" else entry.domain): entry.version for entry in model.opset_import}
    if not imports and model.ir_version < 3:
        imports[""] = 1
    reading = _Reading(imports, payload or (lambda proto: ProtoPayload(proto, data_folder)))
    graph = reading.graph(model.graph, None)
    graph.model_source = model
    graph.ir_version = model.ir_version
    graph.producer_name, graph.producer_version = model.producer_name, model.producer_version
    graph.functions = list(model.functions)
    graph.folder = data_folder
    reading.finish()
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
    """Return the Graph of whatever holds a model: a path, a ModelProto or a GraphSurgeon graph.

    Raises:
        ModelError: it cannot be read.
        TypeError: it is nothing of these.
    """
    if isinstance(model, ModelProto):
        return read_model(model)
    if isinstance(model, gs.Graph):
        return from_graphsurgeon(model)
    if isinstance(model, str | os.PathLike):
        return load(model)
    raise TypeError(f"expected a path, an onnx.ModelProto or a GraphSurgeon graph, found {type(model).__name__}")


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
    _check_text(model.producer_name, model.producer_version, model.domain, model.doc_string, *domains)
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            raise ModelError(
                f"the model asks for ONNX opset {entry.version}, but the installed onnx {onnx.__version__} "
                f"knows 1 to {newest}"
            )


@dataclass(eq=False)
class _Scope(Visible):
    """The tensors that nodes of a graph being read can name."""

    name: str = ""
    depth: int = 0

    def declare(self, tensor: Tensor, what: str) -> None:
        _check_text(tensor.name)
        if tensor.name in self.tensors:
            raise ModelError(
                f"graph {self.name!r} declares the tensor {tensor.name!r} twice, the second time as {what}"
            )
        self.tensors[tensor.name] = tensor


@dataclass(eq=False)
class _Reading:
    """One model being read."""

    opset_imports: dict[str, int]
    payload: Callable[[TensorProto], Payload]
    graphs: list[Graph] = field(default_factory=list)

    def graph(self, proto: GraphProto, parent: tuple[Graph, _Scope] | None) -> Graph:
        _check_text(proto.name, proto.doc_string)
        graph = Graph(name=proto.name, doc_string=proto.doc_string)
        graph.opset_imports = self.opset_imports
        graph.source = proto
        self.graphs.append(graph)
        scope = _Scope(name=proto.name)
        if parent is not None:
            graph.parent, scope.parent = parent
            scope.depth = parent[1].depth + 1
            if scope.depth > _DEEPEST:
                raise ModelError(f"the model nests control flow deeper than {_DEEPEST} levels, which no file can store")
        self._declare_stored_tensors(graph, proto, scope)
        infos = {info.name: info for info in (*proto.value_info, *proto.output)}
        made = [self._outputs(node, scope, infos) for node in proto.node]
        graph.unattached = frozenset(info.name for info in proto.value_info if info.name not in scope.tensors)
        for node, outputs in zip(proto.node, made, strict=True):
            graph.nodes.append(self._node(node, outputs, graph, scope))
        for output in proto.output:
            tensor = scope.find(output.name)
            if tensor is None:
                raise ModelError(
                    f"nothing produces {output.name!r}, an output of graph {proto.name!r}; the model is damaged"
                )
            graph.outputs.append(tensor)
        return graph

    def finish(self) -> None:
        """Mark the initializers that were unused from the start."""
        returned = {tensor for graph in self.graphs for tensor in graph.outputs}
        for graph in self.graphs:
            for initializer in graph.initializers:
                initializer.kept = not initializer.outputs and initializer not in returned

    def _declare_stored_tensors(self, graph: Graph, proto: GraphProto, scope: _Scope) -> None:
        declared_inputs = {info.name: info for info in proto.input}
        for stored in proto.initializer:
            initializer = Constant(stored.name, self.payload(stored))
            initializer.input_source = declared_inputs.get(stored.name)
            scope.declare(initializer, "an initializer")
            graph.initializers.append(initializer)
        for sparse in proto.sparse_initializer:
            tensor = _variable(sparse.values.name, declared_inputs.get(sparse.values.name))
            tensor.dtype, tensor.shape = numpy_dtype(sparse.values.data_type), list(sparse.dims)
            scope.declare(tensor, "a sparse initializer")
            graph.sparse_initializers.append((tensor, sparse))
        overridable = {tensor.name: tensor for tensor in graph.initializers if tensor.input_source is not None}
        sparse_names = {tensor.name: tensor for tensor, _ in graph.sparse_initializers}
        for info in proto.input:
            known = overridable.pop(info.name, None) or sparse_names.pop(info.name, None)
            if known is None:
                known = _variable(info.name, info)
                scope.declare(known, "an input")
            if not isinstance(known, Constant):
                graph.inputs.append(known)
            graph.input_order.append(known)

    def _outputs(self, node: NodeProto, scope: _Scope, infos: dict[str, ValueInfoProto]) -> list[Variable]:
        outputs = []
        for name in node.output:
            output = _variable(name, infos.get(name))
            if name:
                scope.declare(output, f"an output of {_describe(node)}")
            outputs.append(output)
        return outputs

    def _node(self, proto: NodeProto, outputs: list[Variable], graph: Graph, scope: _Scope) -> Node:
        _check_text(proto.op_type, proto.name, proto.domain)
        inputs = [self._input(name, proto, scope) for name in proto.input]
        domain = proto.domain if proto.HasField("domain") else None
        if domain in (None, "", "ai.onnx") and "" not in self.opset_imports:
            raise ModelError(f"{_describe(proto)} is an ONNX operator, but the model imports no opset of domain ''")
        if domain in (None, "", "ai.onnx"):
            check_arity(proto, self.opset_imports[""])
        node = Node(
            proto.op_type, proto.name, self._attributes(proto.attribute, (graph, scope)), inputs, outputs, domain
        )
        node.source = proto
        return node

    def _input(self, name: str, node: NodeProto, scope: _Scope) -> Tensor:
        _check_text(name)
        if not name:
            return Variable("")
        tensor = scope.find(name)
        if tensor is None:
            raise ModelError(
                f"{_describe(node)} reads the tensor {name!r}, which nothing produces; the model is damaged"
            )
        return tensor

    def _attributes(self, protos: Iterable[AttributeProto], parent: tuple[Graph, _Scope]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for proto in protos:
            _check_text(proto.name)
            if proto.ref_attr_name:
                values[proto.name] = read_attribute(proto)
            elif proto.type == AttributeProto.GRAPH:
                values[proto.name] = self.graph(proto.g, parent)
            elif proto.type == AttributeProto.GRAPHS and proto.graphs:
                values[proto.name] = [self.graph(body, parent) for body in proto.graphs]
            elif proto.type == AttributeProto.TENSOR:
                values[proto.name] = Constant(proto.t.name, self.payload(proto.t))
            else:
                values[proto.name] = read_attribute(proto)
        return values


def _check_text(*names: str) -> None:
    """Refuse what protobuf hands out as bytes because it is no text."""
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"the model holds the text {name[:_SHOWN]!r}, which is not UTF-8; it is damaged")


def _variable(name: str, info: ValueInfoProto | None) -> Variable:
    variable = Variable(name)
    if info is not None:
        variable.dtype, variable.shape = read_tensor_type(info)
        variable.type = _KINDS.get(info.type.WhichOneof("value") or "", "tensor_type")
        variable.source = info
    return variable


def _describe(node: NodeProto) -> str:
    return (
        f"{node.op_type} node {node.name!r}" if node.name else f"the {node.op_type} node that makes {list(node.output)}"
    )
