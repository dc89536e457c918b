"""Time weighed against error: the minimum cut over all options, and the reasons that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from onnxq.config.scheme import Mode
from onnxq.ir import all_graphs
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.planning.plan import Demotion, Plan
from onnxq.search.assignment import Problem, cheapest, cost, is_coded
from onnxq.search.cost_model import OUTSIDE, STATIC, CostModel, KernelOption, NodeOption
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.search import NodeSensitivity
from onnxq.search.sensitivity import NO_ERROR, QuantizerId, Sensitivities, worst_output_nsr

_BESIDE = {
    Mode.STATIC: "with fixed scales",
    Mode.DYNAMIC: "with dynamic scales",
    Mode.STORAGE: "with floats that the codes become when the model is loaded",
}


def reason_of(costs: CostModel, name: str, wanted: Mode, ratio: float, taken: KernelOption | None) -> tuple[str, str]:
    """Return why a node is not what the scheme wants, and the figures behind it.

    Args:
        costs: of the nodes.
        name: of the node.
        wanted: what the scheme wants, static, dynamic or stored.
        ratio: noise-to-signal ratio that it adds alone as what the scheme wants; 0 where that is not known.
        taken: what it is instead; None where it computes in float.
    """
    floats, integers = costs.floats.nodes.get(name, 0.0), _integers(costs, wanted).get(name, 0.0)
    figures = [f"{floats / 1e6:.3f} ms in float"]
    figures += [f"{integers / 1e6:.3f} ms as integers"] if wanted is not Mode.STORAGE else []
    figures += _others(costs, name, wanted)
    if ratio:
        figures.append(f"{sqnr_of_ratio(ratio):.1f} dB as integers alone")
    if taken is not None:
        reason = f"it is faster so, or less noisy, than {_BESIDE[wanted]}"
    elif integers >= floats:
        reason = "it is not faster as an integer kernel on this machine"
    elif ratio:
        reason = "the time it gains as an integer kernel is not worth the noise"
    else:
        reason = "what it gains as an integer kernel is less than what its borders cost"
    return reason, ", ".join(figures)


def untimed_reason(wanted: Mode, ratio: float) -> tuple[str, str]:
    """Return why a node computes in float where nobody knows what it takes in time, and the figures behind it.

    Args:
        wanted: what the scheme wants, static or dynamic.
        ratio: noise-to-signal ratio that it adds alone so; 0 where that is not known.

    >>> untimed_reason(Mode.STATIC, 0.01)
    ('static quantization of it hurts the worst output too much', '20.0 dB as integers alone')
    """
    if not ratio:
        return "as integers it would need borders between codes and floats for little that it computes", ""
    return (
        f"{wanted} quantization of it hurts the worst output too much",
        f"{sqnr_of_ratio(ratio):.1f} dB as integers alone",
    )


def _integers(costs: CostModel, wanted: Mode) -> Mapping[str, float]:
    return costs.static_nodes if wanted is Mode.STATIC else costs.offered.get(KernelOption(Mode.DYNAMIC), {})


def _others(costs: CostModel, name: str, wanted: Mode) -> Iterator[str]:
    for alternative, times in costs.offered.items():
        if name in times and alternative.mode is not wanted:
            yield f"{times[name] / 1e6:.3f} ms {alternative.described}"


# Time weighed against noise: what the nodes of a graph cost in each way to run them, and what an assignment gives.

AS_LONG = 1.05
"""A plan that is expected to take so many times as long as one with more borders takes as long."""


@dataclass(frozen=True, eq=False)
class OptionSensitivities:
    """Noise that codes add.

    Attributes:
        static: of tensors with fixed scales, and of the weights of each node, which are the same codes where the node
            stores them.
        alternatives: of what nodes have as codes that take an alternative.
    """

    static: Sensitivities = NO_ERROR
    alternatives: Mapping[KernelOption, Sensitivities] = field(default_factory=dict)

    def of(self, alternative: KernelOption, node: str) -> float:
        """Return the ratio that a node adds that takes an alternative."""
        return self.alternatives[alternative].nodes.get(node, 0.0) if alternative in self.alternatives else 0.0


UNMEASURED = OptionSensitivities()
"""Weighs nothing against time."""


@dataclass(frozen=True)
class Assignment:
    """Which nodes run how, and what that is expected to give.

    Attributes:
        static: nodes that run as integer kernels with fixed scales.
        alternatives: nodes that take an alternative, with that.
        nanoseconds: expected time of a run.
        noise: predicted noise-to-signal ratio at the worst output: what its codes add together.
    """

    static: frozenset[str]
    alternatives: Mapping[str, KernelOption]
    nanoseconds: float
    noise: float

    @property
    def ways(self) -> frozenset[NodeOption]:
        """What was chosen, whatever it is expected to give."""
        return frozenset([*((node, STATIC) for node in self.static), *self.alternatives.items()])


@dataclass(frozen=True, eq=False)
class CostTradeoff:
    """The costs of a graph's nodes and borders, ready to be weighed against noise.

    Attributes:
        costs: what was measured.
        left: what becomes of nodes whose stored weights are too coarse, where they do not become integer kernels.
        excluded: what nodes may not be.
        is_timed: whether times are those of runs.
    """

    costs: CostModel
    left: Mapping[str, Demotion] = field(default_factory=dict)
    excluded: frozenset[NodeOption] = frozenset()
    is_timed: bool = True

    def float_side(self, node: str, noise: OptionSensitivities, weight: float) -> tuple[KernelOption | None, float]:
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

    def problem(self, noise: OptionSensitivities, weight: float) -> Problem:
        """Return the assignment problem that weighs time against noise.

        Args:
            noise: what each node adds.
            weight: nanoseconds that a noise-to-signal ratio of one is worth.
        """
        return self._problem({name: self.float_side(name, noise, weight)[1] for name in self._names}, noise, weight)

    def best(self, noise: OptionSensitivities, weight: float) -> Assignment:
        """Return the assignment of least time and weighed noise; see `problem`."""
        return self.assignment(cheapest(self.problem(noise, weight)), noise, weight)

    @property
    def quickest(self) -> Assignment:
        """The assignment of least time, or the scheme's where that takes as long, which then is taken if it will do."""
        best, whole = self.best(UNMEASURED, 0.0), self.planned(self.costs.full, UNMEASURED)
        return whole if whole.nanoseconds < AS_LONG * best.nanoseconds else best

    def by_weight(self, noise: OptionSensitivities, weights: Sequence[float]) -> Callable[[int], Assignment]:
        """Return what tells the best assignments for rising weights, by their places, and solves for as few as can be.

        Time plus weighed noise is a line over the weight for each assignment, and the best are the lowest of all lines:
        what is best for two weights is so for all between.
        """
        known: dict[int, Assignment] = {}

        def of(place: int) -> Assignment:
            if place not in known:
                below = known.get(max((other for other in known if other < place), default=-1))
                above = known.get(min((other for other in known if other > place), default=-1))
                between = below is not None and above is not None and below.ways == above.ways
                known[place] = below if below is not None and between else self.best(noise, weights[place])
            return known[place]

        return of

    def assignment(self, static: frozenset[str], noise: OptionSensitivities, weight: float) -> Assignment:
        """Return what it means that these nodes are static, the others taking what is best for them then."""
        sides = {name: self.float_side(name, noise, weight)[0] for name in self._names if name not in static}
        taken = {name: alternative for name, alternative in sides.items() if alternative is not None}
        return self._assigned(static, taken, noise)

    def planned(self, plan: Plan, noise: OptionSensitivities) -> Assignment:
        """Return what it means that every node is static or dynamic that is so in a plan.

        One that has to be so together with another, as with its clamp, counts as float where that is.
        """
        modes = {one.node: one.mode for one in plan.decisions}
        static = frozenset(name for name in self.costs.static_nodes if modes[name] is Mode.STATIC)
        static = static.difference(self.alone(static))
        dynamic = KernelOption(Mode.DYNAMIC)
        taken = {name: dynamic for name in self._dynamic if modes[name] is Mode.DYNAMIC}
        return self._assigned(static, taken, noise)

    def alone(self, static: Set[str]) -> list[str]:
        """Return those of some nodes that cannot be static without others, such as a convolution without its clamp."""
        company = set(static)
        while alone := {node for node, other in self.costs.followers if node in company and other not in company}:
            company -= alone
        return sorted(static - company)

    def repriced(self, assignment: Assignment, noise: OptionSensitivities) -> Assignment:
        """Return an assignment with the time and noise that are expected of it now."""
        return self._assigned(assignment.static, assignment.alternatives, noise)

    def _assigned(
        self, static: frozenset[str], taken: Mapping[str, KernelOption], noise: OptionSensitivities
    ) -> Assignment:
        times = {name: self._float_time(name, taken.get(name)) for name in self._names}
        spent = cost(self._problem(times, UNMEASURED, 0.0), static)
        return Assignment(static, taken, spent, self._predicted(static, taken, noise))

    def _predicted(
        self, static: frozenset[str], taken: Mapping[str, KernelOption], noise: OptionSensitivities
    ) -> float:
        """Return the noise-to-signal ratio at the worst output that the codes of an assignment add."""
        coded = [QuantizerId(one.tensor) for one in self.costs.borders if one.tensor and is_coded(one, static)]
        weighed = (name for name in self._names if name not in taken and self._is_coarse(name, static))
        coded += [QuantizerId(name, is_node=True) for name in weighed]
        found = [noise.static.together(coded)]
        for name, alternative in taken.items():
            known = noise.alternatives.get(alternative, NO_ERROR).ratios.get(QuantizerId(name, is_node=True))
            found += [] if known is None else [known]
        return worst_output_nsr(np.atleast_1d(sum(found)))

    def sensitivities(self, noise: OptionSensitivities) -> Iterator[NodeSensitivity]:
        """Yield what each node adds in noise with everything else in float, in each way that was asked about."""
        for (name, way), ratio in self.ways(noise).items():
            yield NodeSensitivity(name, way.mode, sqnr_of_ratio(ratio))

    def ways(self, noise: OptionSensitivities) -> Mapping[NodeOption, float]:
        """What is known of nodes as integers, by node and what they could be: the noise-to-signal ratio alone."""
        found = {(name, STATIC): noise.static.of(self._touched[name]) for name in self.costs.static_nodes}
        for alternative, noises in noise.alternatives.items():
            found.update({(name, alternative): ratio for name, ratio in noises.nodes.items()})
        return found

    @cached_property
    def _touched(self) -> Mapping[str, tuple[QuantizerId, ...]]:
        """What becomes codes when a node and nothing else is static."""
        found: dict[str, list[QuantizerId]] = {
            name: [QuantizerId(name, is_node=True)] for name in self.costs.static_nodes
        }
        for border in (one for one in self.costs.borders if one.tensor):
            for name in {border.producer or OUTSIDE, *border.consumers} & found.keys():
                found[name].append(QuantizerId(border.tensor))
        return {name: tuple(sources) for name, sources in found.items()}

    def _is_coarse(self, name: str, static: frozenset[str]) -> bool:
        """Whether the weights of a node have the codes that the scheme wants."""
        return name in static or name not in self.left

    def demotions(self, assignment: Assignment, noise: OptionSensitivities) -> Mapping[str, Demotion]:
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

    def without(self, ways: frozenset[NodeOption]) -> CostTradeoff:
        """Return the same for a choice in which these nodes may not be that."""
        return replace(self, excluded=ways)

    def corrected(self, assignment: Assignment, observed: NodeTimes) -> CostTradeoff:
        """Return the same with what the kernels of an assignment's model really took."""
        return replace(self, costs=self.costs.corrected(assignment.static, assignment.alternatives, observed))

    def _problem(self, floats: Mapping[str, float], noise: OptionSensitivities, weight: float) -> Problem:
        return Problem(
            float_costs={OUTSIDE: 0, **{name: round(paid) for name, paid in floats.items()}},
            integer_costs={
                name: round(paid + weight * noise.static.nodes.get(name, 0.0))
                for name, paid in self.costs.static_nodes.items()
                if (name, STATIC) not in self.excluded
            },
            borders=tuple(
                replace(border, coded=round(weight * noise.static.tensors.get(border.tensor, 0.0)))
                for border in self.costs.borders
            ),
            followers=self.costs.followers,
        )

    def _reason(
        self, name: str, noise: OptionSensitivities, wanted: Mode, taken: KernelOption | None
    ) -> tuple[str, str]:
        """Return why a node is not what the scheme wants, static or dynamic, and the figures behind it."""
        own = noise.static.of(self._touched.get(name, ()))
        ratio = own if wanted is Mode.STATIC else noise.of(KernelOption(Mode.DYNAMIC), name)
        return reason_of(self.costs, name, wanted, ratio, taken) if self.is_timed else untimed_reason(wanted, ratio)

    def _float_time(self, name: str, taken: KernelOption | None) -> float:
        return self.costs.floats.nodes.get(name, 0.0) if taken is None else self.costs.offered[taken][name]

    def _stored_noise(self, name: str, noise: OptionSensitivities) -> float:
        return 0.0 if name in self.left else noise.static.nodes.get(name, 0.0)

    @property
    def _dynamic(self) -> Mapping[str, float]:
        return self.costs.offered.get(KernelOption(Mode.DYNAMIC), {})

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for scope in all_graphs(self.costs.graph) for node in scope.nodes)
