"""Measuring plans where time tells nothing, as for another machine: what is to be computed stands for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.ir import Node, scopes
from onnxq.planning.plan import DECODING, Decision, Plan
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.laboratory import Laboratory
from onnxq.search.search import sizes_of

# Nanoseconds of a core of today for a node, an element of what it gives, and a product with a weight.
_NODE, _ELEMENT, _PRODUCT = 5_000.0, 0.5, 0.1
# Part of that which integers take: they are a quarter of the bytes.
_AS_INTEGERS = 1 / 4
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


@dataclass(frozen=True, eq=False)
class Untimed(Laboratory):
    """A laboratory that takes no times, so that what it finds is the same on every machine.

    A node takes what its products and elements take, as far as shapes tell, and a quarter of that as the integers that
    the scheme wants. Whether other integers than these gain any time is not known, so that none are taken.
    """

    @property
    def is_timed(self) -> bool:
        """Whether times are those of runs."""
        return False

    @property
    def run(self) -> float:
        """Seconds that a run of the float model is taken for."""
        return self.times(None).total / 1e9

    def times(self, plan: Plan | None) -> NodeTimes:
        """Return how long each node is taken to run; None stands for the float model."""
        if plan is None:
            return self._floats
        found = {name: time * self._share(plan.by_node.get(name)) for name, time in self._floats.nodes.items()}
        return replace(self._floats, nodes=found)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        """Return how many times as fast as the float model the models of plans are taken to run."""
        return [self._floats.total / self.times(plan).total for plan in plans]

    def _share(self, decision: Decision | None) -> float:
        if decision is None or decision.mode not in DECODING:
            return 1.0
        wanted = self._full.by_node[decision.node].mode
        return _AS_INTEGERS if decision.mode is wanted else 1.0

    @cached_property
    def _full(self) -> Plan:
        return self.plan({})

    @cached_property
    def _floats(self) -> NodeTimes:
        sizes, nodes = sizes_of(self._full), list(self._nodes())
        elements = {node.name: float(_count(_shape(node))) for node in nodes}
        products = {node.name: sizes.get(node.name, 0) * _positions(node) for node in nodes}
        times = {name: _NODE + _ELEMENT * held + _PRODUCT * products[name] for name, held in elements.items()}
        return NodeTimes(times, {}, elements, 0.0)

    def _nodes(self) -> Iterator[Node]:
        for scope in scopes(self.trials.bench.graph):
            yield from scope.nodes


def _positions(node: Node) -> int:
    """Return how often each weight of a node is multiplied."""
    shape = _shape(node)
    return _count(shape[:1]) * _count(shape[2:]) if node.op in _CONVOLUTIONS else _count(shape[:-1])


def _shape(node: Node) -> Sequence[object]:
    return next((tensor.shape or () for tensor in node.outputs), ())


def _count(shape: Sequence[object]) -> int:
    """Return how many elements a shape holds, as far as its dimensions are fixed."""
    return math.prod(dim for dim in shape if isinstance(dim, int) and dim > 0)
