"""Choose the integer nodes so that the total cost is least: a minimum cut, solved exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

# Vertices are numbers: these two, then the nodes that may be integer, then up to three for each border that needs them.
_INTEGER, _FLOAT = 0, 1

_Edge = tuple[int, int, int | None]


@dataclass(frozen=True)
class Border:
    """A tensor between nodes, with the costs if its two sides differ.

    Attributes:
        producer: the node that makes it; None for an input of the graph, which is float.
        consumers: the nodes that read it; graph outputs are read by a node that can only be float.
        quantize: paid once if the producer is float and any consumer is integer.
        dequantize: paid once if the producer is integer and any consumer is float.
        quantized: paid once if the producer or any consumer is integer, because the tensor is then quantized.
        tensor: its name; empty if another border stands for the quantized tensor.
    """

    producer: str | None
    consumers: tuple[str, ...]
    quantize: int
    dequantize: int
    quantized: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class Problem:
    """The costs to choose by: whole numbers in any unit, such as nanoseconds, and not negative.

    Attributes:
        float_costs: cost of each node as float, in its cheapest float option.
        integer_costs: cost of the nodes that can be integer; all others stay float.
        borders: the tensors between nodes.
        followers: pairs of nodes; the first may be integer only if the second is.
    """

    float_costs: Mapping[str, int]
    integer_costs: Mapping[str, int]
    borders: tuple[Border, ...] = ()
    followers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check that no cost is negative and that every name has a float cost."""
        borders = [cost for border in self.borders for cost in (border.quantize, border.dequantize, border.quantized)]
        assert min((*self.float_costs.values(), *self.integer_costs.values(), *borders), default=0) >= 0
        producers = {border.producer for border in self.borders} - {None}
        consumers = {name for border in self.borders for name in border.consumers}
        pairs = {name for pair in self.followers for name in pair}
        assert self.integer_costs.keys() | producers | consumers | pairs <= self.float_costs.keys()


def cheapest(problem: Problem) -> frozenset[str]:
    """Return the integer nodes of an assignment of least cost.

    The problem has two states, and only neighbors in different states pay. It is therefore a minimum cut, found as a
    maximum flow (Greig, Porteous and Seheult, 1989; Boykov and Kolmogorov, 2004).

    A cost that is paid once for several consumers gets a vertex of its own. This vertex is on the integer (or float)
    side as soon as one consumer is. The cost `quantized` works the same way.

    The flow is found by push-relabel (Goldberg and Tarjan, 1988). Augmenting paths take quadratic time on long chains
    of equal gains. The vertices reachable from the integer side are the same for every maximum flow, so the order of
    the nodes does not matter.

    Returns:
        Names of integer nodes. If several assignments cost the same, this is the one whose set is part of all others.

    >>> sorted(cheapest(Problem({"a": 9, "b": 5}, {"a": 2, "b": 4}, (Border("a", ("b",), 3, 3),))))
    ['a', 'b']
    """
    # networkx loads slowly, and most commands do not need it.
    import networkx
    from networkx.algorithms.flow import preflow_push

    vertices = {name: vertex for vertex, name in enumerate(sorted(problem.integer_costs), start=2)}
    network = networkx.DiGraph()
    network.add_nodes_from((_INTEGER, _FLOAT, *vertices.values()))
    for (start, end), capacity in _merged(_edges(problem, vertices)).items():
        # networkx never cuts an edge without a capacity.
        network.add_edge(start, end, **({} if capacity is None else {"capacity": capacity}))
    residual = preflow_push(network, _INTEGER, _FLOAT)
    reached = _reached(residual.adj)
    return frozenset(name for name, vertex in vertices.items() if vertex in reached)


def cost(problem: Problem, integer: frozenset[str]) -> int:
    """Return the cost of an assignment: the sum over all nodes and borders.

    The nodes in `integer` must satisfy `followers`.

    >>> cost(Problem({"a": 9, "b": 5}, {"a": 2, "b": 4}, (Border("a", ("b",), 3, 3),)), frozenset({"a"}))
    10
    """
    assert integer <= problem.integer_costs.keys()
    assert all(leader in integer for node, leader in problem.followers if node in integer)
    nodes = sum(problem.integer_costs[name] for name in integer)
    nodes += sum(paid for name, paid in problem.float_costs.items() if name not in integer)
    return nodes + sum(_border_cost(border, integer) for border in problem.borders)


def _border_cost(border: Border, integer: frozenset[str]) -> int:
    if border.producer in integer:
        return border.quantized + (0 if integer.issuperset(border.consumers) else border.dequantize)
    return border.quantized + border.quantize if integer.intersection(border.consumers) else 0


def _edges(problem: Problem, vertices: Mapping[str, int]) -> Iterator[_Edge]:
    """Yield edges; an edge is cut, and paid, if its start is on the integer side and its end on the float side."""
    for name, vertex in vertices.items():
        # Only the difference of the two costs matters.
        gain = problem.float_costs[name] - problem.integer_costs[name]
        yield (_INTEGER, vertex, gain) if gain > 0 else (vertex, _FLOAT, -gain)
    unused = len(vertices) + 2
    for border in problem.borders:
        producer = vertices.get(border.producer or "", _FLOAT)
        consumers = sorted({vertices.get(name, _FLOAT) for name in border.consumers})
        if len(consumers) == 1:
            yield consumers[0], producer, border.quantize
            yield producer, consumers[0], border.dequantize
        elif consumers:
            any_integer, any_float, unused = unused, unused + 1, unused + 2
            yield any_integer, producer, border.quantize
            yield producer, any_float, border.dequantize
            for consumer in consumers:
                yield consumer, any_integer, None
                yield any_float, consumer, None
        around = sorted({producer, *consumers} - {_FLOAT}) if border.quantized else []
        if len(around) == 1:
            yield around[0], _FLOAT, border.quantized
        elif around:
            yield unused, _FLOAT, border.quantized
            yield from ((vertex, unused, None) for vertex in around)
            unused += 1
    for node, leader in problem.followers:
        yield vertices.get(node, _FLOAT), vertices.get(leader, _FLOAT), None


def _merged(edges: Iterable[_Edge]) -> dict[tuple[int, int], int | None]:
    """Add up parallel edges and drop edges that no cut pays for; None stays infinite."""
    merged: dict[tuple[int, int], int | None] = {}
    for start, end, capacity in edges:
        if start in (_FLOAT, end) or capacity == 0:
            continue
        before = merged.get((start, end), 0)
        merged[start, end] = None if before is None or capacity is None else before + capacity
    return merged


def _reached(residual: Mapping[int, Mapping[int, Mapping[str, int]]]) -> set[int]:
    reached, pending = {_INTEGER}, [_INTEGER]
    while pending:
        for end, edge in residual[pending.pop()].items():
            if end not in reached and edge["flow"] < edge["capacity"]:
                reached.add(end)
                pending.append(end)
    return reached
