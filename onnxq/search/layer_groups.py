"""Noise of the nodes of a model that is too large to look at each alone: groups of one kind of layer, by depth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from onnxq.config.scheme import Mode
from onnxq.ir import Graph, Node, is_fixed, scopes
from onnxq.numerics.affine import decibels
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import Target
from onnxq.search.costs import gives_codes
from onnxq.search.noises import Noises, Questions
from onnxq.search.search import NodeNoise
from onnxq.search.switchboard import Source

_Kind = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, eq=False)
class ByKind:
    """Questions about the same codes, in an order in which neighbours are layers of one kind.

    The layers of a network that repeats its blocks are alike where they have the same operator and weights of the same
    shapes, and next to one another where they follow on one another in that, so groups of neighbours say what a kind
    of layer adds at some depth, in few questions.

    Attributes:
        asked: answers.
        graph: the prepared graph.
    """

    asked: Questions
    graph: Graph

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """All there are: tensors, then nodes, each by the kind of layer that they belong to, and by depth in that."""
        kinds = self._kinds()
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
        return tuple(
            sorted(self.asked.sources, key=lambda one: (one.is_node, places[kinds[one]] if one in kinds else -1))
        )

    def noises(self, asked: Iterable[Collection[Source]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio by sample and output for several sets of codes."""
        return self.asked.noises(asked, samples)

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noise of all codes together, and how much each sample counts, by sample and output."""
        return self.asked.everything()

    def _kinds(self) -> dict[Source, _Kind]:
        found: dict[Source, _Kind] = {}
        for scope in scopes(self.graph):
            for node in scope.nodes:
                kind = node.op, tuple(tensor.shape for tensor in node.inputs if is_fixed(tensor))
                found[Source(node.name, is_node=True)] = kind
                found.update((Source(tensor.name), kind) for tensor in node.outputs)
        return found


def sources_of(node: Node, plan: Plan, target: Target) -> Iterator[Source]:
    """Yield what becomes codes when a node and nothing else is static."""
    yield Source(node.name, is_node=True)
    given = node.outputs if gives_codes(node, target) else ()
    for tensor in dict.fromkeys((*data_inputs(node), *given)):
        if tensor.name in plan.by_tensor:
            yield Source(tensor.name)


def node_noises(
    graph: Graph, target: Target, measure: Callable[[], Noises]
) -> Callable[[Plan, Set[Mode]], list[NodeNoise]]:
    """Return what tells the noise of a plan's weighted nodes of some modes.

    Args:
        graph: the prepared graph.
        target: the runtime.
        measure: what codes add in noise; asked when it is first needed.
    """
    nodes: Mapping[str, Node] = {node.name: node for scope in scopes(graph) for node in scope.nodes}

    def told(plan: Plan, modes: Set[Mode]) -> list[NodeNoise]:
        known = measure()

        def of(name: str, mode: Mode) -> float:
            own = (Source(name, is_node=True),)
            return decibels(known.of(sources_of(nodes[name], plan, target) if mode is Mode.STATIC else own))

        wanted = (one for one in plan.decisions if one.mode in modes and one.weights)
        return [NodeNoise(one.node, one.mode, of(one.node, one.mode)) for one in wanted]

    return told
