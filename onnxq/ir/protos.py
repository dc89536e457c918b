"""Copies of protobuf messages, and walks over the graphs and nodes of a model in this form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, NodeProto


def copy_other_fields(source: Message, target: Message, handled: Collection[str]) -> None:
    """Copy every field that is set in ``source`` and not named in ``handled``."""
    for field, value in source.ListFields():
        if field.name in handled:
            continue
        if field.message_type is None and isinstance(value, str | bytes | int | float):
            setattr(target, field.name, value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            getattr(target, field.name).extend(value)


def subgraph_protos(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and its bodies in the order of `onnxq.ir.all_graphs`."""
    pending = [graph]
    while pending:
        scope = pending.pop()
        yield scope
        bodies: list[GraphProto] = []
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    bodies.append(attribute.g)
                elif attribute.type == AttributeProto.GRAPHS:
                    bodies.extend(attribute.graphs)
        pending.extend(reversed(bodies))


def node_protos(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, each followed by the nodes of its bodies."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from node_protos(body.node)
