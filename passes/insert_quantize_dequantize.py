"""Put QuantizeLinear and DequantizeLinear on the activations that a plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onnxq.graph import Graph, Names, Node, Variable, constant, insert_nodes, replace_uses
from onnxq.numbers.formats import format_named
from onnxq.numbers.numerics import Parameters
from onnxq.passes.base import Changes, Pass
from onnxq.planning.plan import Activation, Plan
from onnxq.scheme import Mode


@dataclass(frozen=True, eq=False)
class InsertQuantizeDequantize(Pass):
    """Insert one QuantizeLinear and DequantizeLinear pair for each activation of the plan, in the main graph.

    Where the plan says so, every consumer reads the dequantized tensor, graph outputs included, which keep their
    names; elsewhere only the static nodes do. Where several float nodes read it, they share a copy. Leaves a tensor
    that has a pair already, or that no node reads.

    Attributes:
        plan: names the tensors and the static nodes.
        parameters: scale and zero point by tensor name.
    """

    plan: Plan
    parameters: Mapping[str, Parameters]

    def apply(self, graph: Graph) -> Changes:
        """Insert the pairs; new tensors are called ``t.codes``, ``t.dequantized`` and ``t.copy``."""
        names = Names(graph)
        static = {decision.node for decision in self.plan.decisions if decision.mode is Mode.STATIC}
        tensors = {tensor.name: tensor for node in graph.nodes for tensor in (*node.inputs, *node.outputs)}
        outputs = set(graph.outputs)
        behind: dict[Node, list[Node]] = {}
        first: list[Node] = []
        changed, left = [], []
        for activation in self.plan.activations:
            tensor = tensors.get(activation.tensor)
            if tensor is None or any(node.op == "DequantizeLinear" for node in tensor.inputs):
                left.append((activation.tensor, "is not in the graph or is dequantized already"))
                continue
            consumers = {
                node
                for node in tensor.outputs
                if node.op != "QuantizeLinear" and (activation.every_consumer or node.name in static)
            }
            is_output = activation.every_consumer and tensor in outputs
            if not consumers and not is_output:
                left.append((activation.tensor, "no node reads it"))
                continue
            producer = tensor.inputs[0] if tensor.inputs else None
            pair = _pair(activation, tensor, self.parameters[activation.tensor], names)
            # The dequantized tensor takes over the name of a graph output.
            replace_uses(tensor, pair[1].outputs[0], consumers, graph_outputs=is_output)
            floats = {node for node in consumers if node.name not in static}
            if len(floats) > 1:
                pair = (*pair, _copy(pair[1].outputs[0], floats, activation, names))
            (behind.setdefault(producer, []) if producer is not None else first).extend(pair)
            changed.append(activation.tensor)
        insert_nodes(graph, after=behind, first=first)
        return Changes(tuple(changed), tuple(left))


def _copy(values: Variable, consumers: set[Node], activation: Activation, names: Names) -> Node:
    """Let several float nodes read a copy.

    A runtime gives each of them a DequantizeLinear of its own otherwise, and finds none of the patterns that it fuses
    in float (GELU, LayerNormalization), since these begin at one tensor.
    """
    copy = Variable(names.fresh(f"{activation.tensor}.copy"), dtype=values.dtype, shape=values.shape)
    replace_uses(values, copy, consumers)
    # The sum of one tensor is no no-op to a runtime, unlike Identity.
    return Node("Sum", names.fresh(f"{activation.tensor}.share"), {}, [values], [copy])


def _pair(activation: Activation, tensor: Variable, parameters: Parameters, names: Names) -> tuple[Node, ...]:
    format = format_named(activation.spec.format)
    name = activation.tensor
    scale = constant(names.fresh(f"{name}.scale"), np.asarray(parameters.scale))
    # The zero point also carries the code type, so a symmetric tensor writes a zero.
    zero = parameters.zero_point if parameters.zero_point is not None else np.zeros((), format.dtype)
    zero_point = constant(names.fresh(f"{name}.zero_point"), np.asarray(zero))
    codes = Variable(names.fresh(f"{name}.codes"), dtype=format.dtype, shape=tensor.shape)
    values = Variable(names.fresh(f"{name}.dequantized"), dtype=tensor.dtype, shape=tensor.shape)
    return (
        Node("QuantizeLinear", names.fresh(f"{name}.quantize"), inputs=[tensor, scale, zero_point], outputs=[codes]),
        Node(
            "DequantizeLinear", names.fresh(f"{name}.dequantize"), inputs=[codes, scale, zero_point], outputs=[values]
        ),
    )
