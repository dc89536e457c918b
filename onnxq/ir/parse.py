"""GraphProto to Graph: names become tensors that nodes share, and what cannot be executed is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

from onnxq.errors import ModelError
from onnxq.ir.data_types import numpy_dtype
from onnxq.ir.declarations import read_tensor_type
from onnxq.ir.elements import Constant, Node, Tensor, Variable, domain_named
from onnxq.ir.model import Graph
from onnxq.ir.payload import Payload
from onnxq.ir.protos import read_attribute
from onnxq.ir.schemas import check_node
from onnxq.ir.scopes import Visible

# Protobuf reads 100 messages inside one another: a model, and three for each level.
_DEEPEST = 32
_SHOWN = 40
_KINDS = {"sequence_type": "sequence_type", "sparse_tensor_type": "sparse_tensor_type"}


def parse_graph(proto: GraphProto, opset_imports: dict[str, int], payload: Callable[[TensorProto], Payload]) -> Graph:
    """Return the graph of a proto with its bodies, nodes in the order of the proto.

    Args:
        proto: the graph, to which the result refers.
        opset_imports: the version of each domain.
        payload: makes the payload of each stored tensor.

    Raises:
        ModelError: a name is declared twice, not at all, or is no text, a node has inputs, outputs or attributes that
            its operator cannot have, or bodies are nested too deeply.
    """
    parsing = _Parsing(opset_imports, payload)
    graph = parsing.graph(proto, None)
    parsing.finish()
    return graph


def check_text(*names: str) -> None:
    """Refuse what protobuf hands out as bytes because it is no text.

    Raises:
        ModelError: a name is not text.
    """
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"the model holds the text {name[:_SHOWN]!r}, which is not UTF-8; it is damaged")


@dataclass(eq=False)
class _Scope(Visible):
    """The tensors that nodes of a graph being parsed can name."""

    name: str = ""
    depth: int = 0

    def declare(self, tensor: Tensor, what: str) -> None:
        check_text(tensor.name)
        if tensor.name in self.tensors:
            raise ModelError(
                f"graph {self.name!r} declares the tensor {tensor.name!r} twice, the second time as {what}"
            )
        self.tensors[tensor.name] = tensor


@dataclass(eq=False)
class _Parsing:
    """One model being parsed."""

    opset_imports: dict[str, int]
    payload: Callable[[TensorProto], Payload]
    graphs: list[Graph] = field(default_factory=list)

    def graph(self, proto: GraphProto, parent: tuple[Graph, _Scope] | None) -> Graph:
        check_text(proto.name, proto.doc_string)
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
        check_text(proto.op_type, proto.name, proto.domain)
        inputs = [self._input(name, proto, scope) for name in proto.input]
        domain = domain_named(proto.domain)
        if not domain and "" not in self.opset_imports:
            raise ModelError(f"{_describe(proto)} is an ONNX operator, but the model imports no opset of domain ''")
        if not domain:
            check_node(proto, self.opset_imports[""])
        node = Node(
            proto.op_type, proto.name, self._attributes(proto.attribute, (graph, scope)), inputs, outputs, domain
        )
        node.source = proto
        return node

    def _input(self, name: str, node: NodeProto, scope: _Scope) -> Tensor:
        check_text(name)
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
            check_text(proto.name)
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
