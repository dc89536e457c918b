"""Which nodes of the model those stand for that took their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from onnxq.ir.elements import Node, Origins
from onnxq.ir.scopes import scopes

# A chain of any length may become one node.
_MOST: Final = 32


def joined_origins(nodes: Iterable[Node]) -> Origins:
    """Return the origins of a node that takes the place of others, the first of which does its work.

    >>> joined_origins([Node("MatMul", "product"), Node("Add", "sum")])
    (('product', 'MatMul'), ('sum', 'Add'))
    """
    origins = (origin for node in nodes for origin in node.origins or ((node.name, node.op),))
    return tuple(dict.fromkeys(origins))[:_MOST]


def origins_by_name(graph: Any) -> dict[str, Origins]:
    """Return the origins of the nodes of a graph and its bodies that have some, by the names of the nodes."""
    return {node.name: node.origins for scope in scopes(graph) for node in scope.nodes if node.origins}


def put_back_origins(graph: Any, origins: Mapping[str, Origins]) -> None:
    """Give nodes that were read or made anew the origins of those that had their names."""
    for scope in scopes(graph):
        for node in scope.nodes:
            node.origins = origins.get(node.name, node.origins)
