"""Edits that rebuild the lists of a graph once, however many nodes are inserted or removed; metadata removal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, NodeProto, ValueInfoProto

from onnxq.errors import ModelError
from onnxq.ir.elements import Node, Tensor
from onnxq.ir.graph import Graph, restore_classes
from onnxq.ir.protos import copy_other_fields
from onnxq.ir.queries import all_graphs, owner_graphs


def insert_nodes(
    graph: Graph,
    *,
    before: Mapping[Node, Sequence[Node]] | None = None,
    after: Mapping[Node, Sequence[Node]] | None = None,
    first: Mapping[Graph, Sequence[Node]] | None = None,
) -> None:
    """Insert nodes into a graph or its bodies: before anchor nodes, after them, and at the beginning of graphs.

    Raises:
        ModelError: neither the graph nor its bodies list an anchor node.
    """
    before, after, first = before or {}, after or {}, first or {}
    anchors = (*before, *after)
    owners = owner_graphs(graph) if anchors else {}
    for anchor in anchors:
        if anchor not in owners:
            raise ModelError(
                f"nodes cannot be inserted beside {anchor.op} node {anchor.name!r}: graph {graph.name!r} and its "
                "bodies do not list it"
            )
    for scope in dict.fromkeys((*first, *(owners[anchor] for anchor in anchors))):
        spliced = list(first.get(scope, ()))
        for node in scope.nodes:
            spliced += (*before.get(node, ()), node, *after.get(node, ()))
        scope.nodes[:] = spliced


def remove_nodes(graph: Graph, nodes: Collection[Node]) -> None:
    """Remove nodes from a graph or its bodies, and detach them and the nodes of their bodies from all tensors.

    Args:
        graph: main graph, or a body.
        nodes: of the graph or of its bodies.

    >>> import onnxq
    >>> graph = onnxq.load("models/gru.onnx")
    >>> remove_nodes(graph, graph.nodes[-1:])
    """
    replace_nodes(graph, dict.fromkeys(nodes, ()))


def replace_nodes(graph: Graph, replacements: Mapping[Node, Sequence[Node]]) -> None:
    """Replace nodes of a graph or its bodies, and detach the old nodes as `remove_nodes` does.

    The new nodes must already make the outputs that others read.
    """
    if not replacements:
        return
    for scope in all_graphs(graph):
        if any(node in replacements for node in scope.nodes):
            scope.nodes[:] = [new for node in scope.nodes for new in replacements.get(node, (node,))]
    _detach(set(replacements))


def replace_uses(
    old: Tensor,
    new: Tensor,
    consumers: Collection[Node] | None = None,
    *,
    graph_outputs: bool = False,
) -> None:
    """Make nodes read ``new`` wherever they read ``old``, in time linear in the number of uses.

    Args:
        old: the tensor to take away.
        new: the tensor to read instead. A node that computes it from ``old`` must not be among the consumers.
        consumers: the nodes to change, in any graph; None for all consumers of ``old`` but the producers of ``new``.
        graph_outputs: also replace ``old`` among the outputs of graphs and bodies. The names of a model's outputs are
            part of its interface: if the main graph returned ``old``, the two tensors swap names.

    >>> import onnxq
    >>> graph = onnxq.load("models/gru.onnx")
    >>> replace_uses(graph.nodes[1].outputs[0], graph.inputs[0])
    """
    chosen = set(old.outputs) - set(new.inputs) if consumers is None else set(consumers)
    kept: list[Node] = []
    gained: list[Node] = []
    for node in dict.fromkeys(old.outputs):
        for index, tensor in enumerate(node.inputs):
            if tensor is old:
                if node in chosen:
                    list.__setitem__(node.inputs, index, new)
                    gained.append(node)
                else:
                    kept.append(node)
    list.__setitem__(old.outputs, slice(None), kept)
    list.extend(new.outputs, gained)
    for scope in dict.fromkeys(old.graph_output_of) if graph_outputs else ():
        scope.outputs = [new if tensor is old else tensor for tensor in scope.outputs]
        if scope.parent is None:
            old.name, new.name = new.name, old.name


def remove_unused(graph: Graph) -> None:
    """Remove nodes that no output depends on, in all scopes, and declared constants that lost their last consumer.

    What a body reads from enclosing graphs counts as used while the node that holds the body is used. Graph inputs
    stay. Initializers stay if a caller may override them or if they were already unused in the model as read.
    """
    restore_classes(graph)
    root_scopes = list(all_graphs(graph))
    holder = {body: node for scope in root_scopes for node in scope.nodes if node.attrs for body in node.subgraphs()}
    needed: set[Node] = set()
    pending: list[Tensor] = list(graph.outputs)
    while pending:
        for producer in pending.pop().inputs:
            if producer not in needed:
                needed.add(producer)
                pending.extend(producer.inputs)
                for body in producer.subgraphs() if producer.attrs else ():
                    pending.extend(body.outputs)
    live = [scope for scope in root_scopes if scope is graph or holder[scope] in needed]
    remove_nodes(graph, [node for scope in live for node in scope.nodes if node not in needed])
    for scope in all_graphs(graph):
        returned = set(scope.outputs) | set(scope.inputs)
        scope.initializers[:] = [
            tensor
            for tensor in scope.initializers
            if tensor.outputs or tensor.declared_unused or tensor.overridable_input is not None or tensor in returned
        ]


def _detach(gone: set[Node]) -> None:
    """Empty the inputs and outputs of nodes and of the nodes in their bodies, visiting each tensor once."""
    inner = {node for outer in gone for body in outer.subgraphs() for scope in all_graphs(body) for node in scope.nodes}
    everything = gone | inner
    read = {tensor: None for node in everything for tensor in node.inputs}
    written = {tensor: None for node in everything for tensor in node.outputs}
    for tensor in read:
        list.__setitem__(tensor.outputs, slice(None), [node for node in tensor.outputs if node not in everything])
    for tensor in written:
        list.__setitem__(tensor.inputs, slice(None), [node for node in tensor.inputs if node not in everything])
    for node in everything:
        list.clear(node.inputs)
        list.clear(node.outputs)


# Metadata that exporters write for people and tools, and that no runtime reads

_METADATA: Final = frozenset({"doc_string", "metadata_props"})
# The doc_string of a graph stays; nodes and initializers are written from the Graph, not from its source.
_NOT_IN_GRAPHS: Final = frozenset({"metadata_props", "node", "initializer", "sparse_initializer"})
_LARGE: Final = frozenset(
    {
        AttributeProto.GRAPH,
        AttributeProto.GRAPHS,
        AttributeProto.SPARSE_TENSOR,
        AttributeProto.SPARSE_TENSORS,
        AttributeProto.TENSOR,
        AttributeProto.TENSORS,
    }
)


def metadata_bytes(graph: Graph) -> int:
    """Return the size in a model's file of the metadata of nodes, tensors and graphs."""
    return sum(_bytes(source) for scope in all_graphs(graph) for source in _sources(scope))


def strip_metadata(graph: Graph) -> list[str]:
    """Stop writing the metadata of nodes, tensors and graphs; return the names of the nodes and tensors that had some.

    The documentation of graphs and the metadata of the model stay. Protos that were read are not changed.
    """
    changed: list[str] = []
    for scope in all_graphs(graph):
        for node in scope.nodes:
            if node.source is not None and _bytes(node.source):
                node.source = _bare_node(node.source)
                changed.append(node.name)
            for tensor in node.outputs:
                source = getattr(tensor, "source", None)
                if source is not None and _bytes(source):
                    tensor.source = _bare_declaration(source)
                    changed.append(tensor.name)
        if scope.source is not None and any(map(_bytes, (scope.source, *scope.source.value_info))):
            scope.source = _bare_graph(scope.source)
    return changed


def _sources(scope: Graph) -> Iterator[Message]:
    yield from (node.source for node in scope.nodes if node.source is not None)
    if scope.source is not None:
        yield scope.source
        yield from scope.source.value_info


def _bytes(source: Any) -> int:
    # The bytes that stripping a proto saves, tags and lengths included.
    parts = [entry.ByteSize() for entry in source.metadata_props]
    if not isinstance(source, GraphProto) and source.doc_string:
        parts.append(len(source.doc_string.encode()))
    return sum(size + 2 + (size.bit_length() - 1) // 7 for size in parts if size)


def _bare_node(source: NodeProto) -> NodeProto:
    """Return a source for the attributes of a node, without its metadata or a copy of its tensors."""
    bare = NodeProto()
    copy_other_fields(source, bare, _METADATA | {"attribute"})
    for attribute in source.attribute:
        if attribute.type in _LARGE:
            bare.attribute.add(name=attribute.name, type=attribute.type)
        else:
            bare.attribute.add().CopyFrom(attribute)
    return bare


def _bare_declaration(source: ValueInfoProto) -> ValueInfoProto:
    bare = ValueInfoProto()
    copy_other_fields(source, bare, _METADATA)
    return bare


def _bare_graph(source: GraphProto) -> GraphProto:
    bare = GraphProto()
    copy_other_fields(source, bare, _NOT_IN_GRAPHS)
    for info in bare.value_info:
        for name in _METADATA:
            info.ClearField(name)
    return bare
