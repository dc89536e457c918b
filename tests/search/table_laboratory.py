"""A laboratory that reads what plans take and add in noise from tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto

from onnxq.config.effort import EFFORTS
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, read_model
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search.frontier import find_fastest
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.search import FINEST, PlanSearch
from onnxq.search.sensitivity import QuantizerId, Sensitivities
from onnxq.system.resources import silent

NODES = ("c0", "c1", "c2", "c3", "c4", "c5")
BORDER = 10_000.0


def products_of(build: Callable[..., ModelProto]) -> Graph:
    """Return products one behind the other, called after `NODES`."""
    names = ["x", "t0", "t1", "t2", "t3", "t4", "y"]
    nodes = " ".join(f"[{name}] {names[i + 1]} = MatMul({names[i]}, w{i})" for i, name in enumerate(NODES))
    weights = {f"w{i}": (64, 64) for i in range(len(NODES))}
    return prepare(read_model(build(f"(float[4,64] x) => (float[4,64] y) {{ {nodes} }}", **weights)))


def kind(decision: Decision) -> str:
    """Return what the table of alternatives calls the mode of a node."""
    return decision.weights[0].spec.format if decision.mode is Mode.WEIGHT_ONLY else str(decision.mode)


@dataclass
class Table:
    """A laboratory whose results are looked up: times in nanoseconds by node, and noise-to-signal ratios.

    ``sensitivities`` is that of the tensor that a node reads, ``stored`` that of its weights. The alternatives' time
    and ratio is that of every node, by the codes' format, or ``dynamic``.
    """

    graph: Graph
    floats: Mapping[str, float]
    static: Mapping[str, float]
    sensitivities: Mapping[str, float]
    stored: Mapping[str, float] = field(default_factory=dict)
    alternatives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scheme: str = "int8"
    seen: set[object] = field(default_factory=set)
    compared: list[object] = field(default_factory=list)

    @property
    def measured(self) -> int:
        return len(self.seen)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named(self.scheme), target_named("onnxruntime-cpu"), demotions)

    @property
    def run(self) -> float:
        return 0.1

    @property
    def process(self) -> float:
        return 1.0

    @property
    def read(self) -> Mapping[str, float]:
        """The noise by tensor."""
        return {node.inputs[0].name: self.sensitivities.get(node.name, 0.0) for node in self.graph.nodes}

    def quantized(self, decision: Decision) -> float:
        """Return the noise of what a node alone has as quantized values."""
        if not decision.weights or decision.weights[0].spec == FINEST:
            return 0.0
        if decision.mode in (Mode.STATIC, Mode.STORAGE):
            return self.stored.get(decision.node, 0.0)
        return self.alternatives.get(kind(decision), (0.0, 0.0))[1]

    def measure_sensitivities(self, plan: Plan, nodes: Set[str] | None, runs: int) -> Sensitivities:
        ratios = {
            QuantizerId(one.node, is_node=True): np.array([self.quantized(one)])
            for one in plan.decisions
            if nodes is None or one.node in nodes
        }
        if nodes is None:
            ratios |= {QuantizerId(one.tensor): np.array([self.read.get(one.tensor, 0.0)]) for one in plan.activations}
        return Sensitivities(ratios, alone=frozenset(ratios))

    def sqnr(self, plan: Plan) -> float:
        self.seen.add(plan.effect)
        ratio = 1e-9 + sum(self.quantized(one) for one in plan.decisions)
        return -10 * math.log10(ratio + sum(self.read.get(one.tensor, 0.0) for one in plan.activations))

    def time(self, decision: Decision) -> float:
        if decision.mode is Mode.STATIC:
            return self.static[decision.node]
        floats = self.floats[decision.node]
        return self.alternatives.get(kind(decision), (floats, 0.0))[0]

    def times(self, plan: Plan | None) -> NodeTimes:
        modes = {} if plan is None else {one.node: one.mode for one in plan.decisions}
        nodes = {name: self.time(plan.by_node[name]) if plan else time for name, time in self.floats.items()}
        activations = () if plan is None else plan.activations
        readers = {tensor.name: tensor.outputs for node in self.graph.nodes for tensor in (*node.inputs, *node.outputs)}
        makers = {tensor.name: node.name for node in self.graph.nodes for tensor in node.outputs}
        borders = {}
        for activation in activations:
            name = activation.tensor
            made = modes.get(makers.get(name, "")) is Mode.STATIC
            read = [modes.get(node.name) is Mode.STATIC for node in readers[name]]
            if made != all(read) or not read:
                borders[name] = BORDER
        return NodeTimes(nodes, borders, dict.fromkeys(self.floats, 1_000.0), 0.0)

    def expresses(self, plan: Plan) -> bool:
        return True

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        self.compared += [plan.effect for plan in plans]
        return [self.times(None).total / self.times(plan).total for plan in plans]


def search(table: Table, goal: float = 20.0, **changes: float) -> PlanSearch:
    effort = EFFORTS["fast"]
    assert effort is not None
    target = target_named("onnxruntime-cpu")
    return find_fastest(table, table.graph, target, goal, replace(effort, **changes), silent)


def static(outcome: PlanSearch) -> list[str]:
    return [one.node for one in outcome.plan.decisions if one.mode is Mode.STATIC]


def by_kind(outcome: PlanSearch) -> dict[str, int]:
    return dict(Counter(kind(one) for one in outcome.plan.decisions))
