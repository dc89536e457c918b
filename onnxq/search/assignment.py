"""Which nodes become integer so that everything together costs least: a minimum cut, solved exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

# Vertices are numbers: these two, then the nodes that may be integer, then up to three for a border that needs them.
_INTEGER, _FLOAT = 0, 1

_Edge = tuple[int, int, int | None]


@dataclass(frozen=True)
class Border:
    """A tensor between nodes and what it costs where the two sides differ.

    Attributes:
        producer: the node that makes it; None for an input of the graph, which is float.
        consumers: the nodes that read it; an output of the graph is read by a node that can only be float.
        quantize: paid once when the producer is float and any consumer is integer.
        dequantize: paid once when the producer is integer and any consumer is float.
        coded: paid once when the producer or any consumer is integer, whatever the others are: the tensor then is what
            its codes stand for, whose noise is its own and nobody else's.
        tensor: its name; empty where another border tells of its codes.
    """

    producer: str | None
    consumers: tuple[str, ...]
    quantize: int
    dequantize: int
    coded: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class Problem:
    """What there is to choose from. Costs are whole numbers of any unit, such as nanoseconds, and not negative.

    Attributes:
        float_costs: cost of each node when it stays float, whatever is cheapest there.
        integer_costs: cost of the nodes that can be integer; the others stay float.
        borders: the tensors between nodes.
        followers: pairs of nodes of which the first may be integer only if the second is.
    """

    float_costs: Mapping[str, int]
    integer_costs: Mapping[str, int]
    borders: tuple[Border, ...] = ()
    followers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check what the code that makes problems promises: no negative cost, no name without a cost."""
        borders = [cost for border in self.borders for cost in (border.quantize, border.dequantize, border.coded)]
        assert min((*self.float_costs.values(), *self.integer_costs.values(), *borders), default=0) >= 0
        producers = {border.producer for border in self.borders} - {None}
        consumers = {name for border in self.borders for name in border.consumers}
        pairs = {name for pair in self.followers for name in pair}
        assert self.integer_costs.keys() | producers | consumers | pairs <= self.float_costs.keys()


def cheapest(problem: Problem) -> frozenset[str]:
    """Return the integer nodes of an assignment of least cost.

    Two states and costs between neighbours that only differing states pay make a minimum cut of a graph, found as a
    maximum flow (Greig, Porteous and Seheult, 1989; Boykov and Kolmogorov, 2004). What is paid once for several
    consumers stands on a vertex of its own, which is on the integer side as soon as one consumer is, or on the float
    side as soon as one is there; likewise for what is paid once when anyone at a tensor is on the integer side.
    Pushing excess flow (Goldberg and Tarjan, 1988) takes long chains of equal gains in their stride, where paths are
    augmented one by one in quadratic time. What is reached from the integer side is the same for every maximum flow, so
    the result depends on no order of the nodes.

    Args:
        problem: the costs.

    Returns:
        Names of integer nodes; of several assignments of least cost the one whose set lies in all the others'.

    >>> sorted(cheapest(Problem({"a": 9, "b": 5}, {"a": 2, "b": 4}, (Border("a", ("b",), 3, 3),))))
    ['a', 'b']
    """
    # networkx takes a while to load, and most commands need none of it.
    import networkx
    from networkx.algorithms.flow import preflow_push

    vertices = {name: vertex for vertex, name in enumerate(sorted(problem.integer_costs), start=2)}
    network = networkx.DiGraph()
    network.add_nodes_from((_INTEGER, _FLOAT, *vertices.values()))
    for (start, end), capacity in _merged(_edges(problem, vertices)).items():
        # networkx takes an edge without a capacity as one that is never cut.
        network.add_edge(start, end, **({} if capacity is None else {"capacity": capacity}))
    residual = preflow_push(network, _INTEGER, _FLOAT)
    reached = _reached(residual.adj)
    return frozenset(name for name, vertex in vertices.items() if vertex in reached)


def cost(problem: Problem, integer: frozenset[str]) -> int:
    """Return what an assignment costs.

    Args:
        problem: the costs.
        integer: names of the integer nodes, which can be integer and follow as the problem demands.

    Returns:
        The sum over all nodes and borders.

    >>> cost(Problem({"a": 9, "b": 5}, {"a": 2, "b": 4}, (Border("a", ("b",), 3, 3),)), frozenset({"a"}))
    10
    """
    assert integer <= problem.integer_costs.keys()
    assert all(other in integer for node, other in problem.followers if node in integer)
    nodes = sum(problem.integer_costs[name] for name in integer)
    nodes += sum(paid for name, paid in problem.float_costs.items() if name not in integer)
    return nodes + sum(_border_cost(border, integer) for border in problem.borders)


def is_coded(border: Border, integer: Set[str]) -> bool:
    """Return whether a tensor is codes: whether the node that makes it, or one that reads it, is an integer node."""
    return border.producer in integer or any(name in integer for name in border.consumers)


def _border_cost(border: Border, integer: frozenset[str]) -> int:
    if border.producer in integer:
        return border.coded + (border.dequantize if any(name not in integer for name in border.consumers) else 0)
    return border.coded + border.quantize if is_coded(border, integer) else 0


def _edges(problem: Problem, vertices: Mapping[str, int]) -> Iterator[_Edge]:
    """Yield edges that are cut, and paid, when their start is on the integer side and their end on the float side."""
    for name, vertex in vertices.items():
        # What both sides cost alike decides nothing.
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
        around = sorted({producer, *consumers} - {_FLOAT}) if border.coded else []
        if len(around) == 1:
            yield around[0], _FLOAT, border.coded
        elif around:
            yield unused, _FLOAT, border.coded
            yield from ((vertex, unused, None) for vertex in around)
            unused += 1
    for node, other in problem.followers:
        yield vertices.get(node, _FLOAT), vertices.get(other, _FLOAT), None


def _merged(edges: Iterable[_Edge]) -> dict[tuple[int, int], int | None]:
    """Add up parallel edges and leave out those that no cut pays for; None stays infinite."""
    merged: dict[tuple[int, int], int | None] = {}
    for start, end, capacity in edges:
        if start in (_FLOAT, end) or capacity == 0:
            continue
        before = merged.get((start, end), 0)
        merged[start, end] = None if before is None or capacity is None else before + capacity
    return merged


def _reached(residual: Mapping[int, Mapping[int, Mapping[str, int]]]) -> set[int]:
    """Return what can be reached from the integer side through edges whose capacity is not used up."""
    reached, pending = {_INTEGER}, [_INTEGER]
    while pending:
        for end, edge in residual[pending.pop()].items():
            if end not in reached and edge["flow"] < edge["capacity"]:
                reached.add(end)
                pending.append(end)
    return reached
