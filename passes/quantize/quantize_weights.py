"""Fold the weights and biases of static nodes into packed initializers behind DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, Names, Node, Variable, insert_nodes, is_constant, operator_key
from onnxq.lowering import NodeBuilder
from onnxq.numerics.affine import QTensor
from onnxq.ops import OPERATORS
from onnxq.passes.quantize.planned import correct_bias, planned_nodes
from onnxq.planning.plan import Decision, Plan
from onnxq.rewrite import Changes, Pass

_BYTE = 8


@dataclass(frozen=True, eq=False)
class QuantizeWeights(Pass):
    """Replace the constant weight and bias of each static node by codes and a DequantizeLinear.

    The DequantizeLinear stands in the graph of the node, bodies included, since runtimes fuse nodes of one graph only;
    what it reads may be declared in a graph around it. Leaves nodes whose weight is codes already. The float
    initializer goes when no other node uses it.

    Attributes:
        plan: names the nodes, their weights and biases.
        codes: what was chosen for their weights and biases.
    """

    plan: Plan
    codes: Codes

    def apply(self, graph: Graph) -> Changes:
        """Quantize; new tensors are called ``w.codes``, ``w.scale``, ``w.zero_point`` and ``w.dequantized``."""
        names = Names(graph)
        decoders: dict[Graph, list[Node]] = {}
        changed, left = [], []
        for scope, node, decision in planned_nodes(graph, self.plan, Mode.STATIC):
            if not decision.weights:
                continue
            if not is_constant(node.inputs[decision.weights[0].index]):
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
        correct_bias(node, self.codes, names)
        axis = weight.axis % len(node.inputs[weight.index].shape)
        made = [_replace(node, weight.index, self.codes.weights[node.name, weight.index], axis, names)]
        bias, index = self.codes.biases.get(node.name), OPERATORS[operator_key(node)].bias
        if index is not None and bias is not None and bias.codes is not None:
            made.append(_replace(node, index, bias.codes, len(node.inputs[index].shape) - 1, names))
        return made


def _replace(node: Node, index: int, quantized: QTensor, axis: int, names: Names) -> Node:
    """Make the input read a DequantizeLinear of the codes, and return that node."""
    source = node.inputs[index]
    scale = quantized.parameters.scale
    attributes = {} if scale.ndim == 0 or scale.size == 1 else {"axis": axis}
    flat = scale.reshape(-1) if attributes else scale.reshape(())
    chain, codes = NodeBuilder(source.name, names), quantized.codes.reshape(source.shape)
    inputs = [chain.store_codes("codes", codes, quantized.format), chain.store("scale", flat)]
    if quantized.format.bits == _BYTE:
        # Integer kernels are found by it, though it is 0.
        inputs.append(chain.store("zero_point", np.zeros(flat.shape, quantized.codes.dtype)))
    values = Variable(names.unique(f"{source.name}.dequantized"), dtype=np.dtype(np.float32), shape=list(source.shape))
    decoder = Node("DequantizeLinear", names.unique(f"{source.name}.dequantize"), attributes, inputs, [values])
    node.inputs[index] = values
    return decoder
