"""Time weighed against noise: what the nodes of a graph cost in each way to run them, and what an assignment gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxq.graph import scopes
from onnxq.planning.plan import Demotion, Plan
from onnxq.scheme import Mode
from onnxq.searching.alternatives import STATIC, Alternative, Way
from onnxq.searching.assignment import Problem, cost
from onnxq.searching.costs import OUTSIDE, Costs
from onnxq.searching.kernel_times import NodeTimes
from onnxq.searching.search import Sensitivity


@dataclass(frozen=True)
class Noise:
    """Noise-to-signal ratio at the worst output that a node adds in each mode; nothing where it is not known.

    Attributes:
        static: by node.
        alternatives: by alternative and node.
        stored: by node.
        alone: what was measured of nodes one by one; the ratios of other nodes are shares of what groups make.
    """

    static: Mapping[str, float] = field(default_factory=dict)
    alternatives: Mapping[Alternative, Mapping[str, float]] = field(default_factory=dict)
    stored: Mapping[str, float] = field(default_factory=dict)
    alone: tuple[Sensitivity, ...] = ()

    def of(self, alternative: Alternative, node: str) -> float:
        """Return what a node adds that takes an alternative."""
        return self.alternatives.get(alternative, {}).get(node, 0.0)

    @property
    def ways(self) -> Mapping[Way, float]:
        """What is known of nodes as integers, by node and what they could be."""
        known = {STATIC: self.static, **self.alternatives}
        return {(node, way): ratio for way, ratios in known.items() for node, ratio in ratios.items()}

    @cached_property
    def alone_by_node(self) -> Mapping[tuple[str, Mode], float]:
        """SQNR in decibels of what was measured alone, by node and mode."""
        return {(one.node, one.mode): one.sqnr for one in self.alone}


SILENT = Noise()
"""Weighs nothing against time."""


@dataclass(frozen=True)
class Assignment:
    """Which nodes run how, and what that is expected to give.

    Attributes:
        static: nodes that run as integer kernels with fixed scales.
        alternatives: nodes that take an alternative, with that.
        nanoseconds: expected time of a run.
        noise: expected noise-to-signal ratio.
    """

    static: frozenset[str]
    alternatives: Mapping[str, Alternative]
    nanoseconds: float
    noise: float

    @property
    def ways(self) -> frozenset[Way]:
        """What was chosen, whatever it is expected to give."""
        return frozenset([*((node, STATIC) for node in self.static), *self.alternatives.items()])


@dataclass(frozen=True, eq=False)
class Prices:
    """The costs of a graph's nodes and borders, ready to be weighed against noise.

    Attributes:
        costs: what was measured.
        left: what becomes of nodes whose stored weights are too coarse, where they do not become integer kernels.
        excluded: what nodes may not be.
    """

    costs: Costs
    left: Mapping[str, Demotion] = field(default_factory=dict)
    excluded: frozenset[Way] = frozenset()

    def float_side(self, node: str, noise: Noise, weight: float) -> tuple[Alternative | None, float]:
        """Return the alternative that is best for a node whose neighbours see floats, or None, and what it costs.

        Args:
            node: its name.
            noise: what each node adds.
            weight: nanoseconds that a noise-to-signal ratio of one is worth.
        """
        stored = self._float_time(node, None) + weight * self._stored_noise(node, noise)
        offered = [
            (times[node] + weight * noise.of(alternative, node), alternative)
            for alternative, times in self.costs.worthwhile.items()
            if node in times and (node, alternative) not in self.excluded
        ]
        least, best = min(offered, key=lambda one: one[0], default=(math.inf, None))
        return (best, least) if least < stored else (None, stored)

    def problem(self, noise: Noise, weight: float) -> Problem:
        """Return the assignment problem that weighs time against noise.

        Args:
            noise: what each node adds.
            weight: nanoseconds that a noise-to-signal ratio of one is worth.
        """
        return self._problem({name: self.float_side(name, noise, weight)[1] for name in self._names}, noise, weight)

    def assignment(self, static: frozenset[str], noise: Noise, weight: float) -> Assignment:
        """Return what it means that these nodes are static, the others taking what is best for them then."""
        sides = {name: self.float_side(name, noise, weight)[0] for name in self._names if name not in static}
        taken = {name: alternative for name, alternative in sides.items() if alternative is not None}
        return self._assigned(static, taken, noise)

    def planned(self, plan: Plan) -> Assignment:
        """Return what it means that every node is static or dynamic that is so in a plan."""
        modes = {one.node: one.mode for one in plan.decisions}
        static = frozenset(name for name in self.costs.static_nodes if modes[name] is Mode.STATIC)
        dynamic = Alternative(Mode.DYNAMIC)
        taken = {name: dynamic for name in self._dynamic if modes[name] is Mode.DYNAMIC}
        return self._assigned(static, taken, SILENT)

    def _assigned(self, static: frozenset[str], taken: Mapping[str, Alternative], noise: Noise) -> Assignment:
        times = {name: self._float_time(name, taken.get(name)) for name in self._names}
        others = static | taken.keys()
        ratio = sum(noise.static.get(name, 0.0) for name in static)
        ratio += sum(noise.of(alternative, name) for name, alternative in taken.items())
        ratio += sum(self._stored_noise(name, noise) for name in self._names if name not in others)
        return Assignment(static, taken, cost(self._problem(times, SILENT, 0.0), static), ratio)

    def demotions(self, assignment: Assignment, noise: Noise) -> Mapping[str, Demotion]:
        """Return what makes the planner do what was assigned, with the reasons."""
        found = {}
        for decision in self.costs.full.decisions:
            name = decision.node
            taken = assignment.alternatives.get(name)
            if name in assignment.static:
                continue
            if taken is not None:
                if taken.mode is not decision.mode:
                    found[name] = taken.demotion(*self._reason(name, noise, decision.mode, taken))
            elif name in self.left:
                found[name] = self.left[name]
            elif decision.mode in (Mode.STATIC, Mode.DYNAMIC):
                found[name] = Demotion(Mode.STORAGE, *self._reason(name, noise, decision.mode, None))
        return found

    def without(self, ways: frozenset[Way]) -> Prices:
        """Return the same for a choice in which these nodes may not be that."""
        return replace(self, excluded=ways)

    def corrected(self, assignment: Assignment, observed: NodeTimes) -> Prices:
        """Return the same with what the kernels of an assignment's model really took."""
        return replace(self, costs=self.costs.corrected(assignment.static, assignment.alternatives, observed))

    def _problem(self, floats: Mapping[str, float], noise: Noise, weight: float) -> Problem:
        return Problem(
            float_costs={OUTSIDE: 0, **{name: round(paid) for name, paid in floats.items()}},
            integer_costs={
                name: round(paid + weight * noise.static.get(name, 0.0))
                for name, paid in self.costs.static_nodes.items()
                if (name, STATIC) not in self.excluded
            },
            borders=self.costs.borders,
            followers=self.costs.followers,
        )

    def _reason(self, name: str, noise: Noise, wanted: Mode, taken: Alternative | None) -> tuple[str, str]:
        """Return why a node is not what the scheme wants, static or dynamic, and the figures behind it."""
        integers, ratio = self._dynamic.get(name, 0.0), noise.of(Alternative(Mode.DYNAMIC), name)
        if wanted is Mode.STATIC:
            integers, ratio = self.costs.static_nodes.get(name, 0.0), noise.static.get(name, 0.0)
        floats = self._float_time(name, None)
        figures = [f"{floats / 1e6:.3f} ms in float", f"{integers / 1e6:.3f} ms as integers"]
        figures += self._alternative_figures(name, wanted)
        if ratio:
            alone = noise.alone_by_node.get((name, wanted))
            share = f"{-10 * math.log10(ratio):.1f} dB as its share of a group's noise"
            figures.append(share if alone is None else f"{alone:.1f} dB alone")
        if taken is not None:
            reason = "it is faster so, or less noisy, than " + (
                "with fixed scales" if wanted is Mode.STATIC else "with dynamic scales"
            )
        elif integers >= floats:
            reason = "it is not faster as an integer kernel on this machine"
        elif ratio:
            reason = "the time it gains as an integer kernel is not worth the noise"
        else:
            reason = "what it gains as an integer kernel is less than what its borders cost"
        return reason, ", ".join(figures)

    def _alternative_figures(self, name: str, wanted: Mode) -> Iterator[str]:
        for alternative, times in self.costs.offered.items():
            if name in times and alternative.mode is not wanted:
                yield f"{times[name] / 1e6:.3f} ms {alternative.described}"

    def _float_time(self, name: str, taken: Alternative | None) -> float:
        return self.costs.floats.nodes.get(name, 0.0) if taken is None else self.costs.offered[taken][name]

    def _stored_noise(self, name: str, noise: Noise) -> float:
        return 0.0 if name in self.left else noise.stored.get(name, 0.0)

    @property
    def _dynamic(self) -> Mapping[str, float]:
        return self.costs.offered.get(Alternative(Mode.DYNAMIC), {})

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for scope in scopes(self.costs.graph) for node in scope.nodes)
