"""Write the activations of a plan: QuantizeLinear and DequantizeLinear, and static HardSigmoids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.algorithms.encodings import Encodings
from onnxq.algorithms.equalization import ChannelScales
from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Tensor,
    Variable,
    all_graphs,
    insert_nodes,
    is_constant,
    owner_graphs,
    producer,
    replace_nodes,
    replace_uses,
)
from onnxq.numerics.affine import SMALLEST_SCALE, Array, QTensor, QuantParams, params_from_range, quantize
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.passes.quantize.planned import EncodedPass, PlannedPass, copy_of, planned_nodes
from onnxq.planning.obstacles import data_inputs, slope_and_middle
from onnxq.planning.plan import Activation
from onnxq.rewrite import Changes


@dataclass(frozen=True, eq=False)
class InsertQuantizeDequantize(EncodedPass):
    """Insert one QuantizeLinear for each activation of the plan, and a DequantizeLinear in each graph that reads it.

    The QuantizeLinear stands behind the producer. Static nodes in bodies read a DequantizeLinear in their own graph,
    because runtimes fuse nodes of one graph only. If the plan marks an activation `every_consumer`, all consumers and
    graph outputs read the dequantized tensor; otherwise only static nodes do. Graph outputs keep their names. Several
    float consumers can share a copy. A constant operand of static nodes is stored quantized. Skips tensors that are
    already dequantized or have no reader.

    Attributes:
        copies: whether float nodes read a copy, for runtimes that give each of them its own DequantizeLinear.
    """

    copies: bool = True

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        static = {decision.node for decision in self.plan.decisions if decision.mode is Mode.STATIC}
        owners = owner_graphs(graph)
        tensors: dict[str, Variable] = {}
        stored: dict[str, Constant] = {}
        for node in owners:
            for tensor in (*node.inputs, *node.outputs):
                if isinstance(tensor, Variable):
                    tensors[tensor.name] = tensor
                elif node.name in static and tensor in data_inputs(node):
                    stored[tensor.name] = tensor
        homes = {tensor: scope for scope in all_graphs(graph) for tensor in scope.inputs}
        outputs = {tensor for scope in all_graphs(graph) for tensor in scope.outputs}
        behind: dict[Node, list[Node]] = {}
        first: dict[Graph, list[Node]] = defaultdict(list)
        changed, skipped = [], []
        for activation in self.plan.activations:
            if activation.tensor in stored:
                operand = stored[activation.tensor]
                for scope, decoder in self._store(activation, operand, static, owners, names):
                    first[scope].append(decoder)
                changed.append(activation.tensor)
                continue
            tensor = tensors.get(activation.tensor)
            if tensor is None or any(node.op == "DequantizeLinear" for node in tensor.inputs):
                skipped.append((activation.tensor, "is not in the graph or is dequantized already"))
                continue
            consumers = {
                node: None
                for node in tensor.outputs
                if node.op != "QuantizeLinear" and (activation.every_consumer or node.name in static)
            }
            is_output = activation.every_consumer and tensor in outputs
            if not consumers and not is_output:
                skipped.append((activation.tensor, "no node reads it"))
                continue
            maker = producer(tensor)
            home = owners[maker] if maker is not None else homes.get(tensor, graph)
            near, far = set[Node](), defaultdict[Graph, set[Node]](set)
            for node in consumers:
                inside = node.name in static and owners[node] is not home
                (far[owners[node]] if inside else near).add(node)
            pair = Pair(activation, tensor, self.encodings, names)
            pair.quantize()
            floats = {node for node in near if node.name not in static}
            copied = floats if self.copies and len(floats) > 1 else set[Node]()
            # Static nodes read divided values; float nodes and graph outputs need the factors multiplied back.
            apart = pair.factors is not None and bool(floats or is_output)
            if apart:
                values = pair.multiplied()
                replace_uses(tensor, values, floats, graph_outputs=is_output)
                near, is_output = near - floats, False
                _copy(values, copied, pair.new)
            if near or is_output:
                values = pair.dequantized()
                # The dequantized tensor takes the name of a graph output.
                replace_uses(tensor, values, near, graph_outputs=is_output)
                _copy(values, set() if apart else copied, pair.new)
            for scope, readers in far.items():
                replace_uses(tensor, pair.dequantized(), readers)
                first[scope].append(pair.new.nodes.pop())
            (behind.setdefault(maker, []) if maker is not None else first[home]).extend(pair.new.nodes)
            changed.append(activation.tensor)
        insert_nodes(graph, after=behind, first=first)
        return Changes(tuple(changed), tuple(skipped))

    def _store(
        self, activation: Activation, tensor: Constant, static: set[str], owners: Mapping[Node, Graph], names: Names
    ) -> Iterator[tuple[Graph, Node]]:
        """Replace a constant operand of static nodes by quantized values; yield the DequantizeLinear of each graph."""
        new = NodeBuilder(tensor.name, names)
        inputs = _stored(new, self.encodings.constants[activation.tensor])
        readers: dict[Graph, set[Node]] = defaultdict(set)
        for node in tensor.outputs:
            if node.name in static and tensor in data_inputs(node):
                readers[owners[node]].add(node)
        for scope, nodes in readers.items():
            values = new.node("DequantizeLinear", "dequantize", inputs, "dequantized", like=tensor)
            replace_uses(tensor, values, nodes)
            yield scope, new.nodes[-1]


def _copy(values: Variable, consumers: set[Node], new: NodeBuilder) -> None:
    """Let several float nodes read a copy.

    Otherwise the runtime gives each its own DequantizeLinear. Then it misses the float patterns that it fuses (GELU,
    LayerNormalization), because they begin at one tensor.
    """
    if consumers:
        replace_uses(values, copy_of(values, new), consumers)


class Pair:
    """The nodes that quantize and dequantize one tensor.

    Equalization factors become a Mul beside a single scale. If the rank of the tensor is unknown, they become
    per-channel scales. onnxruntime is 30 times slower with per-channel scales when channels are the last axis, as in
    front of integer convolutions. OpenVINO is slower with them, too.
    """

    def __init__(self, activation: Activation, tensor: Variable, encodings: Encodings, names: Names) -> None:
        self.tensor, self.new = tensor, NodeBuilder(activation.tensor, names)
        self.factors = encodings.factors.get(activation.tensor)
        self.divided = activation.tensor in encodings.divided
        format, parameters = format_named(activation.spec.format), encodings.activations[activation.tensor]
        self.scale, self.zero_point = np.asarray(parameters.scale), _zero_point(parameters, format)
        self.quantized = self.new.variable("codes", format.dtype, like=tensor)
        self.one: list[Constant] = []

    def quantize(self) -> None:
        """Append the nodes that quantize."""
        factors, data = None if self.divided else self.factors, self.tensor
        if factors is not None and data.shape is not None:
            data = self._scaled(data, 1 / self._along(factors), "divided")
            factors = None
        attributes, parameters = self._parameters(factors)
        self.new.node("QuantizeLinear", "quantize", [data, *parameters], self.quantized, **attributes)

    def dequantized(self, factors: ChannelScales | None = None) -> Variable:
        """Append a DequantizeLinear and return its output, which static nodes read without factors."""
        attributes, parameters = self._parameters(factors)
        inputs: list[Tensor] = [self.quantized, *parameters]
        return self.new.node("DequantizeLinear", "dequantize", inputs, "dequantized", like=self.tensor, **attributes)

    def multiplied(self) -> Variable:
        """Append the nodes that dequantize for all other readers, factors undone, and return the values."""
        if self.factors is None or self.tensor.shape is None:
            return self.dequantized(self.factors)
        return self._scaled(self.dequantized(), self._along(self.factors), "multiplied")

    def _parameters(self, factors: ChannelScales | None) -> tuple[dict[str, Any], list[Constant]]:
        """Return attributes and inputs of the scale; all nodes without factors share them."""
        if factors is not None:
            scales = np.maximum(factors.values * self.scale, SMALLEST_SCALE).astype(np.float32)
            zero_points = np.full(scales.shape, self.zero_point)
            return {"axis": factors.axis}, [
                self.new.store("scales", scales),
                self.new.store("zero_points", zero_points),
            ]
        self.one = self.one or [self.new.store("scale", self.scale), self.new.store("zero_point", self.zero_point)]
        return {}, self.one

    def _along(self, factors: ChannelScales) -> Array:
        behind = (1,) * (len(self.tensor.shape or ()) - 1 - factors.axis)
        return factors.values.reshape(-1, *behind)

    def _scaled(self, data: Variable, by: Array, role: str) -> Variable:
        return self.new.node("Mul", role, [data, self.new.store("factors", by.astype(np.float32))], role, like=data)


def _stored(new: NodeBuilder, quantized: QTensor) -> list[Constant]:
    """Return the inputs of the DequantizeLinear of a constant."""
    parameters = quantized.parameters
    return [
        new.store("codes", quantized.values),
        new.store("scale", parameters.scale),
        new.store("zero_point", _zero_point(parameters, quantized.format)),
    ]


def _zero_point(parameters: QuantParams, format: QuantDType) -> Array:
    """Return the zero point, which also determines the type; a symmetric tensor gets 0."""
    return np.zeros((), format.dtype) if parameters.zero_point is None else np.asarray(parameters.zero_point)


# --- HardSigmoid as an Add, which has an integer kernel -------------------------------------------------------------


class AddToQuantized(PlannedPass):
    """Replace each static HardSigmoid by an Add and a Clip.

    The slope goes into the scale of the DequantizeLinear in front, and the Add adds the middle, a quantized constant.
    The quantizer behind has the range 0 to 1, so runtimes drop the Clip. Skips a HardSigmoid whose input is not
    dequantized.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        changed: list[str] = []
        skipped: list[tuple[str, str]] = []
        instead: dict[Node, Sequence[Node]] = {}
        decoders: dict[Graph, list[Node]] = defaultdict(list)
        for scope, node, _ in planned_nodes(graph, self.plan, Mode.STATIC, ("HardSigmoid",)):
            source = producer(node.inputs[0])
            if source is None or source.op != "DequantizeLinear" or not all(map(is_constant, source.inputs[1:3])):
                skipped.append((node.name, "its activation is not dequantized from integers"))
                continue
            slope, middle = slope_and_middle(node)
            new = NodeBuilder(node.name, names)
            term = _decoded(middle, source.inputs[2].dtype, node.name, new)
            decoders[scope].append(new.nodes.pop())
            instead[node] = _added(node, source, slope, term, new)
            changed.append(node.name)
        replace_nodes(graph, instead)
        insert_nodes(graph, first=decoders)
        return Changes(tuple(changed), tuple(skipped))


def _decoded(value: float, dtype: np.dtype[np.generic], name: str, new: NodeBuilder) -> Variable:
    """Append the node that dequantizes a number exactly, and return its output."""
    format = format_named(dtype.name)
    quantized = quantize(
        np.asarray(value, np.float32), params_from_range(value, value, format, symmetric=False), format
    )
    inputs = _stored(new.named_after(f"{name}.middle"), quantized)
    return new.node("DequantizeLinear", "middle.dequantize", inputs, "middle", np.float32, [])


def _added(node: Node, source: Node, slope: float, term: Tensor, new: NodeBuilder) -> list[Node]:
    output = node.outputs[0]
    quantized, scale, zero_point = source.inputs
    steeper = new.store("scale", np.asarray(scale.values * np.float32(slope), np.float32))
    data = new.node("DequantizeLinear", "dequantize", [quantized, steeper, zero_point], "scaled", like=output)
    total = new.node("Add", node, [data, term], "sum", like=output)
    ends = [new.store(end, np.float32(end == "maximum")) for end in ("minimum", "maximum")]
    node.outputs.clear()
    new.node("Clip", "clip", [total, *ends], output)
    return new.nodes
