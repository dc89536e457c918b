"""Fake quantization behind switches that are model inputs: the model that measures sensitivities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from onnxq.algorithms.equalization import Equalization, WeightRescaling, makers_of_divided, read_factors
from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Variable,
    all_graphs,
    insert_nodes,
    is_constant,
    optional_input,
    owner_graphs,
    producer,
    replace_nodes,
    replace_uses,
)
from onnxq.ops import facts_of
from onnxq.passes.quantize.activations import Pair
from onnxq.passes.quantize.planned import EncodedPass
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Activation, Decision, Plan
from onnxq.planning.planner import bias_of
from onnxq.rewrite import Changes

_FLOAT = np.dtype(np.float32)
_BOOL = np.dtype(np.bool_)
# From this opset on a Split into equal parts needs `num_outputs`.
_COUNTED = 18


@dataclass(frozen=True)
class FakeQuantSwitches:
    """The graph input that selects what is quantized: a vector of one bool for each switch.

    All switches share one input, because the runtime searches each fed input among all: with 8,000 inputs a run took
    0.4 seconds.

    Attributes:
        tensors: index of the switch by tensor.
        nodes: index of the switch by node, for its weights and its dynamically quantized activations.
    """

    name: str = "switches"
    tensors: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tensors) + len(self.nodes)


def switches_for(graph: Graph, plan: Plan, only: Set[str] | None = None) -> FakeQuantSwitches:
    """Return a switch for each tensor and node of a plan whose quantization adds an error.

    Tensors that only pass on the quantized values of others have none.

    Args:
        graph: the prepared graph.
        plan: its plan.
        only: nodes that get a switch, and no tensors; None means all.
    """
    passed_on = set(_passed_on(graph, plan))
    tensors = [entry.tensor for entry in plan.activations if only is None and entry.tensor not in passed_on]
    quantized = (entry.node for entry in plan.decisions if entry.weights or entry.mode is Mode.DYNAMIC)
    nodes = [node for node in quantized if only is None or node in only]
    places = count()
    return FakeQuantSwitches(
        Names(graph).unique("switches"),
        dict(zip(tensors, places, strict=False)),
        dict(zip(nodes, places, strict=False)),
    )


@dataclass(frozen=True, eq=False)
class InsertFakeQuantSwitches(EncodedPass):
    """Insert fake quantization of tensors, weights and dynamic activations, each behind a switch.

    If a switch is false, its float branch runs and costs nothing more, so one session measures any combination. Tensors
    and nodes without a switch stay.

    Attributes:
        switches: the input to add, and what its values switch.
        shared: whether float weights stay in the graph around the branches.
    """

    switches: FakeQuantSwitches = FakeQuantSwitches()
    shared: bool = False

    def apply(self, graph: Graph) -> Changes:
        if not self.switches or any(tensor.name == self.switches.name for tensor in graph.inputs):
            return Changes()
        _Edit(graph, self).run()
        return Changes((*self.switches.tensors, *self.switches.nodes))


def _passed_on(graph: Graph, plan: Plan) -> Iterator[str]:
    for node in owner_graphs(graph):
        decision = plan.by_node.get(node.name)
        if not facts_of(node).moves or decision is None or decision.mode is not Mode.STATIC:
            continue
        groups = {plan.by_tensor[tensor.name].group for tensor in data_inputs(node) if tensor.name in plan.by_tensor}
        for tensor in node.outputs:
            if tensor.name in plan.by_tensor and groups == {plan.by_tensor[tensor.name].group}:
                yield tensor.name


class _Edit:
    def __init__(self, graph: Graph, step: InsertFakeQuantSwitches) -> None:
        self.graph, self.plan, self.encodings, self.switches = graph, step.plan, step.encodings, step.switches
        self.shared, self.names = step.shared, Names(graph)
        self.owners: Mapping[Node, Graph] = owner_graphs(graph)
        self.behind: dict[Node, list[Node]] = defaultdict(list)
        self.first: dict[Graph, list[Node]] = defaultdict(list)
        self.static = {decision.node for decision in self.plan.decisions if decision.mode is Mode.STATIC}
        self.makers = makers_of_divided(graph, self.plan, Equalization(self.encodings.factors))
        self.values = [Variable(self.names.unique("switch"), _BOOL, [1]) for _ in range(len(self.switches))]

    def run(self) -> None:
        self.first[self.graph].append(self._split())
        homes = {tensor: scope for scope in all_graphs(self.graph) for tensor in scope.inputs}
        tensors = {tensor.name: tensor for node in self.owners for tensor in (*node.outputs, *node.inputs)}
        for activation in self.plan.activations:
            tensor = tensors.get(activation.tensor)
            if activation.tensor in self.switches.tensors and tensor is not None:
                maker = producer(tensor) if isinstance(tensor, Variable) else None
                new, home = self._tensor(activation, tensor), homes.get(tensor, self.graph)
                (self.first[home] if maker is None else self.behind[maker]).append(new)
        insert_nodes(self.graph, after=self.behind, first=self.first)
        switched = [node for node in self.owners if node.name in self.switches.nodes]
        replace_nodes(self.graph, {node: [self._node(node, self.plan.by_node[node.name])] for node in switched})

    def _split(self) -> Node:
        switches = Variable(self.switches.name, _BOOL, [len(self.values)])
        self.graph.inputs.append(switches)
        attributes = {"axis": 0} | ({"num_outputs": len(self.values)} if self.graph.opset >= _COUNTED else {})
        return Node("Split", self.names.unique("split_switches"), attributes, [switches], self.values)

    def _tensor(self, activation: Activation, tensor: Variable | Constant) -> Node:
        """Return the If of a tensor, and let the readers that would get the quantized tensor read it."""
        if isinstance(tensor, Constant):
            readers = {node for node in tensor.outputs if node.name in self.static and tensor in data_inputs(node)}
            factors = self.encodings.factors.get(tensor.name)
            decoded = self.encodings.constants[tensor.name].dequantize()
            values = decoded if factors is None else factors.multiply(decoded)
            quantized = self._same(self.names.store(f"{tensor.name}.coded", values), "coded")
        else:
            readers = {node for node in tensor.outputs if activation.every_consumer or node.name in self.static}
            # In the float branch producers do not divide.
            pair = Pair(activation, tensor, replace(self.encodings, divided=frozenset()), self.names)
            pair.quantize()
            pair.multiplied()
            quantized = pair.new.nodes
        switched = self._like(tensor, "switched")
        floats = self._same(tensor, "float")
        switch = self._switch(self.switches.tensors[activation.tensor], quantized, floats, [switched])
        replace_uses(tensor, switched, readers, graph_outputs=activation.every_consumer)
        return switch

    def _node(self, node: Node, decision: Decision) -> Node:
        """Return the If that replaces a node, with its weights and dynamic activations quantized in one branch."""
        read = read_factors(node, decision, self.encodings.factors, self.encodings.activations)
        around = WeightRescaling(read, self.makers.get(node.name))
        inputs: list[Variable | Constant] = list(node.inputs)
        new = NodeBuilder("", self.names)
        if decision.mode is Mode.DYNAMIC:
            inputs[0] = self._dynamic(inputs[0], new)
        for weight in decision.weights:
            source = node.inputs[weight.index]
            if is_constant(source) and (node.name, weight.index) in self.encodings.weights:
                decoded = self.encodings.weights[node.name, weight.index].dequantize().reshape(source.shape)
                values = around.own_weight(node, weight.index, decoded) if around else decoded
                inputs[weight.index] = self.names.store(f"{source.name}.coded", values.astype(source.dtype))
        moved = self._moved_bias(node, around)
        if moved is not None and moved[0] is not None:
            inputs = [*inputs[: moved[0]], moved[1], *inputs[moved[0] + 1 :]]
        kept = [self._own(tensor) if isinstance(tensor, Constant) and tensor.outputs else tensor for tensor in inputs]
        new.nodes.append(self._twin(node, kept, "coded"))
        if moved is not None and moved[0] is None:
            product = new.nodes[-1].outputs[0]
            new.named_after(product.name).node("Add", "add", [product, moved[1]], "moved", like=product)
        outputs = [tensor for tensor in node.outputs if tensor.name]
        own = [tensor if isinstance(tensor, Variable) else self._own(tensor) for tensor in node.inputs]
        floats = [self._twin(node, own, "float")]
        node.outputs.clear()
        return self._switch(self.switches.nodes[node.name], new.nodes, floats, outputs)

    def _moved_bias(self, node: Node, around: WeightRescaling) -> tuple[int | None, Constant] | None:
        """Return the input index and the corrected bias; index None with a difference to add behind the node."""
        bias = self.encodings.biases.get(node.name)
        place = bias_of(node) if bias is not None and bias.values is not None else None
        if bias is None or bias.values is None or place is None:
            return None
        values = around.own_bias(bias.values) if around else bias.values
        owner, index = place
        if owner is node:
            return index, self.names.store(f"{node.name}.bias", values)
        added = optional_input(owner, index)
        return None, self.names.store(f"{node.name}.bias", values if added is None else values - added.values)

    def _dynamic(self, data: Variable | Constant, new: NodeBuilder) -> Variable:
        quantized, scale, zero_point, decoded = (self._like(data, what) for what in ("codes", "scale", "zero", "coded"))
        quantized.dtype = zero_point.dtype = np.dtype(np.uint8)
        scale.shape = zero_point.shape = []
        parts = [quantized, scale, zero_point]
        new.nodes.append(Node("DynamicQuantizeLinear", new.named(f"{data.name}.quantize"), {}, [data], parts))
        return new.node("DequantizeLinear", f"{data.name}.dequantize", parts, decoded)

    def _switch(
        self, place: int, quantized: Sequence[Node], floats: Sequence[Node], outputs: Sequence[Variable]
    ) -> Node:
        switch, branches = self.values[place], {}
        for branch, nodes in (("then_branch", quantized), ("else_branch", floats)):
            results = [tensor for tensor in nodes[-1].outputs if tensor.name]
            body = Graph(list(nodes), [], results, f"{switch.name}.{branch}")
            body.parent, body.opset_imports = self.graph, self.graph.opset_imports
            branches[branch] = body
        return Node("If", self.names.unique(f"{outputs[0].name}.switch"), branches, [switch], list(outputs))

    def _twin(self, node: Node, inputs: Sequence[Variable | Constant], what: str) -> Node:
        outputs = [self._like(tensor, what) if tensor.name else Variable("") for tensor in node.outputs]
        name = self.names.unique(f"{node.name}.{what}")
        return Node(node.op, name, dict(node.attrs), list(inputs), outputs, domain=node.domain)

    def _own(self, tensor: Constant) -> Constant:
        # The runtime prepacks a weight only if the graph that reads it declares it.
        return tensor if self.shared else Constant(self.names.unique(f"{tensor.name}.float"), tensor.tensor_data)

    def _same(self, tensor: Variable | Constant, what: str) -> list[Node]:
        new = NodeBuilder("", self.names)
        new.node("Identity", f"{tensor.name}.{what}", [tensor], self._like(tensor, what))
        return new.nodes

    def _like(self, tensor: Variable | Constant, what: str) -> Variable:
        return NodeBuilder(tensor.name, self.names).variable(what, tensor.dtype or _FLOAT, like=tensor)
