"""Where constants are declared: each once, in a graph from which all its users can see it."""

from __future__ import annotations

from collections.abc import Iterator

from onnxq.ir.elements import Constant
from onnxq.ir.model import Graph
from onnxq.ir.scopes import scopes


def place_constants(graph: Graph) -> dict[Graph, list[Constant]]:
    """Return for every graph the constants that it must declare.

    A constant stays in the graph that declares it unless a user outside of that graph reads it too; a new one goes
    into the innermost graph around all its users. What nothing uses any longer is left out, unless
    a caller may feed it.
    """
    placed: dict[Graph, list[Constant]] = {}
    depth: dict[Graph, int] = {}
    homes: dict[Constant, Graph] = {}
    used: set[Constant] = set()
    for scope in scopes(graph):
        placed[scope] = []
        depth[scope] = depth[scope.parent] + 1 if scope.parent in depth else 0
        for initializer in scope.initializers:
            homes.setdefault(initializer, scope)
            if initializer.kept or initializer.input_source is not None:
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
    """Yield the constants that the nodes of one graph read, that it returns, or that a caller may feed in its place."""
    for node in scope.nodes:
        for tensor in node.inputs:
            if isinstance(tensor, Constant):
                yield tensor
    for tensor in (*scope.inputs, *scope.outputs):
        if isinstance(tensor, Constant):
            yield tensor


def attribute_constants(scope: Graph) -> Iterator[Constant]:
    """Yield the tensors in the attributes of the nodes of one graph."""
    for node in scope.nodes:
        for value in node.attrs.values():
            if isinstance(value, Constant):
                yield value


def _common(one: Graph, other: Graph, depth: dict[Graph, int]) -> Graph:
    """Return the innermost graph around both."""
    while one is not other:
        if depth[one] < depth[other]:
            one, other = other, one
        assert one.parent is not None, "two graphs of one model meet at its root"
        one = one.parent
    return one
