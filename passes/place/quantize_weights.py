"""Fold the weights and biases of static nodes into packed initializers behind DequantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxq.encoding.bias_correction import correct_bias
from onnxq.graph import Changes, Graph, Names, Node, Pass, Variable, constant, insert_nodes, is_fixed
from onnxq.numbers.formats import format_named
from onnxq.numbers.numerics import Parameters, QTensor
from onnxq.numbers.weights import quantize_bias, quantize_weight, quantize_weight_with_bias
from onnxq.passes.place.planned import planned_nodes
from onnxq.planning.plan import Decision, Plan
from onnxq.scheme import Granularity, Mode


@dataclass(frozen=True, eq=False)
class QuantizeWeights(Pass):
    """Replace the constant weight and bias of each static node by codes and a DequantizeLinear.

    The DequantizeLinear stands in the graph of the node, bodies included, since runtimes fuse nodes of one graph only;
    what it reads may be declared in a graph around it. Leaves nodes whose weight is codes already. The float
    initializer goes when no other node uses it.

    Attributes:
        plan: names the nodes, their weights and biases.
        parameters: scale of each activation by tensor name; the bias's scale is the data's times the weight's.
        means: of each channel by tensor name, for biases that are corrected.
    """

    plan: Plan
    parameters: Mapping[str, Parameters]
    means: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def apply(self, graph: Graph) -> Changes:
        """Quantize; new tensors are called ``w.codes``, ``w.scale``, ``w.zero_point`` and ``w.dequantized``."""
        names = Names(graph)
        decoders: dict[Graph, list[Node]] = {}
        changed, left = [], []
        for scope, node, decision in planned_nodes(graph, self.plan, Mode.STATIC):
            if not decision.weights:
                continue
            if not is_fixed(node.inputs[decision.weights[0].index]):
                left.append((node.name, "its weight is codes already"))
                continue
            decoders.setdefault(scope, []).extend(self._quantize(node, decision, names))
            changed.append(node.name)
        for scope, nodes in decoders.items():
            # In front: onnxruntime takes quadratic time to load nodes without data spread among the others.
            insert_nodes(scope, first=nodes)
        return Changes(tuple(changed), tuple(left))

    def _quantize(self, node: Node, decision: Decision, names: Names) -> list[Node]:
        weight = decision.weights[0]
        source = node.inputs[weight.index]
        format = format_named(weight.spec.format)
        values = source.values
        axis = weight.axis % values.ndim
        per_channel, method = weight.spec.per is Granularity.CHANNEL, weight.spec.method
        if decision.bias is None:
            codes = quantize_weight(values, format, axis if per_channel else None, method)
            correct_bias(node, codes, self.plan, self.means, names)
            return [_replace(node, weight.index, codes, axis, names)]
        bias = node.inputs[decision.bias].values
        scale = float(self.parameters[decision.data].scale)
        codes, bias_codes = quantize_weight_with_bias(
            values, bias, format, axis, scale, per_channel=per_channel, method=method
        )
        if correct_bias(node, codes, self.plan, self.means, names):
            # The weight's codes stay, whose errors these are, though another bias might have given it another scale.
            bias_codes = quantize_bias(node.inputs[decision.bias].values, codes, scale)
        return [
            _replace(node, weight.index, codes, axis, names),
            _replace(node, decision.bias, bias_codes, bias.ndim - 1, names),
        ]


def _replace(node: Node, index: int, quantized: QTensor, axis: int, names: Names) -> Node:
    """Make the input read a DequantizeLinear of the codes, and return that node."""
    source = node.inputs[index]
    scale = quantized.parameters.scale
    attributes = {} if scale.ndim == 0 or scale.size == 1 else {"axis": axis}
    flat = scale.reshape(-1) if attributes else scale.reshape(())
    inputs = [
        constant(names.fresh(f"{source.name}.codes"), quantized.codes.reshape(source.shape)),
        constant(names.fresh(f"{source.name}.scale"), flat),
        constant(names.fresh(f"{source.name}.zero_point"), np.zeros(flat.shape, quantized.codes.dtype)),
    ]
    if quantized.format.name == "int32":
        inputs.pop()
    values = Variable(names.fresh(f"{source.name}.dequantized"), dtype=np.dtype(np.float32), shape=list(source.shape))
    decoder = Node("DequantizeLinear", names.fresh(f"{source.name}.dequantize"), attributes, inputs, [values])
    node.inputs[index] = values
    return decoder
