"""Give every node a name that no other node of the model has."""

from __future__ import annotations

from onnxq.ir import Graph, Names, Node, scopes
from onnxq.rewrite import Changes, Pass


class NameNodes(Pass):
    """Name nodes without a name after their op type and first output; number repeated names.

    Rules select nodes by name and onnxruntime refuses repeated names, so names must be unique over all graphs.
    The first node that has a name keeps it.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rename; ``changed`` holds the new names."""
        renamed = _without_a_name_of_their_own(graph)
        if not renamed:
            return Changes()
        names = Names(graph)
        for node in renamed:
            output = next((tensor.name for tensor in node.outputs if tensor.name), "")
            node.name = names.fresh(node.name or f"{node.op}_{output}")
        return Changes(tuple(node.name for node in renamed))


def _without_a_name_of_their_own(graph: Graph) -> list[Node]:
    seen = {""}
    renamed = []
    for scope in scopes(graph):
        for node in scope.nodes:
            if node.name in seen:
                renamed.append(node)
            seen.add(node.name)
    return renamed
