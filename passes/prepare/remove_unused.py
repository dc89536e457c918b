"""Remove nodes and initializers that no output depends on."""

from __future__ import annotations

from collections.abc import Iterator

from onnxq.graph import Changes, Constant, Graph, Node, Pass, remove_unused, scopes


class RemoveUnused(Pass):
    """Remove what no output of the model needs, such as the float weight behind its codes.

    Leaves graph inputs, and initializers that were unused when the model was read.
    """

    def apply(self, graph: Graph) -> Changes:
        """Remove; ``changed`` holds the names of the nodes and initializers."""
        before = [(item, _name(item)) for item in _items(graph)]
        remove_unused(graph)
        after = set(_items(graph))
        return Changes(tuple(name for item, name in before if item not in after))


def _items(graph: Graph) -> Iterator[Node | Constant]:
    for scope in scopes(graph):
        yield from scope.nodes
        yield from scope.initializers


def _name(item: Node | Constant) -> str:
    """Return the name, or for a node without one its operator and first output."""
    return item.name or f"{item.op}_{item.outputs[0].name if item.outputs else ''}"
