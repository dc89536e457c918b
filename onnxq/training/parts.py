"""Parts of a graph, one behind the other, so that each can be run and trained by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from onnxq.ir import Graph, Node, Tensor, Variable
from onnxq.ir.order import tensors_read

# As many products as the blocks of residual networks and of transformers have.
_MOST_WEIGHTS = 4


@dataclass(frozen=True, eq=False)
class Part:
    """Some nodes of a main graph in their order.

    Attributes:
        nodes: the nodes.
        inputs: tensors that they read and that none of them makes: inputs of the graph, and outputs of parts before.
        outputs: tensors that they make for parts behind them, or that are outputs of the graph.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def whole(cls, graph: Graph) -> Part:
        """Return all of a graph."""
        return cls(tuple(graph.nodes), tuple(graph.inputs), tuple(graph.outputs))


def parts(graph: Graph, weights: Mapping[Node, int]) -> tuple[Part, ...]:
    """Cut a graph where little crosses, so that few weights are in each part and at least one.

    Of all places from the first weight of a part to the last that it may have, it ends at the last one of those that
    the fewest tensors cross; tensors that codes change nothing about, such as masks, are not counted.

    Args:
        graph: the graph, whose nodes are in order.
        weights: how many weights nodes of the main graph have as codes, those that have but data as codes among them.
    """
    nodes = list(graph.nodes)
    crossing = _crossing(nodes, weights)
    counts = [0, *accumulate(weights.get(node, 0) for node in nodes)]
    bounds = [0]
    while bounds[-1] < len(nodes):
        start = bounds[-1]
        places = [end for end in range(start + 1, len(nodes) + 1) if 0 < counts[end] - counts[start] <= _MOST_WEIGHTS]
        # What is left has no weight, or one node has more than a part may have.
        best = min(places, key=lambda end: (crossing[end - 1], -end), default=_behind_next(counts, start))
        bounds.append(best if counts[best] < counts[-1] else len(nodes))
    return tuple(_part(graph, start, end) for start, end in pairwise(bounds))


def _behind_next(counts: list[int], start: int) -> int:
    """Return the end of a part that one node fills."""
    return next((end for end in range(start + 1, len(counts)) if counts[end] > counts[start]), len(counts) - 1)


def _crossing(nodes: list[Node], weights: Mapping[Node, int]) -> list[int]:
    """Return how many tensors that codes change are read behind each node and made before."""
    last = {tensor: index for index, node in enumerate(nodes) for tensor in tensors_read(node)}
    changed, live, found = set[Tensor](), set[Tensor](), []
    for index, node in enumerate(nodes):
        if node in weights or any(tensor in changed for tensor in tensors_read(node)):
            changed.update(node.outputs)
            live.update(node.outputs)
        live = {tensor for tensor in live if last.get(tensor, -1) > index}
        found.append(len(live))
    return found


def _part(graph: Graph, start: int, end: int) -> Part:
    nodes = tuple(graph.nodes[start:end])
    made = dict.fromkeys(tensor for node in nodes for tensor in node.outputs if tensor.name)
    later = {tensor for node in graph.nodes[end:] for tensor in tensors_read(node)} | set(graph.outputs)
    before = {tensor for node in graph.nodes[:start] for tensor in node.outputs} | set(graph.inputs)
    read = dict.fromkeys(
        tensor for node in nodes for tensor in tensors_read(node) if isinstance(tensor, Variable) and tensor in before
    )
    return Part(nodes, tuple(read), tuple(tensor for tensor in made if tensor in later))
