"""Give every tensor a name that no other tensor of the model has."""

from __future__ import annotations

from onnxq.ir import Graph, Names, Tensor, place_constants
from onnxq.rewrite import Changes, Pass


class NameTensors(Pass):
    """Number the names that tensors of several graphs share, as those of both branches of a merged decoder do.

    Plans and statistics tell tensors apart by name, so names must be unique over all graphs. Tensors of the main graph
    keep theirs, and so does the first body that has a name; inputs and outputs of bodies are known by their positions.
    Leaves sparse initializers, which are carried as they were read.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rename; ``changed`` holds the new names."""
        shared = _sharing_names(graph) if any(node.attrs and node.bodies() for node in graph.nodes) else []
        if not shared:
            return Changes()
        names = Names(graph)
        for tensor in shared:
            tensor.name = names.fresh(tensor.name)
        return Changes(tuple(tensor.name for tensor in shared))


def _sharing_names(graph: Graph) -> list[Tensor]:
    """Return the tensors of bodies that are called like one of a graph before theirs."""
    placed = place_constants(graph)
    seen = {tensor.name for scope in placed for tensor, _ in scope.sparse_initializers}
    shared: list[Tensor] = []
    for scope, stored in placed.items():
        made = (tensor for node in scope.nodes for tensor in node.outputs if tensor.name)
        for tensor in (*scope.inputs, *stored, *made):
            if tensor.name in seen and scope.parent is not None:
                shared.append(tensor)
            seen.add(tensor.name)
    return shared
