"""Time traded against error: the minimum cut over all options, and the reasons of its decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from onnxq.config.scheme import Mode
from onnxq.ir import all_graphs
from onnxq.numerics.affine import decibels, sqnr_of_ratio
from onnxq.planning.plan import Demotion, Plan
from onnxq.search.assignment import Problem, cheapest, cost, is_quantized
from onnxq.search.cost_model import OUTSIDE, STATIC, CostModel, KernelOption, NodeOption
from onnxq.search.search import NodeSensitivity
from onnxq.search.sensitivity import NO_ERROR, QuantizerId, Sensitivities, worst_output_nsr

_BESIDE = {
    Mode.STATIC: "with fixed scales",
    Mode.DYNAMIC: "with dynamic scales",
    Mode.STORAGE: "with floats that are dequantized at load",
}


def reason_of(costs: CostModel, name: str, wanted: Mode, ratio: float, taken: KernelOption | None) -> tuple[str, str]:
    """Return why a node differs from the scheme, and the figures behind it.

    `wanted` is the mode in the scheme (static, dynamic or stored), and `taken` the option (None for float). `ratio` is
    the noise-to-signal ratio of the node alone in mode `wanted`; 0 if unknown.
    """
    floats, integers = costs.floats.nodes.get(name, 0.0), _integers(costs, wanted).get(name, 0.0)
    figures = [f"{floats / 1e6:.3f} ms in float"]
    figures += [f"{integers / 1e6:.3f} ms as integers"] if wanted is not Mode.STORAGE else []
    figures += _others(costs, name, wanted)
    if ratio:
        figures.append(f"{decibels(sqnr_of_ratio(ratio))} as integers alone")
    if taken is not None:
        reason = f"it is faster so, or has less error, than {_BESIDE[wanted]}"
    elif integers >= floats:
        reason = "it is not faster as an integer kernel on this machine"
    elif ratio:
        reason = "its integer kernel gains less time than its error is worth"
    else:
        reason = "its integer kernel gains less time than its QuantizeLinear and DequantizeLinear nodes cost"
    return reason, ", ".join(figures)


def _integers(costs: CostModel, wanted: Mode) -> Mapping[str, float]:
    return costs.static_nodes if wanted is Mode.STATIC else costs.offered.get(KernelOption(Mode.DYNAMIC), {})


def _others(costs: CostModel, name: str, wanted: Mode) -> Iterator[str]:
    for alternative, times in costs.offered.items():
        if name in times and alternative.mode is not wanted:
            yield f"{times[name] / 1e6:.3f} ms {alternative.described}"


# Time traded against error

AS_LONG = 1.05
"""Two plans take equally long if the one with fewer boundaries is expected to take at most this many times as long."""


@dataclass(frozen=True, eq=False)
class OptionSensitivities:
    """Sensitivities of the scheme's quantizers and of each option.

    Attributes:
        static: of tensors with fixed scales, and of each node's weights; compressed weights have the same values.
        alternatives: of the own quantizers of nodes that take an option.
    """

    static: Sensitivities = NO_ERROR
    alternatives: Mapping[KernelOption, Sensitivities] = field(default_factory=dict)

    def of(self, alternative: KernelOption, node: str) -> float:
        """Return the noise-to-signal ratio that a node adds in an option; 0 if unknown."""
        return self.alternatives[alternative].nodes.get(node, 0.0) if alternative in self.alternatives else 0.0


UNMEASURED = OptionSensitivities()
"""Nothing is known, so only time counts."""


@dataclass(frozen=True)
class Assignment:
    """The option of each node, with the time and error to expect.

    Attributes:
        static: nodes that run as integer kernels with fixed scales.
        alternatives: the option of other nodes that are not float.
        nanoseconds: expected time of a run.
        nsr: predicted noise-to-signal ratio at the worst output with all quantizers of the assignment.
    """

    static: frozenset[str]
    alternatives: Mapping[str, KernelOption]
    nanoseconds: float
    nsr: float

    @property
    def options(self) -> frozenset[NodeOption]:
        """The chosen options, without the expected figures."""
        return frozenset([*((node, STATIC) for node in self.static), *self.alternatives.items()])


@dataclass(frozen=True, eq=False)
class CostTradeoff:
    """Costs of a graph's nodes and boundaries, to be weighed against error.

    Attributes:
        left: demotions of nodes whose compressed weights are too coarse, unless they become integer kernels.
        excluded: options that nodes may not take.
    """

    costs: CostModel
    left: Mapping[str, Demotion] = field(default_factory=dict)
    excluded: frozenset[NodeOption] = frozenset()

    def float_side(
        self, node: str, sensitivities: OptionSensitivities, weight: float
    ) -> tuple[KernelOption | None, float]:
        """Return the best option of a node with float inputs and outputs (None for float), and its cost.

        `weight` is the value of a noise-to-signal ratio of one in nanoseconds.
        """
        stored = self._float_time(node, None) + weight * self._stored_nsr(node, sensitivities)
        offered = [
            (times[node] + weight * sensitivities.of(alternative, node), alternative)
            for alternative, times in self.costs.worthwhile.items()
            if node in times and (node, alternative) not in self.excluded
        ]
        least, best = min(offered, key=lambda one: one[0], default=(math.inf, None))
        return (best, least) if least < stored else (None, stored)

    def problem(self, sensitivities: OptionSensitivities, weight: float) -> Problem:
        """Return the assignment problem that weighs time against error.

        `weight` is the value of a noise-to-signal ratio of one in nanoseconds.
        """
        return self._problem(
            {name: self.float_side(name, sensitivities, weight)[1] for name in self._names}, sensitivities, weight
        )

    def best(self, sensitivities: OptionSensitivities, weight: float) -> Assignment:
        """Return the assignment of least time plus weighted error; see `problem`."""
        return self.assignment(cheapest(self.problem(sensitivities, weight)), sensitivities, weight)

    @property
    def quickest(self) -> Assignment:
        """The assignment of least time, or the plan of the scheme if that takes as long (see `AS_LONG`)."""
        best, whole = self.best(UNMEASURED, 0.0), self.planned(self.costs.full, UNMEASURED)
        return whole if whole.nanoseconds < AS_LONG * best.nanoseconds else best

    def by_weight(self, sensitivities: OptionSensitivities, weights: Sequence[float]) -> Callable[[int], Assignment]:
        """Return a function from the index of a rising weight to the best assignment, with as few cuts as possible.

        The cost of an assignment is a line over the weight, and the best assignments form the lower envelope of all
        lines. So an assignment that is best for two weights is best for all weights between them.
        """
        known: dict[int, Assignment] = {}

        def of(place: int) -> Assignment:
            if place not in known:
                below = known.get(max((other for other in known if other < place), default=-1))
                above = known.get(min((other for other in known if other > place), default=-1))
                between = below is not None and above is not None and below.options == above.options
                known[place] = below if below is not None and between else self.best(sensitivities, weights[place])
            return known[place]

        return of

    def assignment(self, static: frozenset[str], sensitivities: OptionSensitivities, weight: float) -> Assignment:
        """Return the assignment in which exactly these nodes are static, and the others take their best option."""
        sides = {name: self.float_side(name, sensitivities, weight)[0] for name in self._names if name not in static}
        taken = {name: alternative for name, alternative in sides.items() if alternative is not None}
        return self._assigned(static, taken, sensitivities)

    def planned(self, plan: Plan, sensitivities: OptionSensitivities) -> Assignment:
        """Return the assignment of a plan's static and dynamic nodes.

        A node that can only be static together with another one, such as its clamp, counts as float if the other is
        float.
        """
        modes = {one.node: one.mode for one in plan.decisions}
        static = frozenset(name for name in self.costs.static_nodes if modes[name] is Mode.STATIC)
        static = static.difference(self.alone(static))
        dynamic = KernelOption(Mode.DYNAMIC)
        taken = {name: dynamic for name in self._dynamic if modes[name] is Mode.DYNAMIC}
        return self._assigned(static, taken, sensitivities)

    def alone(self, static: Set[str]) -> list[str]:
        """Return the nodes that need others outside of the set to be static, such as a convolution its clamp."""
        company = set(static)
        while alone := {node for node, other in self.costs.followers if node in company and other not in company}:
            company -= alone
        return sorted(static - company)

    def _assigned(
        self, static: frozenset[str], taken: Mapping[str, KernelOption], sensitivities: OptionSensitivities
    ) -> Assignment:
        times = {name: self._float_time(name, taken.get(name)) for name in self._names}
        spent = cost(self._problem(times, UNMEASURED, 0.0), static)
        return Assignment(static, taken, spent, self._predicted(static, taken, sensitivities))

    def _predicted(
        self, static: frozenset[str], taken: Mapping[str, KernelOption], sensitivities: OptionSensitivities
    ) -> float:
        """Return the predicted noise-to-signal ratio at the worst output."""
        quantized = [QuantizerId(one.tensor) for one in self.costs.borders if one.tensor and is_quantized(one, static)]
        weighed = (name for name in self._names if name not in taken and self._is_coarse(name, static))
        quantized += [QuantizerId(name, is_node=True) for name in weighed]
        found = [sensitivities.static.together(quantized)]
        for name, alternative in taken.items():
            known = sensitivities.alternatives.get(alternative, NO_ERROR).ratios.get(QuantizerId(name, is_node=True))
            found += [] if known is None else [known]
        return worst_output_nsr(np.atleast_1d(sum(found)))

    def sensitivities(self, sensitivities: OptionSensitivities) -> Iterator[NodeSensitivity]:
        """Yield the error of each node alone, in each measured option."""
        for (name, option), ratio in self.options(sensitivities).items():
            yield NodeSensitivity(name, option.mode, sqnr_of_ratio(ratio))

    def options(self, sensitivities: OptionSensitivities) -> Mapping[NodeOption, float]:
        """Return the noise-to-signal ratio of each node alone in each integer option."""
        found = {(name, STATIC): sensitivities.static.of(self._touched[name]) for name in self.costs.static_nodes}
        for alternative, measured in sensitivities.alternatives.items():
            found.update({(name, alternative): ratio for name, ratio in measured.nodes.items()})
        return found

    @cached_property
    def _touched(self) -> Mapping[str, tuple[QuantizerId, ...]]:
        """The quantizers that are on if only one node is static, by node."""
        found: dict[str, list[QuantizerId]] = {
            name: [QuantizerId(name, is_node=True)] for name in self.costs.static_nodes
        }
        for border in (one for one in self.costs.borders if one.tensor):
            for name in {border.producer or OUTSIDE, *border.consumers} & found.keys():
                found[name].append(QuantizerId(border.tensor))
        return {name: tuple(sources) for name, sources in found.items()}

    def _is_coarse(self, name: str, static: frozenset[str]) -> bool:
        """Return whether the weights of a node have the scheme's spec."""
        return name in static or name not in self.left

    def demotions(self, assignment: Assignment, sensitivities: OptionSensitivities) -> Mapping[str, Demotion]:
        """Return the demotions that make the planner carry out an assignment, with their reasons."""
        found = {}
        for decision in self.costs.full.decisions:
            name = decision.node
            taken = assignment.alternatives.get(name)
            if name in assignment.static:
                continue
            if taken is not None:
                if taken.mode is not decision.mode:
                    found[name] = taken.demotion(*self._reason(name, sensitivities, decision.mode, taken))
            elif name in self.left:
                found[name] = self.left[name]
            elif decision.mode in (Mode.STATIC, Mode.DYNAMIC):
                found[name] = Demotion(Mode.STORAGE, *self._reason(name, sensitivities, decision.mode, None))
        return found

    def without(self, options: frozenset[NodeOption]) -> CostTradeoff:
        """Return the same with these options excluded."""
        return replace(self, excluded=options)

    def _problem(self, floats: Mapping[str, float], sensitivities: OptionSensitivities, weight: float) -> Problem:
        return Problem(
            float_costs={OUTSIDE: 0, **{name: round(paid) for name, paid in floats.items()}},
            integer_costs={
                name: round(paid + weight * sensitivities.static.nodes.get(name, 0.0))
                for name, paid in self.costs.static_nodes.items()
                if (name, STATIC) not in self.excluded
            },
            borders=tuple(
                replace(border, quantized=round(weight * sensitivities.static.tensors.get(border.tensor, 0.0)))
                for border in self.costs.borders
            ),
            followers=self.costs.followers,
        )

    def _reason(
        self, name: str, sensitivities: OptionSensitivities, wanted: Mode, taken: KernelOption | None
    ) -> tuple[str, str]:
        own = sensitivities.static.of(self._touched.get(name, ()))
        ratio = own if wanted is Mode.STATIC else sensitivities.of(KernelOption(Mode.DYNAMIC), name)
        return reason_of(self.costs, name, wanted, ratio, taken)

    def _float_time(self, name: str, taken: KernelOption | None) -> float:
        return self.costs.floats.nodes.get(name, 0.0) if taken is None else self.costs.offered[taken][name]

    def _stored_nsr(self, name: str, sensitivities: OptionSensitivities) -> float:
        return 0.0 if name in self.left else sensitivities.static.nodes.get(name, 0.0)

    @property
    def _dynamic(self) -> Mapping[str, float]:
        return self.costs.offered.get(KernelOption(Mode.DYNAMIC), {})

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for scope in all_graphs(self.costs.graph) for node in scope.nodes)
