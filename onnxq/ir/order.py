"""Execution order: a stable topological sort that includes the tensors that bodies read from enclosing graphs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from onnxq.errors import ModelError
from onnxq.ir.elements import Node, Tensor
from onnxq.ir.queries import all_graphs

_SHOWN = 4


def toposort(graph: Any) -> None:
    """Sort the nodes of a graph and of its bodies so that each follows its producers.

    A node that holds a body also depends on everything that the body reads. A valid order is left alone. Otherwise
    every node comes as early as its position in the list allows.

    Raises:
        ModelError: the graph has a cycle; the message names its nodes.
    """
    for scope in all_graphs(graph):
        scope.nodes[:] = sorted_nodes(scope)


def sorted_nodes(scope: Any) -> list[Node]:
    """Return the nodes of one graph in execution order, without changing the graph.

    Raises:
        ModelError: the graph has a cycle.
    """
    nodes: list[Node] = list(scope.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    needs = [_producers(node, position) for node in nodes]
    if all(max(needed, default=-1) < index for index, needed in enumerate(needs)):
        return nodes
    waiting = [len(needed) for needed in needs]
    consumers: list[list[int]] = [[] for _ in nodes]
    for index, needed in enumerate(needs):
        for producer in needed:
            consumers[producer].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    order: list[Node] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for consumer in consumers[index]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(ready, consumer)
    if len(order) < len(nodes):
        cycle = _one_cycle(needs, waiting)
        shown = " -> ".join(nodes[index].name or f"unnamed {nodes[index].op}" for index in cycle[:_SHOWN])
        rest = f" and {len(cycle) - _SHOWN} more" if len(cycle) > _SHOWN else ""
        raise ModelError(f"graph {scope.name!r} has a cycle through the nodes {shown}{rest}; it cannot be executed")
    return order


def tensors_read(node: Node) -> Iterator[Tensor]:
    """Yield every tensor that a node reads: its inputs, and the inputs and outputs of its bodies."""
    yield from node.inputs
    for body in node.subgraphs():
        for scope in all_graphs(body):
            yield from scope.outputs
            for inner in scope.nodes:
                yield from inner.inputs


def _producers(node: Node, position: dict[Node, int]) -> set[int]:
    tensors = tensors_read(node) if node.attrs else node.inputs
    return {position[producer] for tensor in tensors for producer in tensor.inputs if producer in position}


def _one_cycle(needs: list[set[int]], waiting: list[int]) -> list[int]:
    # Each unsorted node needs another unsorted node, so a walk from one to the next must close a cycle.
    current = next(index for index, count in enumerate(waiting) if count)
    seen: dict[int, int] = {}
    path: list[int] = []
    while current not in seen:
        seen[current] = len(path)
        path.append(current)
        current = min(index for index in needs[current] if waiting[index])
    cycle = path[seen[current] :][::-1]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
