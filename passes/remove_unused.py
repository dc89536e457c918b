"""Remove nodes and initializers that no output depends on."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.graph import Graph, remove_unused, scopes
from onnxq.passes.base import Changes, Pass


@dataclass(frozen=True)
class RemoveUnused(Pass):
    """Remove what no output of the model needs, such as the float weight behind its codes.

    Leaves graph inputs, and initializers that were unused when the model was read.
    """

    def apply(self, graph: Graph) -> Changes:
        """Remove; ``changed`` holds the names of the nodes and initializers."""
        before = _names(graph)
        remove_unused(graph)
        after = set(_names(graph))
        return Changes(tuple(name for name in before if name not in after))


def _names(graph: Graph) -> list[str]:
    return [item.name for scope in scopes(graph) for item in (*scope.nodes, *scope.initializers)]
