"""What each way to run a node costs in time, error and bytes, and the choice of least cost by a minimum cut."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.ir import Graph, Node, Variable, all_graphs, operator_key, producer
from onnxq.numerics.affine import decibels, sqnr_of_ratio
from onnxq.numerics.formats import format_named
from onnxq.ops import OPERATORS, Role
from onnxq.planning.experts import weights_of_experts
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import DECODING, Decision, Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.assignment import Border, Problem, cheapest, cost
from onnxq.search.kernel_times import UNTIMED, NodeTimes
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.sensitivity import SILENT, QuantizerId, Sensitivities

INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})
OUTSIDE = ""
"""Stands for the consumer of graph and body outputs, which are always floats."""
FINER = QuantSpec("int8-narrow", granularity=(32,), scale="float16")
"""For weights of fewer than 8 bits that are too coarse."""
FINEST = QuantSpec("int16-narrow", granularity=Granularity.CHANNEL)
"""For weights that need more than 8 bits: half the size of floats, and hardly any error."""

# Nanoseconds of a QuantizeLinear or DequantizeLinear where no measured model has one: a launch, and each element.
_BORDER_NS, _BORDER_ELEMENT_NS = 3_000.0, 0.5
# Nanoseconds to write and read an element as float instead of as a quantized value.
_WIDER_ELEMENT_NS = 0.2
# What all weights with one byte more a value are worth, in runs of the float model: next to nothing where integers are
# to be fast, so that only ties go to the smaller file, and a whole run where a small file is all that is wanted.
_BYTES_OF_INTEGERS, _BYTES_OF_WEIGHTS = 0.02, 1.0
# Time of another option than the scheme's beside float where nothing is timed; that of the scheme is half.
_UNTIMED_OFFER = 0.75
_FLOAT_BITS = 32


@dataclass(frozen=True, eq=False)
class Offer:
    """Another way to run nodes than the scheme's, with the times of a model in which all nodes that can take it do.

    Attributes:
        weight: spec of the weights; None keeps the scheme's.
    """

    mode: Mode
    plan: Plan
    nodes: frozenset[str]
    weight: QuantSpec | None = None
    times: NodeTimes = UNTIMED


@dataclass(frozen=True)
class Side:
    """A way to run a node between floats.

    Attributes:
        mode: of the node in the plan.
        weight: spec of its weights; None keeps the scheme's.
        bytes: that its weights take beyond those of the scheme.
    """

    mode: Mode
    weight: QuantSpec | None
    nanoseconds: float
    error: float
    bytes: float = 0.0


@dataclass(frozen=True)
class Choice:
    """How each node runs, with what is expected of it.

    Attributes:
        static: nodes that are integer kernels with fixed scales.
        sides: how all others run between floats.
        nanoseconds: expected time of a run.
        error: expected noise-to-signal ratio, the sum over all quantizers.
    """

    static: frozenset[str]
    sides: Mapping[str, Side]
    nanoseconds: float
    error: float

    def __str__(self) -> str:
        modes = [side.mode for side in self.sides.values()]
        counts = f"{len(self.static)} static, {modes.count(Mode.DYNAMIC)} dynamic"
        finer = sum(side.weight is not None for side in self.sides.values())
        expected = decibels(sqnr_of_ratio(max(self.error, 1e-30)))
        return f"{counts}, {finer} finer, {self.nanoseconds / 1e6:.3f} ms, {expected} expected"


@dataclass(frozen=True, eq=False)
class Costs:
    """Nanoseconds of nodes and of borders between floats and integers, from runs of whole models in different modes.

    Attributes:
        graph: the prepared graph.
        full: the plan of the scheme, with all possible nodes quantized.
        floats: times of the prepared float model.
        full_times: times of the full plan's model.
        offers: other ways to run nodes.
        finer: the specs with which each node's weights can be more accurate, coarsest first; None stands for floats.
        has_times: whether times were measured; otherwise a node is worth its weights.
    """

    graph: Graph
    target: Target
    full: Plan
    floats: NodeTimes
    full_times: NodeTimes
    offers: tuple[Offer, ...]
    finer: Mapping[str, tuple[QuantSpec | None, ...]]
    has_times: bool = True

    @classmethod
    def of(
        cls, model: PreparedModel, full: Plan, times: tuple[NodeTimes, NodeTimes] | None, offers: tuple[Offer, ...]
    ) -> Costs:
        """Return the costs of a prepared model.

        Args:
            model: the prepared model.
            full: the plan of the scheme.
            times: of the float model and of the full plan's model; None if nothing is measured.
            offers: other ways to run nodes, with their times.
        """
        own = frozenset(decision.node for decision in full.decisions if decision.mode is Mode.DYNAMIC)
        floats, scheme = times or _by_weights(full)
        if own and not any(offer.mode is Mode.DYNAMIC for offer in offers):
            # What is dynamic in the scheme is measured in its own model.
            offers = (*offers, Offer(Mode.DYNAMIC, full, own, times=scheme))
        finer = _finer_specs(model, full)
        return cls(model.graph, model.target, full, floats, scheme, offers, finer, times is not None)

    # Choices

    def best(
        self,
        noise: Sensitivities,
        price: float,
        *,
        finer: Set[str] = frozenset(),
        without: Set[str] = frozenset(),
        integers: bool = True,
    ) -> Choice:
        """Return the choice of least time plus bytes plus `price` nanoseconds for each unit of error.

        Args:
            noise: errors of the quantizers.
            price: of a noise-to-signal ratio of 1 at the worst output.
            finer: nodes whose weights may take more bits.
            without: nodes that are not static.
            integers: whether nodes may process quantized values in each run.
        """

        def price_of(side: Side) -> float:
            return side.nanoseconds + price * side.error + self._byte_price * side.bytes

        sides = {
            name: min(self._sides(name, noise, may_be_finer=name in finer, integers=integers), key=price_of)
            for name in self._names
        }
        allowed = {name: time for name, time in self.static_times.items() if integers and name not in without}
        floats = {name: price_of(side) for name, side in sides.items()}
        static = {name: time + price * noise.nodes.get(name, 0.0) for name, time in allowed.items()}
        chosen = cheapest(self._problem(floats, static, noise, price))
        return self.choice(chosen, {name: side for name, side in sides.items() if name not in chosen}, noise)

    def choice(self, static: frozenset[str], sides: Mapping[str, Side], noise: Sensitivities) -> Choice:
        """Return a choice with its expected time and error."""
        times = {name: side.nanoseconds for name, side in sides.items()}
        spent = cost(
            self._problem({**dict.fromkeys(self._names, 0.0), **times}, self.static_times, SILENT, 0.0), static
        )
        touched = (border for border in self.borders if border.tensor and static & {border.producer, *border.consumers})
        errors = (
            *(side.error for side in sides.values()),
            *(noise.nodes.get(name, 0.0) for name in static),
            *(noise.tensors.get(border.tensor, 0.0) for border in touched),
        )
        # The sum must not depend on the order of a set.
        error = math.fsum(errors)
        return Choice(static, sides, spent, error)

    @cached_property
    def whole(self) -> Choice:
        """The choice that the plan of the scheme is, without its error."""
        static = frozenset(self.static_times)
        while alone := {node for node, leader in self.followers if node in static and leader not in static}:
            static -= alone
        sides = {name: self._side_of_scheme(name, SILENT) for name in self._names if name not in static}
        return self.choice(static, sides, SILENT)

    def demotions(self, choice: Choice, noise: Sensitivities = SILENT) -> dict[str, Demotion]:
        """Return the demotions that make the planner carry out a choice.

        Args:
            choice: how each node runs.
            noise: the errors that it was chosen by.
        """
        demotions = {}
        for decision in self.full.decisions:
            side = choice.sides.get(decision.node)
            if side is None or decision.mode is Mode.FLOAT or (side.mode is decision.mode and side.weight is None):
                continue
            figures = self._figures(decision, noise)
            is_finer = side.weight is not None and side.weight in self.finer.get(decision.node, ())
            if side.mode is Mode.FLOAT or is_finer:
                why = self._too_coarse(decision)
                demotions[decision.node] = Demotion(side.mode, why, figures, weight=side.weight, finer=why)
            elif side.mode is Mode.DYNAMIC:
                demotions[decision.node] = Demotion(side.mode, "faster or more accurate with dynamic scales", figures)
            else:
                why = self._reason(decision, noise)
                demotions[decision.node] = Demotion(side.mode, why, figures, weight=side.weight)
        return demotions

    def times_of(self, plan: Plan) -> NodeTimes:
        """Return the times to expect of a plan's nodes and of the borders around its static ones."""
        times = {Mode.STATIC: self.static_times, Mode.WEIGHT_ONLY: self.full_times.nodes, **self.offered}
        floats = self.floats.nodes
        nodes = {
            decision.node: times.get(decision.mode, floats).get(decision.node, floats.get(decision.node, 0.0))
            for decision in plan.decisions
        }
        tensors = {activation.tensor for activation in plan.activations}
        borders = {name: time for name, time in self.full_times.borders.items() if name in tensors}
        return NodeTimes(nodes, borders, self.floats.elements, self.floats.rest)

    def loudest(self, names: Set[str], noise: Sensitivities) -> list[str]:
        """Return static nodes by the error that each adds alone, highest first."""
        errors = {name: self.error_of(name, noise) for name in names}
        return sorted(names, key=lambda name: (-errors[name], name))

    def error_of(self, name: str, noise: Sensitivities) -> float:
        """Return the noise-to-signal ratio with a single static node and the tensors around it."""
        return noise.of(self._touched.get(name, ()))

    def worth_more_bits(self, noise: Sensitivities, most: float) -> frozenset[str]:
        """Return nodes whose weights may take more bits: those of most error a byte, in `most` bytes together."""

        def bytes_of(name: str) -> float:
            return self._more_bytes(name, self.finer[name][-1])

        loud = [name for name in self.finer if noise.nodes.get(name, 0.0) > 0]
        loud.sort(key=lambda name: -noise.nodes[name] / max(bytes_of(name), 1.0))
        taken, spent = set[str](), 0.0
        for name in loud:
            if spent + bytes_of(name) <= most:
                taken.add(name)
                spent += bytes_of(name)
        return frozenset(taken)

    # Ways to run a node between floats

    def _sides(self, name: str, noise: Sensitivities, *, may_be_finer: bool, integers: bool) -> Iterator[Side]:
        """Yield how a node can run between floats; what the scheme says comes first, and wins a tie."""
        decision, floats = self._decisions.get(name), self.floats.nodes.get(name, 0.0)
        if decision is None or decision.mode is Mode.FLOAT:
            yield Side(Mode.FLOAT, None, floats, 0.0)
            return
        error = noise.nodes.get(name, 0.0)
        keeps = integers or decision.mode not in DECODING
        if keeps and decision.mode not in INTEGERS:
            yield self._side_of_scheme(name, noise)
        if decision.mode is not Mode.STORAGE:
            yield Side(Mode.STORAGE, None, floats, error)
        for offer in self.offers if integers else ():
            # An offer that is slower than float would only cost accuracy.
            time = self.offered[offer.mode].get(name, math.inf)
            if name in offer.nodes and not self.has_times:
                time = self.full_times.nodes.get(name, 0.0) if decision.mode is offer.mode else _UNTIMED_OFFER * floats
            if time < floats:
                yield Side(offer.mode, offer.weight, time, noise.of_mode(offer.mode, name))
        for spec in self.finer.get(name, ()) if may_be_finer else ():
            mode = decision.mode if decision.mode is Mode.WEIGHT_ONLY and keeps and spec == FINER else Mode.STORAGE
            bits = _FLOAT_BITS if spec is None else format_named(spec.format).bits
            left = error * 4.0 ** (_bits(decision) - bits) if spec is not None else 0.0
            more = self._more_bytes(name, spec)
            yield Side(Mode.FLOAT if spec is None else mode, spec, floats, left, more)

    def _side_of_scheme(self, name: str, noise: Sensitivities) -> Side:
        decision = self._decisions.get(name)
        mode = decision.mode if decision is not None else Mode.FLOAT
        times = self.full_times if mode in DECODING else self.floats
        error = noise.of_mode(mode, name) if mode is Mode.DYNAMIC else noise.nodes.get(name, 0.0)
        return Side(mode, None, times.nodes.get(name, 0.0), error)

    def _more_bytes(self, name: str, spec: QuantSpec | None) -> float:
        decision = self._decisions[name]
        bits = _FLOAT_BITS if spec is None else format_named(spec.format).bits
        return sum(weight.elements for weight in decision.weights) * max(bits - _bits(decision), 0) / 8

    @cached_property
    def _byte_price(self) -> float:
        """Nanoseconds of a byte."""
        weights = sum(weight.elements for decision in self.full.decisions for weight in decision.weights)
        multiplies = any(decision.mode in INTEGERS for decision in self.full.decisions)
        share = _BYTES_OF_INTEGERS if multiplies else _BYTES_OF_WEIGHTS
        return share * self.floats.total / weights if weights else 0.0

    @cached_property
    def _decisions(self) -> Mapping[str, Decision]:
        return self.full.by_node

    # Reasons, for users

    def _reason(self, decision: Decision, noise: Sensitivities) -> str:
        name, floats = decision.node, self.floats.nodes.get(decision.node, 0.0)
        if not self.has_times:
            return "an integer kernel of it would cost too much accuracy"
        if self._integer_time(decision) >= floats:
            return "not faster as an integer kernel on this machine"
        if self.error_of(name, noise) or noise.of_mode(decision.mode, name):
            return "the speedup does not justify the accuracy loss"
        return "its conversions take longer than the integer kernel saves"

    def _figures(self, decision: Decision, noise: Sensitivities) -> str:
        figures = []
        if self.has_times:
            figures.append(f"{self.floats.nodes.get(decision.node, 0.0) / 1e6:.3f} ms in float")
            if decision.mode in INTEGERS:
                figures.append(f"{self._integer_time(decision) / 1e6:.3f} ms as integers")
        is_dynamic = decision.mode is Mode.DYNAMIC
        error = noise.of_mode(decision.mode, decision.node) if is_dynamic else self.error_of(decision.node, noise)
        if error and decision.mode in INTEGERS:
            figures.append(f"{decibels(sqnr_of_ratio(error))} as integers alone")
        return ", ".join(figures)

    def _integer_time(self, decision: Decision) -> float:
        if decision.mode is Mode.DYNAMIC:
            return self.offered.get(Mode.DYNAMIC, {}).get(decision.node, 0.0)
        return self.static_times.get(decision.node, 0.0)

    def _too_coarse(self, decision: Decision) -> str:
        return f"weights of {_bits(decision)} bits would cost too much accuracy"

    # Times of nodes, with the slowdown that they cause behind them

    @cached_property
    def static_times(self) -> Mapping[str, float]:
        """Nanoseconds of each node that can be static."""
        names = {decision.node for decision in self.full.decisions if decision.mode is Mode.STATIC}
        return self._with_slowdowns(names, self.full, self.full_times)

    @cached_property
    def offered(self) -> Mapping[Mode, Mapping[str, float]]:
        """Nanoseconds of the nodes in each offer, by its mode."""
        return {offer.mode: self._with_slowdowns(offer.nodes, offer.plan, offer.times) for offer in self.offers}

    def _with_slowdowns(self, names: Set[str], plan: Plan, times: NodeTimes) -> dict[str, float]:
        """Return the times of nodes, each with the slowdown of later nodes that it is the nearest cause of.

        A later node is slower if a fusion of the float model was cut, or if the layout of its data changed.
        """
        decoding = {decision.node for decision in plan.decisions if decision.mode in DECODING}
        own = {node.name: times.nodes.get(node.name, 0.0) for node in self._nodes if node.name in names}
        cause: dict[Node, str] = {}
        longer: dict[str, float] = defaultdict(float)
        for node in self._nodes:
            if node.name in own:
                cause[node] = node.name
            elif node.name not in decoding:
                causes = (cause.get(tensor.inputs[0]) for tensor in node.inputs if tensor.inputs)
                nearest = next((name for name in causes if name is not None), None)
                if nearest is not None:
                    cause[node] = nearest
                    longer[nearest] += times.nodes.get(node.name, 0.0) - self.floats.nodes.get(node.name, 0.0)
        return {name: time + max(longer[name], 0.0) for name, time in own.items()}

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(node for scope in all_graphs(self.graph) for node in scope.nodes)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._nodes)

    # Borders between floats and integers

    @cached_property
    def borders(self) -> tuple[Border, ...]:
        """A border for each tensor that a static node reads or makes."""
        borders, listed = [], set(self._nodes)
        into, back = self._measured_borders
        rates, either = (self._rate(into), self._rate(back)), self.target.kernels.fused.either_output
        returned = {tensor for scope in all_graphs(self.graph) for tensor in scope.outputs}
        for tensor in self._tensors:
            source = producer(tensor)
            maker = self._static_maker(source)
            readers = tuple(dict.fromkeys(node.name if node in listed else OUTSIDE for node in tensor.outputs))
            readers = (*readers, OUTSIDE) if tensor in returned else readers
            if maker is None and not any(name in self.static_times for name in readers):
                continue
            size = self._size(tensor)
            quantize = round(into.get(tensor.name, _BORDER_NS + rates[0] * size))
            dequantize = round(back.get(tensor.name, _BORDER_NS + rates[1] * size))
            if source is not None and maker is not None and self._fused(source) & either:
                # The kernel makes floats as fast, and the tensor adds no quantization error of its own.
                wider = round(back.get(tensor.name, _WIDER_ELEMENT_NS * size))
                borders.append(Border(maker, readers, quantize, wider))
                maker, quantize, dequantize = None, 0, 0
            borders.append(Border(maker, readers, quantize, dequantize, tensor=tensor.name))
        return tuple(borders)

    @cached_property
    def followers(self) -> tuple[tuple[str, str], ...]:
        """Pairs of nodes; the first can be static only if the second is.

        Nodes that pass values on and clamps need their producers, and producers need their clamps.
        """
        pairs = []
        for node in self._nodes:
            role = OPERATORS[operator_key(node)].role if node.name in self.static_times else Role.COMPUTE
            if role is Role.COMPUTE:
                continue
            for maker in filter(None, map(producer, data_inputs(node))):
                pairs.append((node.name, maker.name))
                pairs += [(maker.name, node.name)] if role is Role.CLAMP else []
        return tuple(pairs)

    @cached_property
    def _touched(self) -> Mapping[str, tuple[QuantizerId, ...]]:
        """The quantizers that are on if only one node is static, by node."""
        touched = {name: [QuantizerId(name, is_node=True)] for name in self.static_times}
        for border in (border for border in self.borders if border.tensor):
            for name in {border.producer or OUTSIDE, *border.consumers} & touched.keys():
                touched[name].append(QuantizerId(border.tensor))
        return {name: tuple(quantizers) for name, quantizers in touched.items()}

    def _problem(
        self, floats: Mapping[str, float], integers: Mapping[str, float], noise: Sensitivities, price: float
    ) -> Problem:
        return Problem(
            {OUTSIDE: 0, **{name: round(paid) for name, paid in floats.items()}},
            {name: round(paid) for name, paid in integers.items()},
            tuple(
                replace(border, quantized=round(price * noise.tensors.get(border.tensor, 0.0)))
                for border in self.borders
            ),
            self.followers,
        )

    @cached_property
    def _measured_borders(self) -> tuple[dict[str, float], dict[str, float]]:
        """Measured nanoseconds of borders by tensor: those that quantize, and those behind a static node."""
        into: dict[str, float] = {}
        back: dict[str, float] = {}
        quantized = {activation.tensor for activation in self.full.activations} - self.full_times.borders.keys()
        for tensor in self._tensors:
            maker, time = self._static_maker(producer(tensor)), self.full_times.borders.get(tensor.name, 0.0)
            if time:
                (back if maker in self.static_times else into)[tensor.name] = time
            elif self.static_times and tensor.name in quantized and maker is None and producer(tensor):
                # Its float producer quantizes it in passing.
                into[tensor.name] = 0.0
        return into, back

    def _rate(self, times: Mapping[str, float]) -> float:
        """Nanoseconds to quantize or dequantize an element."""
        measured = (tensor for tensor in self._tensors if tensor.name in times)
        sized = [(times[tensor.name], size) for tensor in measured if (size := self._size(tensor))]
        return sum(time for time, _ in sized) / sum(size for _, size in sized) if sized else _BORDER_ELEMENT_NS

    def _size(self, tensor: Variable) -> float:
        maker = producer(tensor)
        return self.floats.elements.get(maker.name, 0.0) if maker is not None else 0.0

    @cached_property
    def _tensors(self) -> tuple[Variable, ...]:
        """The inputs of each graph, and the outputs of its nodes."""
        tensors: list[Variable] = []
        for scope in all_graphs(self.graph):
            tensors += scope.inputs
            tensors += [tensor for node in scope.nodes for tensor in node.outputs if tensor.name]
        return tuple(tensors)

    def _static_maker(self, maker: Node | None) -> str | None:
        """Return the name of `maker` if its integer kernel outputs quantized values."""
        if maker is None or maker.name not in self.static_times:
            return None
        outputs_float = self._fused(maker) & self.target.kernels.fused.float_output
        return None if outputs_float else str(maker.name)

    def _fused(self, node: Node) -> Set[str]:
        """Return the operator of a node, and if that clamps, those of the node that it is fused into."""
        clamped = node.inputs[0].inputs if node.op in self.target.kernels.fused.clamps else []
        return {maker.op for maker in (node, *clamped)}


def _by_weights(full: Plan) -> tuple[NodeTimes, NodeTimes]:
    """Return times to choose by where none are measured: integers take half of the time, which grows with weights."""
    elements = {
        decision.node: float(sum(weight.elements for weight in decision.weights)) for decision in full.decisions
    }
    floats = {node: 2 * (_BORDER_NS + count) for node, count in elements.items()}
    integers = {node: time / 2 for node, time in floats.items()}
    return NodeTimes(floats, {}, {}, 0.0), NodeTimes(integers, {}, {}, 0.0)


def _bits(decision: Decision) -> int:
    return min((format_named(weight.spec.format).bits for weight in decision.weights), default=_FLOAT_BITS)


def _finer_specs(model: PreparedModel, full: Plan) -> Mapping[str, tuple[QuantSpec | None, ...]]:
    """Return the specs with which weights can be more accurate; floats, where nothing finer can be written."""
    weighted = {
        decision.node: decision for decision in full.decisions if decision.weights and decision.mode is not Mode.FLOAT
    }
    finer: dict[str, tuple[QuantSpec | None, ...]] = dict.fromkeys(weighted, ())
    for spec in (FINER, FINEST):
        bits = format_named(spec.format).bits
        nodes = [node for node, decision in weighted.items() if _bits(decision) < bits]
        demotion = Demotion(Mode.STORAGE, "more bits where they can be written", weight=spec)
        if nodes and model.expresses(plan := model.plan(dict.fromkeys(nodes, demotion))):
            for node in nodes:
                weights = plan.by_node[node].weights
                if weights and all(weight.spec == spec for weight in weights):
                    finer[node] = (*finer[node], spec)
    return {node: specs or (None,) for node, specs in finer.items()}


def offers_of(model: PreparedModel, full: Plan) -> Iterator[Offer]:
    """Yield the other ways to run nodes that the target has fast kernels for, untimed.

    Integer nodes may compute their scales in each run. Experts, which no integer kernel takes, may have the finest
    weights that a kernel multiplies.
    """
    kernels = model.target.kernels
    stored = {
        decision.node: Demotion(Mode.STORAGE, "measured as another option")
        for decision in full.decisions
        if decision.mode in INTEGERS
    }
    wishes: list[tuple[Mode, QuantSpec | None, list[str]]] = []
    if kernels.dynamic or kernels.own_dynamic:
        wishes.append((Mode.DYNAMIC, None, list(stored)))
    usual = {model.target.weight}
    experts = [
        decision.node
        for decision in full.decisions
        if decision.op_type == "MoE" and {weight.spec for weight in weights_of_experts(decision.weights)} == usual
    ]
    if experts and kernels.multiplied:
        wishes.append((Mode.WEIGHT_ONLY, kernels.multiplied[0], experts))
    for mode, weight, nodes in wishes:
        wished = {node: Demotion(mode, "measured as another option", weight=weight) for node in nodes}
        modes = {decision.node: decision.mode for decision in model.plan(wished).decisions}
        taking = frozenset(node for node in wished if modes[node] is mode)
        if taking:
            plan = model.plan({**stored, **{node: wished[node] for node in taking}})
            if model.expresses(plan):
                yield Offer(mode, plan, taking, weight)
