"""Put QuantizeLinear and DequantizeLinear on the activations that a plan names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxq.encoding.codes import Codes
from onnxq.graph import (
    Changes,
    Constant,
    Graph,
    Names,
    Node,
    Pass,
    Variable,
    constant,
    insert_nodes,
    owner_graphs,
    producer,
    replace_uses,
    scopes,
)
from onnxq.numbers.formats import Format, format_named
from onnxq.numbers.numerics import Array, Parameters
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Activation, Plan
from onnxq.scheme import Mode


@dataclass(frozen=True, eq=False)
class InsertQuantizeDequantize(Pass):
    """Insert one QuantizeLinear for each activation of the plan, and a DequantizeLinear in each graph with readers.

    The QuantizeLinear stands behind the node that makes the tensor, and static nodes in bodies around which it does
    read its codes: runtimes fuse nodes of one graph only. Where the plan says so, every consumer reads the dequantized
    tensor, graph outputs included, which keep their names; elsewhere only the static nodes do. Where several float
    nodes read it, they can share a copy. A constant that static nodes compute with is stored as codes. Leaves a tensor
    that has a pair already, or that no node reads.

    Attributes:
        plan: names the tensors and the static nodes.
        codes: scale and zero point of each activation, and the codes of constants among them.
        copies: whether float nodes read copies, for a runtime that would give each a DequantizeLinear of its own.
    """

    plan: Plan
    codes: Codes
    copies: bool = True

    def apply(self, graph: Graph) -> Changes:
        """Insert the nodes; new tensors are called ``t.codes``, ``t.dequantized`` and ``t.copy``."""
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
        homes = {tensor: scope for scope in scopes(graph) for tensor in scope.inputs}
        outputs = {tensor for scope in scopes(graph) for tensor in scope.outputs}
        behind: dict[Graph, dict[Node, list[Node]]] = {scope: {} for scope in scopes(graph)}
        first: dict[Graph, list[Node]] = {scope: [] for scope in behind}
        changed, left = [], []
        for activation in self.plan.activations:
            if activation.tensor in stored:
                operand = stored[activation.tensor]
                for scope, decoder in self._store(activation, operand, static, owners, names):
                    first[scope].append(decoder)
                changed.append(activation.tensor)
                continue
            tensor = tensors.get(activation.tensor)
            if tensor is None or any(node.op == "DequantizeLinear" for node in tensor.inputs):
                left.append((activation.tensor, "is not in the graph or is dequantized already"))
                continue
            consumers = {
                node: None
                for node in tensor.outputs
                if node.op != "QuantizeLinear" and (activation.every_consumer or node.name in static)
            }
            is_output = activation.every_consumer and tensor in outputs
            if not consumers and not is_output:
                left.append((activation.tensor, "no node reads it"))
                continue
            maker = producer(tensor)
            home = owners[maker] if maker is not None else homes.get(tensor, graph)
            near, far = set[Node](), dict[Graph, set[Node]]()
            for node in consumers:
                inside = node.name in static and owners[node] is not home
                (far.setdefault(owners[node], set()) if inside else near).add(node)
            quantizer = _quantizer(activation, tensor, self.codes.activations[activation.tensor], names)
            new = [quantizer]
            if near or is_output:
                decoder = _decoder(activation, tensor, quantizer, names)
                # The dequantized tensor takes over the name of a graph output.
                replace_uses(tensor, decoder.outputs[0], near, graph_outputs=is_output)
                new.append(decoder)
                floats = {node for node in near if node.name not in static}
                if self.copies and len(floats) > 1:
                    new.append(_copy(decoder.outputs[0], floats, activation, names))
            for scope, readers in far.items():
                decoder = _decoder(activation, tensor, quantizer, names)
                replace_uses(tensor, decoder.outputs[0], readers)
                first[scope].append(decoder)
            (behind[home].setdefault(maker, []) if maker is not None else first[home]).extend(new)
            changed.append(activation.tensor)
        for scope in behind:
            insert_nodes(scope, after=behind[scope], first=first[scope])
        return Changes(tuple(changed), tuple(left))

    def _store(
        self, activation: Activation, tensor: Constant, static: set[str], owners: Mapping[Node, Graph], names: Names
    ) -> Iterator[tuple[Graph, Node]]:
        """Let static nodes read a constant from codes, and yield the node that decodes them in each graph."""
        format = format_named(activation.spec.format)
        codes = self.codes.constants[activation.tensor]
        inputs = [
            constant(names.fresh(f"{tensor.name}.codes"), codes.codes),
            constant(names.fresh(f"{tensor.name}.scale"), np.asarray(codes.parameters.scale)),
            constant(names.fresh(f"{tensor.name}.zero_point"), _zero_point(codes.parameters, format)),
        ]
        readers: dict[Graph, set[Node]] = {}
        for node in tensor.outputs:
            if node.name in static and tensor in data_inputs(node):
                readers.setdefault(owners[node], set()).add(node)
        for scope, nodes in readers.items():
            values = Variable(names.fresh(f"{tensor.name}.dequantized"), tensor.dtype, list(tensor.shape))
            replace_uses(tensor, values, nodes)
            yield scope, Node("DequantizeLinear", names.fresh(f"{tensor.name}.dequantize"), {}, inputs, [values])


def _copy(values: Variable, consumers: set[Node], activation: Activation, names: Names) -> Node:
    """Let several float nodes read a copy.

    A runtime gives each of them a DequantizeLinear of its own otherwise, and finds none of the patterns that it fuses
    in float (GELU, LayerNormalization), since these begin at one tensor.
    """
    copy = Variable(names.fresh(f"{activation.tensor}.copy"), dtype=values.dtype, shape=values.shape)
    replace_uses(values, copy, consumers)
    # The sum of one tensor is no no-op to a runtime, unlike Identity.
    return Node("Sum", names.fresh(f"{activation.tensor}.share"), {}, [values], [copy])


def _quantizer(activation: Activation, tensor: Variable, parameters: Parameters, names: Names) -> Node:
    format = format_named(activation.spec.format)
    name = activation.tensor
    scale = constant(names.fresh(f"{name}.scale"), np.asarray(parameters.scale))
    zero_point = constant(names.fresh(f"{name}.zero_point"), _zero_point(parameters, format))
    codes = Variable(names.fresh(f"{name}.codes"), dtype=format.dtype, shape=tensor.shape)
    return Node("QuantizeLinear", names.fresh(f"{name}.quantize"), {}, [tensor, scale, zero_point], [codes])


def _zero_point(parameters: Parameters, format: Format) -> Array:
    """Return the zero point, which also carries the type of the codes, so that a symmetric tensor has a zero."""
    return np.zeros((), format.dtype) if parameters.zero_point is None else np.asarray(parameters.zero_point)


def _decoder(activation: Activation, tensor: Variable, quantizer: Node, names: Names) -> Node:
    values = Variable(names.fresh(f"{activation.tensor}.dequantized"), dtype=tensor.dtype, shape=tensor.shape)
    inputs = [quantizer.outputs[0], *quantizer.inputs[1:]]
    return Node("DequantizeLinear", names.fresh(f"{activation.tensor}.dequantize"), {}, inputs, [values])
