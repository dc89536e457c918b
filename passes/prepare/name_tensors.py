"""Give every tensor a name that no other tensor of the model has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxq.graph import Changes, Graph, Names, Pass, Tensor, scopes
from onnxq.modelfile import place_constants


@dataclass(frozen=True)
class NameTensors(Pass):
    """Number the names that tensors of several graphs share, as those of both branches of a merged decoder do.

    Plans and statistics tell tensors apart by name, so names must be unique over all graphs. Tensors of the main graph
    keep theirs, and so does the first body that has a name; inputs and outputs of bodies are known by their positions.
    Leaves sparse initializers, which are carried as they were read.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rename; ``changed`` holds the new names."""
        names = Names(graph)
        placed = place_constants(graph)
        seen = {tensor.name for scope in placed for tensor, _ in scope.sparse_initializers}
        changed = []
        for scope in scopes(graph):
            for tensor in (*scope.inputs, *placed[scope], *_made(scope)):
                if tensor.name in seen and scope.parent is not None:
                    tensor.name = names.fresh(tensor.name)
                    changed.append(tensor.name)
                seen.add(tensor.name)
        return Changes(tuple(changed))


def _made(scope: Graph) -> Iterator[Tensor]:
    """Yield what the nodes of one graph make, omitted outputs aside."""
    return (tensor for node in scope.nodes for tensor in node.outputs if tensor.name)
