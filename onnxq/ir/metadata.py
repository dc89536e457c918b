"""What exporters write about nodes, tensors and graphs for people and tools, which no runtime reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, NodeProto, ValueInfoProto

from onnxq.ir.model import Graph
from onnxq.ir.protos import copy_other_fields
from onnxq.ir.scopes import scopes

_METADATA: Final = frozenset({"doc_string", "metadata_props"})
# Of a graph's own fields documentation is kept, and what the Graph itself holds is read from nowhere else.
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
    """Return how many bytes of a model's file are metadata of its nodes, tensors and graphs, as it was read."""
    return sum(_bytes(source) for scope in scopes(graph) for source in _sources(scope))


def strip_metadata(graph: Graph) -> list[str]:
    """Let a graph and its bodies be written without the metadata of nodes, tensors and graphs.

    The documentation of graphs is kept, and what belongs to the model as a whole. Protos that were read stay as they
    are.

    Returns:
        The names of the nodes and tensors that had any.
    """
    changed: list[str] = []
    for scope in scopes(graph):
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
    """Return the bytes of what is stripped from a proto, with a byte or more of tag and one or more of length each."""
    parts = [entry.ByteSize() for entry in source.metadata_props]
    if not isinstance(source, GraphProto) and source.doc_string:
        parts.append(len(source.doc_string.encode()))
    return sum(size + 2 + (size.bit_length() - 1) // 7 for size in parts if size)


def _bare_node(source: NodeProto) -> NodeProto:
    """Return what is told of a node besides its topology, without its metadata or a copy of its tensors."""
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
