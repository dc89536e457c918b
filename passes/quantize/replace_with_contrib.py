"""Replace weight-only nodes by operators of onnxruntime that read packed codes."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Names, Node, onnx_dtype, optional_input
from onnxq.lowering import (
    AllowedOps,
    NodeBuilder,
    gather_block_quantized,
    kernel_supports,
    matmul_nbits,
    should_use_kernel,
    transposed,
)
from onnxq.numerics.affine import QTensor
from onnxq.passes.quantize.planned import Rewrite, correct_bias, rewrite_planned
from onnxq.planning.plan import Plan, Weight
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True, eq=False)
class ReplaceWithContrib(Pass):
    """Replace weight-only MatMul and Gemm by MatMulNBits, and Gather by GatherBlockQuantized.

    Leaves nodes whose format, blocks or storage these operators do not know, those that are as fast in standard ONNX
    unless all are to be replaced, and those whose weight is codes already.

    Attributes:
        plan: names the nodes and weights.
        codes: what was chosen for their weights and biases.
        emit: what may be written.
    """

    plan: Plan
    codes: Codes
    emit: AllowedOps = AllowedOps.ORT

    def apply(self, graph: Graph) -> Changes:
        """Replace; new tensors are called ``w.codes``, ``w.scale`` and ``w.zero_point``."""
        names = Names(graph)

        def rewrite(scope: Graph, node: Node, source: Constant, weight: Weight) -> Rewrite | str:
            if not kernel_supports(weight.spec, node.op):
                return f"no operator of onnxruntime reads {weight.spec.format} codes so"
            if not should_use_kernel(weight.spec, node.op, self.emit, in_body=scope is not graph):
                return "standard ONNX is as fast"
            quantized = self.codes.weights[node.name, weight.index]
            correct_bias(node, self.codes, names)
            return Rewrite(instead=_replacement(node, source, weight, quantized, names))

        return rewrite_planned(graph, self.plan, Mode.WEIGHT_ONLY, rewrite)


def _replacement(node: Node, source: Constant, weight: Weight, quantized: QTensor, names: Names) -> list[Node]:
    """Take the output away from a node and return the nodes that compute it from packed codes."""
    output, spec, dtype = node.outputs[0], weight.spec, onnx_dtype(source)
    chain = NodeBuilder(source.name, names)
    if node.op == "Gather":
        gather_block_quantized(chain, quantized, spec, node.inputs[1], dtype)
    else:
        if node.op == "Gemm" and node.attrs.get("transB", 0):
            quantized = transposed(quantized)
        matmul_nbits(chain, quantized, spec, node.inputs[0], optional_input(node, 2), dtype)
    node.outputs.clear()
    chain.nodes[-1].outputs[0] = output
    return chain.nodes
