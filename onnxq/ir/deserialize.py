"""Read a GraphProto as a Graph: names become shared tensors, and graphs that cannot be executed are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, defs

from onnxq.errors import ModelError
from onnxq.ir.attributes import read_attribute
from onnxq.ir.data_types import numpy_dtype
from onnxq.ir.declarations import read_tensor_type
from onnxq.ir.elements import Constant, Node, Tensor, Variable, canonical_domain
from onnxq.ir.graph import Graph
from onnxq.ir.queries import Visible
from onnxq.ir.tensor_data import TensorData

# Protobuf parses at most 100 nested messages: one for the model, and three for each level of control flow.
_DEEPEST = 32
_SHOWN = 40
_KINDS = {"sequence_type": "sequence_type", "sparse_tensor_type": "sparse_tensor_type"}


def deserialize_graph(
    proto: GraphProto, opset_imports: dict[str, int], tensor_data: Callable[[TensorProto], TensorData]
) -> Graph:
    """Return the graph of a proto with its bodies; nodes keep their order.

    The graph refers to the proto. ``opset_imports`` has the version of each domain.

    Raises:
        ModelError: a name is not text, is declared twice, or is read but never declared. The number of inputs or
            outputs, or an attribute, does not fit the operator. Bodies are nested more than 32 levels deep.
    """
    parsing = _Parsing(opset_imports, tensor_data)
    graph = parsing.graph(proto, None)
    parsing.finish()
    return graph


def check_text(*names: str) -> None:
    """Raise ModelError if a name is not UTF-8; protobuf returns bytes for it."""
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"the model holds the text {name[:_SHOWN]!r}, which is not UTF-8; it is damaged")


@dataclass(eq=False)
class _Scope(Visible):
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
    opset_imports: dict[str, int]
    tensor_data: Callable[[TensorProto], TensorData]
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
        outputs_of_nodes = [self._outputs(node, scope, infos) for node in proto.node]
        graph.unattached = frozenset(info.name for info in proto.value_info if info.name not in scope.tensors)
        for node, outputs in zip(proto.node, outputs_of_nodes, strict=True):
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
        # Mark the initializers that are unused in the given model.
        returned = {tensor for graph in self.graphs for tensor in graph.outputs}
        for graph in self.graphs:
            for initializer in graph.initializers:
                initializer.declared_unused = not initializer.outputs and initializer not in returned

    def _declare_stored_tensors(self, graph: Graph, proto: GraphProto, scope: _Scope) -> None:
        declared_inputs = {info.name: info for info in proto.input}
        for stored in proto.initializer:
            initializer = Constant(stored.name, self.tensor_data(stored))
            initializer.overridable_input = declared_inputs.get(stored.name)
            scope.declare(initializer, "an initializer")
            graph.initializers.append(initializer)
        for sparse in proto.sparse_initializer:
            tensor = variable_of(sparse.values.name, declared_inputs.get(sparse.values.name))
            tensor.dtype, tensor.shape = numpy_dtype(sparse.values.data_type), list(sparse.dims)
            scope.declare(tensor, "a sparse initializer")
            graph.sparse_initializers.append((tensor, sparse))
        overridable = {tensor.name: tensor for tensor in graph.initializers if tensor.overridable_input is not None}
        sparse_names = {tensor.name: tensor for tensor, _ in graph.sparse_initializers}
        for info in proto.input:
            declared = overridable.pop(info.name, None) or sparse_names.pop(info.name, None)
            if declared is None:
                declared = variable_of(info.name, info)
                scope.declare(declared, "an input")
            if not isinstance(declared, Constant):
                graph.inputs.append(declared)
            graph.input_order.append(declared)

    def _outputs(self, node: NodeProto, scope: _Scope, infos: dict[str, ValueInfoProto]) -> list[Variable]:
        outputs = []
        for name in node.output:
            output = variable_of(name, infos.get(name))
            if name:
                scope.declare(output, f"an output of {_describe(node)}")
            outputs.append(output)
        return outputs

    def _node(self, proto: NodeProto, outputs: list[Variable], graph: Graph, scope: _Scope) -> Node:
        check_text(proto.op_type, proto.name, proto.domain)
        inputs = [self._input(name, proto, scope) for name in proto.input]
        domain = canonical_domain(proto.domain)
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
                values[proto.name] = Constant(proto.t.name, self.tensor_data(proto.t))
            else:
                values[proto.name] = read_attribute(proto)
        return values


def variable_of(name: str, info: ValueInfoProto | None) -> Variable:
    """Return a tensor as it is declared; without type and shape if it is not."""
    variable = Variable(name)
    if info is not None:
        variable.dtype, variable.shape = read_tensor_type(info.type)
        variable.type = _KINDS.get(info.type.WhichOneof("value") or "", "tensor_type")
        variable.source = info
    return variable


def _describe(node: NodeProto) -> str:
    return (
        f"{node.op_type} node {node.name!r}" if node.name else f"the {node.op_type} node that makes {list(node.output)}"
    )


# Checks against the schemas of ONNX

_Parameter = defs.OpSchema.FormalParameter
_REQUIRED = defs.OpSchema.FormalParameterOption.Single
_UNBOUNDED = 2**31 - 1


def check_node(node: NodeProto, opset: int) -> None:
    """Check the inputs, outputs and attributes of a node of the default domain against its schema.

    Code that reads a graph can then rely on required inputs and on the types of attributes.

    Raises:
        ModelError: there are too few or too many inputs or outputs, a required input, output or attribute is missing,
            or an attribute has another type.
    """
    signature = _signature(node.op_type, opset)
    if signature is None:
        return
    for names, side, what in ((node.input, signature.inputs, "input"), (node.output, signature.outputs, "output")):
        if not side.least <= len(names) <= side.most:
            raise _damaged(node, f"has {len(names)} {what}s, expected {side.expected}")
        for index in side.required:
            if index < len(names) and not names[index]:
                raise _damaged(node, f"lacks {what} {index}, which is required")
    _check_attributes(node, signature)


def _check_attributes(node: NodeProto, signature: _Signature) -> None:
    missing = set(signature.required_attributes)
    for attribute in node.attribute:
        missing.discard(attribute.name)
        expected = signature.attributes.get(attribute.name, attribute.type)
        # Files of IR version 1 leave the type of attributes undefined.
        if attribute.type not in (expected, AttributeProto.UNDEFINED):
            raise _damaged(
                node,
                f"has the attribute {attribute.name!r} of type {_type_name(attribute.type)}, "
                f"expected {_type_name(expected)}",
            )
    if missing:
        raise _damaged(node, f"lacks the attribute {min(missing)!r}, which is required")


class _Side(NamedTuple):
    # `required` has the indices that cannot be omitted.
    least: int
    most: int
    required: tuple[int, ...]

    @classmethod
    def of(cls, least: int, most: int, parameters: Sequence[_Parameter]) -> _Side:
        required = (index for index, parameter in enumerate(parameters) if parameter.option == _REQUIRED)
        return cls(least, most, tuple(required))

    @property
    def expected(self) -> str:
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} or more" if self.most >= _UNBOUNDED else f"{self.least} to {self.most}"


class _Signature(NamedTuple):
    inputs: _Side
    outputs: _Side
    # By name, values of AttributeProto.AttributeType.
    attributes: Mapping[str, int]
    required_attributes: frozenset[str]


@cache
def _signature(op_type: str, opset: int) -> _Signature | None:
    if not defs.has(op_type, max_inclusive_version=opset):
        return None
    schema = defs.get_schema(op_type, max_inclusive_version=opset)
    return _Signature(
        _Side.of(schema.min_input, schema.max_input, schema.inputs),
        _Side.of(schema.min_output, schema.max_output, schema.outputs),
        {name: _number(attribute) for name, attribute in schema.attributes.items()},
        frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def _number(attribute: Any) -> int:
    # As AttributeProto numbers the type; schemas have an enumeration of their own.
    return int(attribute.type.value)


def _type_name(type_: int) -> str:
    numbers = AttributeProto.AttributeType.values()
    return str(AttributeProto.AttributeType.Name(type_)).lower() if type_ in numbers else str(type_)


def _damaged(node: NodeProto, problem: str) -> ModelError:
    subject = f"{node.op_type} node {node.name!r}" if node.name else f"a node {node.op_type}"
    return ModelError(f"{subject} {problem}; the model is damaged")
