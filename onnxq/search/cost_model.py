"""The options of running a node, and the cost model: nanoseconds of nodes and of Q/DQ boundaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import Graph, Node, Variable, all_graphs, operator_key, producer
from onnxq.ops import OPERATORS, Role
from onnxq.planning.experts import weights_of_experts
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.assignment import Border
from onnxq.search.kernel_times import NodeTimes

_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})


@dataclass(frozen=True)
class KernelOption:
    """How a node can run instead of what the scheme says.

    Attributes:
        mode: dynamic or weight-only; static is the option that the others replace.
        weight: spec of its weights; None keeps the scheme's.
    """

    mode: Mode
    weight: QuantSpec | None = None

    def demotion(self, reason: str, figures: str = "") -> Demotion:
        """Return the demotion that gives a node this option."""
        return Demotion(self.mode, reason, figures, self.weight)

    @property
    def described(self) -> str:
        """The option as text for the figures of a decision.

        >>> KernelOption(Mode.WEIGHT_ONLY, QuantSpec("int4", (32,))).described
        'with float data and int4 values'
        """
        return f"with float data and {self.weight.format} values" if self.weight else "with dynamic scales"


STATIC = KernelOption(Mode.STATIC)
"""The default option: an integer kernel with quantized inputs and outputs."""

NodeOption = tuple[str, KernelOption]
"""A node and one of its options."""


@dataclass(frozen=True, eq=False)
class OfferedOption:
    """An option with the times of a model in which all possible nodes take it.

    Attributes:
        plan: the plan in which every possible node takes it.
        times: node times of the plan's model.
    """

    alternative: KernelOption
    plan: Plan
    nodes: frozenset[str]
    times: NodeTimes


def alternatives(target: Target) -> Iterator[KernelOption]:
    """Yield the options that a runtime has fast kernels for."""
    if target.kernels.dynamic or target.kernels.own_dynamic:
        yield KernelOption(Mode.DYNAMIC)
    yield from (KernelOption(Mode.WEIGHT_ONLY, spec) for spec in target.kernels.multiplied)


def wishes(alternative: KernelOption, full: Plan, target: Target) -> Mapping[str, Demotion]:
    """Return the demotions that give an option to every node that may take it.

    - Integer nodes may take an option without weights.
    - Integer nodes may take an option with weights if their own weights have the target's usual spec.
    - Nodes with compressed weights may take it if these have the option's spec. Experts, which no integer kernel takes,
      may also take it instead of the target's usual spec.
    - Other weights are a choice of the scheme, finer or coarser, and stay.

    `full` is the plan of the scheme.
    """
    usual = target.weight
    exchanged = {Mode.STATIC: usual, Mode.DYNAMIC: usual, Mode.STORAGE: alternative.weight}
    demotion = alternative.demotion("measured as an alternative to what the scheme says")
    return {
        one.node: demotion
        for one in full.decisions
        if (one.mode in _INTEGERS and alternative.weight is None)
        or (one.weights and all(weight.spec == exchanged.get(one.mode) for weight in one.weights))
        or (one.op_type == "MoE" and {weight.spec for weight in weights_of_experts(one.weights)} == {usual})
    }


def takers(alternative: KernelOption, plan: Plan, wished: Set[str]) -> frozenset[str]:
    """Return the nodes that take the option in a plan; the other wished nodes have fallen back."""
    return frozenset(one.node for one in plan.decisions if one.mode is alternative.mode and one.node in wished)


# The cost model: nanoseconds of each option of each node, and of each boundary between floats and integers

# Nanoseconds of a QuantizeLinear or DequantizeLinear if no measured model contains one.
_BORDER_NS = 3_000.0
_BORDER_ELEMENT_NS = 0.5
# Nanoseconds of writing and reading an element as float instead of as a quantized value.
_WIDER_ELEMENT_NS = 0.2
OUTSIDE = ""
"""Stands for the consumer of graph and body outputs, which are always floats."""


def outputs_quantized(node: Node, target: Target) -> bool:
    """Return whether a node's integer kernel outputs quantized values rather than floats."""
    return not any(one.op in target.kernels.fused.float_output for one in _with_clamped(node, target))


def outputs_either(node: Node, target: Target) -> bool:
    """Return whether a node outputs floats as fast as quantized values, if some consumer wants floats."""
    return any(one.op in target.kernels.fused.either_output for one in _with_clamped(node, target))


def _with_clamped(node: Node, target: Target) -> list[Node]:
    return [node, *(node.inputs[0].inputs if node.op in target.kernels.fused.clamps else [])]


@dataclass(frozen=True, eq=False)
class CostModel:
    """Nanoseconds of the nodes and boundaries of a graph and its bodies, from runs of whole models in different modes.

    Attributes:
        full: the plan with all possible nodes static.
        floats: times of the prepared float model.
        static: times of the full plan's model.
        offers: other options with the times of their models; options with finer weights come first.
    """

    graph: Graph
    target: Target
    full: Plan
    floats: NodeTimes
    static: NodeTimes
    offers: tuple[OfferedOption, ...] = ()

    @cached_property
    def static_nodes(self) -> Mapping[str, float]:
        """Nanoseconds of each node that can be static, with the slowdown that it causes around it.

        Empty if a run makes too many events for a profile: unknown times must not count as free.
        """
        if not self.floats.nodes or not self.static.nodes:
            return {}
        names = {decision.node for decision in self.full.decisions if decision.mode is Mode.STATIC}
        return self._converted(names, self.full, self.static)

    @cached_property
    def offered(self) -> Mapping[KernelOption, Mapping[str, float]]:
        """Nanoseconds of the nodes in each option, with the slowdown that they cause around them."""
        return {offer.alternative: self._converted(offer.nodes, offer.plan, offer.times) for offer in self.offers}

    @cached_property
    def worthwhile(self) -> Mapping[KernelOption, Mapping[str, float]]:
        """The offered options that are faster than float and than options with finer weights; others are not used."""
        least = dict(self.floats.nodes)
        found = {}
        for alternative, times in self.offered.items():
            found[alternative] = {name: time for name, time in times.items() if time < least.get(name, 0.0)}
            if alternative.weight is not None:
                least.update(found[alternative])
        return found

    @cached_property
    def borders(self) -> tuple[Border, ...]:
        """A border for each tensor that an integer node reads or makes."""
        found = []
        quantize, dequantize = self._rates
        quantized, dequantized = self._known
        returned = {tensor for scope in self._scopes for tensor in scope.outputs}
        for tensor in self._tensors:
            source = producer(tensor)
            maker = self._integer_maker(source)
            readers = tuple(dict.fromkeys(node.name if node in self._listed else OUTSIDE for node in tensor.outputs))
            if tensor in returned:
                readers = (*readers, OUTSIDE)
            if maker is None and not any(name in self.static_nodes for name in readers):
                continue
            size = self.floats.elements.get(source.name, 0.0) if source is not None else 0.0
            into = round(quantized.get(tensor.name, _BORDER_NS + quantize * size))
            back = round(dequantized.get(tensor.name, _BORDER_NS + dequantize * size))
            if source is not None and maker is not None and outputs_either(source, self.target):
                # No kernel dequantizes here, and the tensor adds no quantization error of its own.
                wider = round(dequantized.get(tensor.name, _WIDER_ELEMENT_NS * size))
                found.append(Border(maker, readers, into, wider))
                maker, into, back = None, 0, 0
            found.append(Border(maker, readers, into, back, tensor=tensor.name))
        return tuple(found)

    @cached_property
    def followers(self) -> tuple[tuple[str, str], ...]:
        """Pairs of nodes; the first can be integer only if the second is.

        Pass-through nodes and clamps need their producers, and producers need their clamps.
        """
        found = []
        for node in self._nodes:
            if node.name not in self.static_nodes:
                continue
            role = OPERATORS[operator_key(node)].role
            if role is Role.COMPUTE:
                continue
            for tensor in data_inputs(node):
                maker = producer(tensor)
                if maker is not None:
                    found.append((node.name, maker.name))
                    if role is Role.CLAMP:
                        found.append((maker.name, node.name))
        return tuple(found)

    @cached_property
    def _scopes(self) -> tuple[Graph, ...]:
        return tuple(all_graphs(self.graph))

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(node for scope in self._scopes for node in scope.nodes)

    @cached_property
    def _listed(self) -> Set[Node]:
        return set(self._nodes)

    @cached_property
    def _tensors(self) -> tuple[Variable, ...]:
        """The inputs of each graph, and the outputs of its nodes."""
        found: list[Variable] = []
        for scope in self._scopes:
            found += scope.inputs
            found += [tensor for node in scope.nodes for tensor in node.outputs if tensor.name]
        return tuple(found)

    def _converted(self, names: Set[str], plan: Plan, found: NodeTimes) -> dict[str, float]:
        """Return the times of nodes, each with the slowdown of later nodes that it is the nearest cause of.

        A later node is slower if a fusion of the float model was cut, or if the layout of its data changed. Nodes that
        are quantized themselves have times of their own.
        """
        decoding = {one.node for one in plan.decisions if one.mode in DECODING}
        times = {node.name: found.nodes.get(node.name, 0.0) for node in self._nodes if node.name in names}
        cause: dict[Node, str] = {}
        longer: dict[str, float] = defaultdict(float)
        for node in self._nodes:
            if node.name in times:
                cause[node] = node.name
                continue
            if node.name in decoding:
                continue
            known = (cause.get(tensor.inputs[0]) for tensor in node.inputs if tensor.inputs)
            blamed = next((name for name in known if name is not None), None)
            if blamed is not None:
                cause[node] = blamed
                longer[blamed] += found.nodes.get(node.name, 0.0) - self.floats.nodes.get(node.name, 0.0)
        return {name: time + max(longer[name], 0.0) for name, time in times.items()}

    def _integer_maker(self, maker: Node | None) -> str | None:
        """Return the name of `maker` if its integer kernel outputs quantized values."""
        given = maker is not None and maker.name in self.static_nodes and outputs_quantized(maker, self.target)
        return str(maker.name) if maker is not None and given else None

    @cached_property
    def _known(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Measured nanoseconds of boundaries by tensor: quantizing ones, then dequantizing ones."""
        into, back = self._directed(self.static, self.static_nodes.keys())
        return {**self._fused, **into}, back

    @cached_property
    def _fused(self) -> Mapping[str, float]:
        """Tensors that their float producer quantizes in passing, without a kernel of its own."""
        if not self.static_nodes:
            return {}
        quantized = {one.tensor for one in self.full.activations} - self.static.borders.keys()
        return {
            tensor.name: 0.0
            for tensor in self._tensors
            if tensor.name in quantized and (maker := producer(tensor)) and self._integer_maker(maker) is None
        }

    def _directed(self, observed: NodeTimes, static: Set[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Split boundary times into quantizing and dequantizing ones; dequantizing ones have a static producer."""
        into: dict[str, float] = {}
        back: dict[str, float] = {}
        for tensor in self._tensors:
            time = observed.borders.get(tensor.name, 0.0)
            if time:
                made = self._integer_maker(producer(tensor)) in static
                (back if made else into)[tensor.name] = time
        return into, back

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """Nanoseconds to quantize and to dequantize an element, with changes of layout."""
        times, sizes = [0.0, 0.0], [0.0, 0.0]
        for tensor in self._tensors:
            maker = producer(tensor)
            size = self.floats.elements.get(maker.name, 0.0) if maker is not None else 0.0
            for direction, known in enumerate(self._known):
                if size and tensor.name in known:
                    times[direction] += known[tensor.name]
                    sizes[direction] += size
        rates = [time / size if size else _BORDER_ELEMENT_NS for time, size in zip(times, sizes, strict=True)]
        return rates[0], rates[1]
