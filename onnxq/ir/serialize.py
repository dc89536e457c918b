"""Write a Graph as a ModelProto: unchanged parts as they were read, everything else from the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxq.errors import ModelError
from onnxq.ir.attributes import write_attribute
from onnxq.ir.declarations import is_declarable, serialize_declaration
from onnxq.ir.elements import Constant, Node, Tensor, canonical_domain
from onnxq.ir.graph import Graph
from onnxq.ir.order import sorted_nodes
from onnxq.ir.protos import copy_other_fields
from onnxq.ir.queries import Visible, all_graphs
from onnxq.ir.tensor_data import TensorData
from onnxq.ir.versions import minimum_ir_version

Store = Callable[[TensorProto, TensorData, str], None]
"""Writes values under a name into an empty TensorProto."""

_MODEL_FIELDS = {"graph", "opset_import", "ir_version", "functions", "producer_name", "producer_version"}
_SHOWN = 40
_GRAPH_FIELDS = {"node", "name", "initializer", "sparse_initializer", "doc_string", "input", "output", "value_info"}
_NODE_FIELDS = {"input", "output", "name", "op_type", "domain", "attribute"}


def serialize_model(graph: Graph, placed: Mapping[Graph, list[Constant]], store: Store) -> ModelProto:
    """Return the proto of a main graph after `restore_classes`; ``placed`` has the constants that each graph declares.

    Raises:
        ModelError: two tensors of a graph share a name, a node reads a tensor that it cannot see, or text is not UTF-8.
    """
    try:
        return _emit_model(graph, placed, store)
    except UnicodeDecodeError as error:
        start = bytes(error.object)[:_SHOWN]
        raise ModelError(f"the model holds text that is not UTF-8, such as {start!r}; correct it first") from error


def _emit_model(graph: Graph, placed: Mapping[Graph, list[Constant]], store: Store) -> ModelProto:
    model = ModelProto()
    source = graph.model_source if graph.model_source is not None else ModelProto()
    copy_other_fields(source, model, _MODEL_FIELDS)
    model.functions.extend(graph.functions)
    for name in ("producer_name", "producer_version"):
        value = getattr(graph, name)
        if value or source.HasField(name):
            setattr(model, name, value)
    emission = _Emission(placed, store)
    emission.graph(graph, model.graph, None)
    _emit_versions(graph, source, model, emission)
    return model


def _emit_versions(graph: Graph, source: ModelProto, model: ModelProto, emission: _Emission) -> None:
    imports = dict(graph.opset_imports)
    for domain in sorted(emission.domains - imports.keys()):
        imports[domain] = 1
    read = {canonical_domain(entry.domain): entry.version for entry in source.opset_import}
    if imports == read and len(read) == len(source.opset_import):
        model.opset_import.extend(source.opset_import)
    else:
        for domain, version in imports.items():
            entry = model.opset_import.add()
            entry.domain = domain
            entry.version = version
    minimum = minimum_ir_version(graph.opset, all_initializers_are_inputs=emission.all_initializers_are_inputs)
    model.ir_version = max(graph.ir_version or 0, minimum)


class _Visible(Visible):
    def declare(self, tensor: Tensor, graph: Graph) -> None:
        declared = self.tensors.setdefault(tensor.name, tensor)
        if declared is not tensor:
            raise ModelError(
                f"graph {graph.name!r} has two tensors named {tensor.name!r}; take new names from Names.unique"
            )

    def check(self, tensor: Tensor, reader: Node | Graph) -> None:
        visible = self.find(tensor.name)
        if visible is tensor:
            return
        who = _describe(reader) if isinstance(reader, Node) else f"the output list of graph {reader.name!r}"
        if visible is None:
            raise ModelError(f"{who} reads the tensor {tensor.name!r}, which nothing produces where it could see it")
        raise ModelError(f"{who} reads a tensor {tensor.name!r}, but another tensor of that name hides it")


@dataclass(eq=False)
class _Emission:
    placed: Mapping[Graph, list[Constant]]
    store: Store
    domains: set[str] = field(default_factory=set)
    all_initializers_are_inputs: bool = True

    def graph(self, graph: Graph, target: GraphProto, around: _Visible | None) -> None:
        source = graph.source if graph.source is not None else GraphProto()
        copy_other_fields(source, target, _GRAPH_FIELDS)
        for name in ("name", "doc_string"):
            value = getattr(graph, name)
            if value or source.HasField(name):
                setattr(target, name, value)
        nodes = sorted_nodes(graph)
        visible = self._declare(graph, nodes, around)
        self._stored_tensors(graph, target)
        for node in nodes:
            self._node(node, target.node.add(), visible)
        self._outputs(graph, source, target, visible)
        self._value_info(graph, nodes, source, target, visible)

    def _declare(self, graph: Graph, nodes: list[Node], around: _Visible | None) -> _Visible:
        visible = _Visible(around)
        stored = (*self.placed[graph], *(tensor for tensor, _ in graph.sparse_initializers))
        for tensor in (*graph.inputs, *stored):
            visible.declare(tensor, graph)
        for node in nodes:
            for tensor in node.outputs:
                if not tensor.name:
                    continue
                if tensor.name in visible.tensors:
                    raise ModelError(
                        f"{_describe(node)} makes {tensor.name!r}, but graph {graph.name!r} has a tensor of that name "
                        "already; take new names from Names.unique"
                    )
                visible.declare(tensor, graph)
        return visible

    def _stored_tensors(self, graph: Graph, target: GraphProto) -> None:
        inputs = _inputs(graph, self.placed[graph])
        for tensor in inputs:
            source = tensor.overridable_input if isinstance(tensor, Constant) else tensor.source
            serialize_declaration(target.input.add(), tensor, source, names=graph.parent is None)
        for tensor in self.placed[graph]:
            self.store(target.initializer.add(), tensor.tensor_data, tensor.name)
            if tensor not in inputs:
                self.all_initializers_are_inputs = False
        target.sparse_initializer.extend(proto for _, proto in graph.sparse_initializers)

    def _node(self, node: Node, target: NodeProto, visible: _Visible) -> None:
        source = node.source
        if source is not None:
            copy_other_fields(source, target, _NODE_FIELDS)
        target.op_type = node.op
        if node.name or (source is not None and source.HasField("name")):
            target.name = node.name
        if node.domain:
            target.domain = node.domain
            self.domains.add(node.domain)
        elif source is not None and source.HasField("domain") and not canonical_domain(source.domain):
            # The domain of ONNX keeps the spelling of the model.
            target.domain = source.domain
        for tensor in node.inputs:
            if tensor.name:
                visible.check(tensor, node)
        target.input.extend([tensor.name for tensor in node.inputs])
        target.output.extend([tensor.name for tensor in node.outputs])
        if node.attrs:
            sources = {proto.name: proto for proto in source.attribute} if source is not None else {}
            for name, value in node.attrs.items():
                self._attribute(target.attribute.add(), node, name, value, sources.get(name), visible)

    def _attribute(
        self,
        target: AttributeProto,
        node: Node,
        name: str,
        value: Any,
        source: AttributeProto | None,
        visible: _Visible,
    ) -> None:
        bodies = value if isinstance(value, list) and value and isinstance(value[0], Graph) else None
        if not isinstance(value, Graph | Constant) and bodies is None:
            try:
                write_attribute(target, name, value, source)
            except (TypeError, ValueError) as error:
                raise ModelError(
                    f"{_describe(node)} has the attribute {name!r} with the value {value!r}, which ONNX cannot store"
                ) from error
            return
        target.name = name
        if source is not None and source.doc_string:
            target.doc_string = source.doc_string
        if isinstance(value, Constant):
            target.type = AttributeProto.TENSOR
            self.store(target.t, value.tensor_data, value.name)
        elif bodies is None:
            target.type = AttributeProto.GRAPH
            self.graph(value, target.g, visible)
        else:
            target.type = AttributeProto.GRAPHS
            for body in bodies:
                self.graph(body, target.graphs.add(), visible)

    def _outputs(self, graph: Graph, source: GraphProto, target: GraphProto, visible: _Visible) -> None:
        declared = {info.name: info for info in source.output}
        for tensor in graph.outputs:
            visible.check(tensor, graph)
            serialize_declaration(target.output.add(), tensor, declared.get(tensor.name), names=graph.parent is None)

    def _value_info(
        self, graph: Graph, nodes: list[Node], source: GraphProto, target: GraphProto, visible: _Visible
    ) -> None:
        listed = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
        for info in source.value_info:
            tensor = visible.tensors.get(info.name)
            if tensor is not None:
                listed.add(info.name)
                if is_declarable(tensor):
                    serialize_declaration(target.value_info.add(), tensor, info, complete=False)
            elif info.name in graph.unattached:
                target.value_info.add().CopyFrom(info)
        for node in nodes:
            for tensor in node.outputs:
                if tensor.name and tensor.name not in listed and is_declarable(tensor):
                    serialize_declaration(target.value_info.add(), tensor, None, complete=False)


def _inputs(graph: Graph, placed: list[Constant]) -> dict[Tensor, None]:
    # Inputs and overridable initializers are interleaved in the order in which they were read.
    stored = {tensor for tensor in placed if tensor.overridable_input is not None}
    sparse = {tensor for tensor, _ in graph.sparse_initializers}
    wanted, ordered = set(graph.inputs), set(graph.input_order)
    as_read = [tensor for tensor in graph.input_order if tensor in wanted]
    if as_read == [tensor for tensor in graph.inputs if tensor in ordered]:
        first = [tensor for tensor in graph.input_order if tensor in wanted or tensor in stored or tensor in sparse]
    else:
        first = list(graph.inputs)
    return dict.fromkeys([*first, *graph.inputs, *(tensor for tensor in placed if tensor in stored)])


def _describe(node: Node) -> str:
    outputs = [tensor.name for tensor in node.outputs]
    return f"{node.op} node {node.name!r}" if node.name else f"the {node.op} node that makes {outputs}"


# Placement of constants: each is declared once, in a graph where all its consumers can see it


def place_constants(graph: Graph) -> dict[Graph, list[Constant]]:
    """Return for every graph the constants that it must declare.

    A constant stays in the graph that declares it unless it is also read outside that graph. A new constant goes into
    the innermost graph around all its consumers. Unused constants are dropped, unless a caller may feed them or they
    were already unused when read.
    """
    placed: dict[Graph, list[Constant]] = {}
    depth: dict[Graph, int] = {}
    homes: dict[Constant, Graph] = {}
    used: set[Constant] = set()
    for scope in all_graphs(graph):
        placed[scope] = []
        depth[scope] = depth[scope.parent] + 1 if scope.parent in depth else 0
        for initializer in scope.initializers:
            homes.setdefault(initializer, scope)
            if initializer.declared_unused or initializer.overridable_input is not None:
                used.add(initializer)
    for scope in placed:
        for tensor in constants_read(scope):
            used.add(tensor)
            homes[tensor] = _common(homes.get(tensor, scope), scope, depth)
    for tensor, home in homes.items():
        if tensor in used:
            placed[home].append(tensor)
    return placed


def constants_read(scope: Graph) -> Iterator[Constant]:
    """Yield the constants among the inputs of a graph's nodes and among the graph's own inputs and outputs."""
    for node in scope.nodes:
        for tensor in node.inputs:
            if isinstance(tensor, Constant):
                yield tensor
    for tensor in (*scope.inputs, *scope.outputs):
        if isinstance(tensor, Constant):
            yield tensor


def attribute_constants(scope: Graph) -> Iterator[Constant]:
    """Yield the tensors in the attributes of one graph's nodes."""
    for node in scope.nodes:
        for value in node.attrs.values():
            if isinstance(value, Constant):
                yield value


def _common(left: Graph, right: Graph, depth: dict[Graph, int]) -> Graph:
    while left is not right:
        if depth[left] < depth[right]:
            left, right = right, left
        assert left.parent is not None, "two graphs of one model meet at its root"
        left = left.parent
    return left
