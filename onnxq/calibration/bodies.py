"""Bodies of control flow in a model's message: which there are, and the names in them."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, NodeProto, ValueInfoProto


def bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield the bodies in a graph, at any depth."""
    for node in graph.node:
        for body in own_bodies(node):
            yield body
            yield from bodies(body)


def own_bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the bodies of a node, but not those inside them."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def made_inside(graph: GraphProto) -> set[str]:
    """Return the names of what bodies are given or make, those of the main graph aside."""
    main = names_made(graph) | {tensor.name for tensor in graph.initializer}
    return {name for body in bodies(graph) for name in names_made(body)} - main


def names_made(graph: GraphProto) -> set[str]:
    """Return the names of the inputs of a graph and of what its nodes make."""
    return {value.name for value in graph.input} | {name for node in graph.node for name in node.output if name}


def unused_mark(graph: GraphProto) -> str:
    """Return an ending that no name of a model holds."""
    scopes = (graph, *bodies(graph))
    names = {name for scope in scopes for name in names_made(scope)}
    names |= {tensor.name for scope in scopes for tensor in scope.initializer}
    mark = "/tap"
    while any(mark in name for name in names):
        mark += "'"
    return mark


def known_dimensions(value: ValueInfoProto) -> list[int] | None:
    """Return the dimensions of a tensor, or None where one is not known."""
    kind = value.type.tensor_type
    known = value.type.HasField("tensor_type") and kind.HasField("shape")
    sizes = [dimension.dim_value for dimension in kind.shape.dim if dimension.HasField("dim_value")]
    return sizes if known and len(sizes) == len(kind.shape.dim) else None
