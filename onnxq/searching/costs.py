"""What it costs to run each node as floats or as integers, and each border between the two, on this machine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxq.graph import Graph, Node, Variable
from onnxq.operators import OPERATORS, Role
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Demotion, Plan
from onnxq.scheme import Mode
from onnxq.searching.assignment import Border, Problem, cost
from onnxq.searching.kernel_times import NodeTimes
from onnxq.targets import Target

# What a QuantizeLinear or DequantizeLinear costs where no border of the measured models tells: nanoseconds.
_BORDER = 3_000.0
_BORDER_ELEMENT = 0.5
# Stands for all that reads a tensor beside the nodes of the main graph: outputs of the graph and bodies, always floats.
_OUTSIDE = ""


@dataclass(frozen=True)
class Costs:
    """Times of the same runs in different modes.

    Attributes:
        floats: of the prepared float model.
        static: of the model in which every node is static that can be.
        dynamic: of the model in which every node is dynamic that can be; None when none can.
    """

    floats: NodeTimes
    static: NodeTimes
    dynamic: NodeTimes | None


@dataclass(frozen=True)
class Noise:
    """Noise-to-signal ratio at the worst output that a node adds in each mode.

    Attributes:
        static: by node.
        dynamic: by node.
        stored: by node.
    """

    static: Mapping[str, float]
    dynamic: Mapping[str, float]
    stored: Mapping[str, float]


_SILENT = Noise({}, {}, {})


@dataclass(frozen=True)
class Assignment:
    """Which nodes run in which mode, and what that is expected to give.

    Attributes:
        static: nodes that run as integer kernels with fixed scales.
        dynamic: nodes that multiply integers whose scale is computed in each run.
        nanoseconds: expected time of a run.
        noise: expected noise-to-signal ratio.
    """

    static: frozenset[str]
    dynamic: frozenset[str]
    nanoseconds: float
    noise: float


@dataclass(frozen=True, eq=False)
class Prices:
    """The costs of a graph's nodes and borders, ready to be weighed against noise.

    Attributes:
        graph: the prepared graph.
        full: the plan in which every node is static that can be.
        dynamic: the plan in which every node is dynamic that can be; None when none can.
        costs: measured times.
        target: the runtime.
        left: what becomes of nodes whose stored weights are too coarse, where they do not become integer kernels.
        excluded: nodes that may not be static.
    """

    graph: Graph
    full: Plan
    dynamic: Plan | None
    costs: Costs
    target: Target
    left: Mapping[str, Demotion] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()

    @cached_property
    def static_nodes(self) -> Mapping[str, float]:
        """Nanoseconds of each node that can be static, what it makes slower around it included."""
        return _converted(self.graph, self.full, Mode.STATIC, self.costs.floats, self.costs.static)

    @cached_property
    def dynamic_nodes(self) -> Mapping[str, float]:
        """Nanoseconds of each node that can be dynamic, what it makes slower around it included."""
        if self.dynamic is None or self.costs.dynamic is None:
            return {}
        return _converted(self.graph, self.dynamic, Mode.DYNAMIC, self.costs.floats, self.costs.dynamic)

    def float_side(self, node: str, noise: Noise, weight: float) -> tuple[Mode, float]:
        """Return the best mode of a node whose neighbours see floats, and its cost in nanoseconds."""
        mode = self.left[node].mode if node in self.left else Mode.STORAGE
        ratio = 0.0 if node in self.left else noise.stored.get(node, 0.0)
        stored = self.costs.floats.nodes.get(node, 0.0) + weight * ratio
        if node not in self.dynamic_nodes:
            return mode, stored
        dynamic = self.dynamic_nodes[node] + weight * noise.dynamic.get(node, 0.0)
        return (Mode.DYNAMIC, dynamic) if dynamic < stored else (mode, stored)

    def problem(self, noise: Noise, weight: float) -> Problem:
        """Return the assignment problem that weighs time against noise.

        Args:
            noise: what each node adds.
            weight: nanoseconds that a noise-to-signal ratio of one is worth.
        """
        names = [node.name for node in self.graph.nodes]
        return Problem(
            float_costs={_OUTSIDE: 0, **{name: round(self.float_side(name, noise, weight)[1]) for name in names}},
            integer_costs={
                name: round(cost + weight * noise.static.get(name, 0.0))
                for name, cost in self.static_nodes.items()
                if name not in self.excluded
            },
            borders=self.borders,
            followers=self.followers,
        )

    def assignment(self, static: frozenset[str], noise: Noise, weight: float) -> Assignment:
        """Return what it means that these nodes are static, the others taking what is best for them then."""
        floats = {node.name: self.float_side(node.name, noise, weight) for node in self.graph.nodes}
        dynamic = frozenset(name for name, (mode, _) in floats.items() if mode is Mode.DYNAMIC and name not in static)
        problem = self.problem(_SILENT, 0.0)
        modes = ((noise.static, static), (noise.dynamic, dynamic))
        ratio = sum(found.get(name, 0.0) for found, names in modes for name in names)
        ratio += sum(
            ratio for name, ratio in noise.stored.items() if name not in static | dynamic and name not in self.left
        )
        slower = sum(
            self.dynamic_nodes[name] - problem.float_costs[name]
            for name in dynamic
            if problem.float_costs[name] < self.dynamic_nodes[name]
        )
        return Assignment(static, dynamic, cost(problem, static) + slower, ratio)

    def demotions(self, assignment: Assignment, noise: Noise) -> Mapping[str, Demotion]:
        """Return what makes the planner do what was assigned, with the reasons."""
        found = {}
        for decision in self.full.decisions:
            name = decision.node
            dynamic = name in assignment.dynamic
            if name in self.left and name not in assignment.static and not dynamic:
                found[name] = self.left[name]
            elif decision.mode is Mode.STATIC and name not in assignment.static:
                mode = Mode.DYNAMIC if dynamic else Mode.STORAGE
                found[name] = Demotion(mode, *self._reason(name, noise, Mode.STATIC, dynamic=dynamic))
            elif decision.mode is Mode.DYNAMIC and name in self.dynamic_nodes and not dynamic:
                found[name] = Demotion(Mode.STORAGE, *self._reason(name, noise, Mode.DYNAMIC, dynamic=False))
        return found

    def _reason(self, name: str, noise: Noise, wanted: Mode, *, dynamic: bool) -> tuple[str, str]:
        """Return why a node is not what the scheme wants, static or dynamic, and the figures behind it."""
        times, ratios = (
            (self.static_nodes, noise.static) if wanted is Mode.STATIC else (self.dynamic_nodes, noise.dynamic)
        )
        floats, integers = self.costs.floats.nodes.get(name, 0.0), times.get(name, 0.0)
        figures = f"{floats / 1e6:.3f} ms in float, {integers / 1e6:.3f} ms as integers"
        if wanted is Mode.STATIC and name in self.dynamic_nodes:
            figures += f", {self.dynamic_nodes[name] / 1e6:.3f} ms with dynamic scales"
        if ratio := ratios.get(name, 0.0):
            figures += f", {-10 * math.log10(ratio):.1f} dB alone"
        if dynamic:
            return "it is faster so, or less noisy, than with fixed scales", figures
        if integers >= floats:
            return "it is not faster as an integer kernel on this machine", figures
        if ratio:
            return "the time it gains as an integer kernel is not worth the noise", figures
        return "what it gains as an integer kernel is less than what its borders cost", figures

    def without(self, nodes: frozenset[str]) -> Prices:
        """Return the same for a choice in which these nodes may not be static."""
        return replace(self, excluded=nodes)

    def corrected(self, assignment: Assignment, observed: NodeTimes) -> Prices:
        """Return the same with what the kernels of an assignment's model really took."""
        static = self.costs.static
        ours = {
            name: time
            for name, time in observed.nodes.items()
            if name in assignment.static or name not in self.static_nodes
        }
        borders = {**static.borders, **{name: time for name, time in observed.borders.items() if time}}
        costs = replace(self.costs, static=replace(static, nodes={**static.nodes, **ours}, borders=borders))
        return replace(self, costs=costs)

    @cached_property
    def borders(self) -> tuple[Border, ...]:
        """A border for each tensor that an integer node reads or makes."""
        found = []
        quantize, dequantize = self._rates
        outputs = set(self.graph.outputs)
        for tensor in self._tensors:
            producer = _producer(tensor)
            maker = self._integer_maker(producer)
            readers = tuple(
                dict.fromkeys(node.name if node.name in self._listed else _OUTSIDE for node in tensor.outputs)
            )
            if tensor in outputs:
                readers = (*readers, _OUTSIDE)
            if maker is None and not any(name in self.static_nodes for name in readers):
                continue
            size = self.costs.floats.elements.get(producer.name, 0.0) if producer is not None else 0.0
            known = round(self.costs.static.borders.get(tensor.name, 0.0))
            into = round(_BORDER + quantize * size)
            back = round(_BORDER + dequantize * size)
            if known and maker is None:
                into = known
            elif known:
                back = known
            found.append(Border(maker, readers, into, back))
        return tuple(found)

    @cached_property
    def followers(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a node that only passes integers on, or a clamp, and the node that it needs them from."""
        found = []
        for node in self.graph.nodes:
            if node.name not in self.static_nodes:
                continue
            operator = OPERATORS[node.op]
            if operator.role is Role.COMPUTE:
                continue
            for tensor in data_inputs(node, operator):
                producer = _producer(tensor)
                if producer is not None:
                    found.append((node.name, producer.name))
                    if operator.role is Role.CLAMP:
                        found.append((producer.name, node.name))
        return tuple(found)

    @cached_property
    def _listed(self) -> Set[str]:
        return {node.name for node in self.graph.nodes}

    @cached_property
    def _tensors(self) -> tuple[Variable, ...]:
        made = [tensor for node in self.graph.nodes for tensor in node.outputs if tensor.name]
        return (*self.graph.inputs, *made)

    def _integer_maker(self, producer: Node | None) -> str | None:
        """Return the node when it gives codes as an integer kernel, rather than floats."""
        if producer is None or producer.name not in self.static_nodes:
            return None
        behind = producer.inputs[0].inputs if producer.op in self.target.clamps else []
        gives_floats = any(node.op in self.target.float_output for node in (producer, *behind))
        return None if gives_floats else str(producer.name)

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """Nanoseconds of an element to quantize and to dequantize it, changes of layout included."""
        times, sizes = [0.0, 0.0], [0.0, 0.0]
        for tensor in self._tensors:
            producer = _producer(tensor)
            size = self.costs.floats.elements.get(producer.name, 0.0) if producer is not None else 0.0
            time = self.costs.static.borders.get(tensor.name, 0.0)
            if size and time:
                direction = 1 if self._integer_maker(producer) is not None else 0
                times[direction] += time
                sizes[direction] += size
        rates = [time / size if size else _BORDER_ELEMENT for time, size in zip(times, sizes, strict=True)]
        return rates[0], rates[1]


def _producer(tensor: Variable) -> Node | None:
    return tensor.inputs[0] if tensor.inputs else None


def _converted(graph: Graph, plan: Plan, mode: Mode, floats: NodeTimes, found: NodeTimes) -> dict[str, float]:
    """Return the time of each node of ``mode``, and what others take longer than in float at the nearest such node.

    Others take longer because a pattern that the runtime fuses in float was cut, or because of their data's layout.
    """
    times = {decision.node: found.nodes.get(decision.node, 0.0) for decision in plan.decisions if decision.mode is mode}
    times = {node.name: times[node.name] for node in graph.nodes if node.name in times}
    cause: dict[Node, str] = {}
    longer: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        if node.name in times:
            cause[node] = node.name
            continue
        known = (cause.get(tensor.inputs[0]) for tensor in node.inputs if tensor.inputs)
        blamed = next((name for name in known if name is not None), None)
        if blamed is not None:
            cause[node] = blamed
            longer[blamed] += found.nodes.get(node.name, 0.0) - floats.nodes.get(node.name, 0.0)
    return {name: time + max(longer[name], 0.0) for name, time in times.items()}
