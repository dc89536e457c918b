"""Keep weights as codes that the runtime multiplies or looks up."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Names, Node, onnx_dtype
from onnxq.lowering import (
    AllowedOps,
    NodeBuilder,
    decode_folded,
    decode_linear,
    decode_rows,
    is_linear,
    transposed,
)
from onnxq.passes.quantize.planned import Rewrite, correct_bias, rewrite_planned
from onnxq.planning.plan import Plan, Weight
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True, eq=False)
class DecodeWeights(Pass):
    """Put a DequantizeLinear of codes in front of weight-only products, and decode the rows that Gather looks up.

    onnxruntime turns such a product into one kernel. A Gemm that transposes its weight gets transposed codes. Leaves
    nodes whose weight is codes already.

    Attributes:
        plan: names the nodes and weights.
        codes: what was chosen for their weights and biases.
        emit: strict keeps every Gather, behind a DequantizeLinear of its whole table.
    """

    plan: Plan
    codes: Codes
    emit: AllowedOps = AllowedOps.QDQ

    def apply(self, graph: Graph) -> Changes:
        """Decode; new tensors are called ``w.codes``, ``w.scale``, ``w.decoded`` and alike."""
        names = Names(graph)

        def rewrite(_scope: Graph, node: Node, source: Constant, weight: Weight) -> Rewrite:
            if node.op == "Gather" and self.emit is not AllowedOps.STRICT:
                return Rewrite(instead=self._rows(node, source, weight, names))
            return Rewrite(first=self._multiplied(node, source, weight, names))

        return rewrite_planned(graph, self.plan, Mode.WEIGHT_ONLY, rewrite)

    def _multiplied(self, node: Node, source: Constant, weight: Weight, names: Names) -> list[Node]:
        """Make the node read a DequantizeLinear of codes, and return the nodes that compute it."""
        quantized = self.codes.weights[node.name, weight.index]
        correct_bias(node, self.codes, names)
        if node.op == "Gemm" and node.attrs.pop("transB", 0):
            quantized = transposed(quantized)
        chain = NodeBuilder(source.name, names)
        decode = decode_linear if is_linear(quantized, weight.spec) else decode_folded
        decoded = decode(chain, quantized, weight.spec, onnx_dtype(source), strict=self.emit is AllowedOps.STRICT)
        decoded.dtype, decoded.shape = source.dtype, list(quantized.codes.shape)
        node.inputs[weight.index] = decoded
        return chain.nodes

    def _rows(self, node: Node, source: Constant, weight: Weight, names: Names) -> list[Node]:
        """Take the output away from a Gather and return the nodes that compute it from codes."""
        indices, output = node.inputs[1], node.outputs[0]
        quantized = self.codes.weights[node.name, weight.index]
        chain = NodeBuilder(source.name, names)
        decode_rows(chain, quantized, weight.spec, indices, len(indices.shape), onnx_dtype(source))
        node.outputs.clear()
        chain.nodes[-1].outputs[0] = output
        return chain.nodes
