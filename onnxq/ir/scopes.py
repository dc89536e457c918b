"""Walking a graph and the bodies inside it, and names that are new everywhere in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import onnx_graphsurgeon as gs

from onnxq.ir.elements import Constant, Node, Tensor, Variable, bodies_of

AnyGraph = TypeVar("AnyGraph")
"""Graph, whose module builds on this one."""
_HOLDERS = (gs.Graph, list)


def scopes(graph: AnyGraph) -> Iterator[AnyGraph]:
    """Yield this graph and every control-flow body inside it, a graph before its bodies, in node order."""
    pending: list[Any] = [graph]
    while pending:
        scope = pending.pop()
        yield scope
        # Not asked of each node: most hold numbers alone, and those of plain GraphSurgeon code have no such method yet.
        held = [value for node in scope.nodes for value in node.attrs.values() if isinstance(value, _HOLDERS)]
        pending.extend(reversed(bodies_of(held)))


def owner_graphs(graph: AnyGraph) -> dict[Node, AnyGraph]:
    """Return, for every node of this graph and its bodies, the graph that lists it."""
    found: Any = scopes(graph)
    return {node: scope for scope in found for node in scope.nodes}


def constants(graph: Any) -> list[Constant]:
    """Return every constant of a graph and its bodies once: declared, read by a node, or held by an attribute."""
    found: dict[Constant, None] = {}
    for scope in scopes(graph):
        found.update(dict.fromkeys(scope.initializers))
        for node in scope.nodes:
            found.update(dict.fromkeys(tensor for tensor in node.inputs if isinstance(tensor, Constant)))
            found.update(dict.fromkeys(value for value in node.attrs.values() if isinstance(value, Constant)))
    return list(found)


def inner_variables(graph: Any) -> Iterator[Variable]:
    """Yield the tensors that nodes of a graph and its bodies compute, outputs of a graph aside."""
    for scope in scopes(graph):
        outputs = set(scope.outputs)
        for node in scope.nodes:
            yield from (tensor for tensor in node.outputs if tensor.name and tensor not in outputs)


@dataclass(eq=False)
class Visible:
    """The tensors that nodes of a graph can name: its own, and those of the graphs around it.

    Attributes:
        parent: what is visible around the graph.
        tensors: the graph's own tensors by name.
    """

    parent: Visible | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def find(self, name: str) -> Tensor | None:
        """Return the tensor of that name in the innermost graph that has one."""
        scope: Visible | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope.parent
        return None


class Names:
    """The names of tensors and nodes in a graph and its bodies, and a source of new ones.

    They are collected when the first is asked for, which many passes never do. The graph around it counts too.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._next: dict[str, int] = {}

    @cached_property
    def _taken(self) -> set[str]:
        root = self._graph
        while root.parent is not None:
            root = root.parent
        taken: set[str] = set()
        for scope in scopes(root):
            nodes = scope.nodes
            taken.update([tensor.name for tensor in (*scope.inputs, *scope.outputs, *scope.initializers)])
            taken.update([tensor.name for tensor, _ in scope.sparse_initializers])
            taken.update([node.name for node in nodes])
            taken.update([tensor.name for node in nodes for tensor in node.inputs])
            taken.update([tensor.name for node in nodes for tensor in node.outputs])
            held = [value for node in nodes for value in node.attrs.values() if isinstance(value, Constant)]
            taken.update([value.name for value in held])
        return taken

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, base: str) -> str:
        """Return ``base``, or ``base.1``, ``base.2`` and so on when it is taken, and take it.

        >>> from onnxq.ir import Graph
        >>> names = Names(Graph())
        >>> names.fresh("w.codes"), names.fresh("w.codes")
        ('w.codes', 'w.codes.1')
        """
        name, number = base, self._next.get(base, 0)
        while name in self._taken or not name:
            number += 1
            name = f"{base}.{number}"
        self._next[base] = number
        self._taken.add(name)
        return name
