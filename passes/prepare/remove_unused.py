"""Remove nodes and initializers that no output depends on."""

from __future__ import annotations

from collections.abc import Iterator

from onnxq.ir import Constant, Graph, Node, remove_unused, scopes
from onnxq.rewrite import Changes, Pass


class RemoveUnused(Pass):
    """Remove what no output of the model needs, such as the float weight behind its codes.

    Leaves graph inputs, initializers that a caller may override, and those that a quantization annotation names.
    """

    def apply(self, graph: Graph) -> Changes:
        """Remove; ``changed`` holds the names of the nodes and initializers."""
        before = [(item, _name(item)) for item in _items(graph)]
        for scope in scopes(graph):
            annotations = scope.source.quantization_annotation if scope.source is not None else ()
            named = {entry.value for one in annotations for entry in one.quant_parameter_tensor_names}
            for tensor in scope.initializers:
                tensor.kept = tensor.kept and tensor.name in named
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
