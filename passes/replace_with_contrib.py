"""Replace weight-only nodes by operators of onnxruntime that read packed codes."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.graph import Constant, Graph, Names, Node, insert_nodes, onnx_dtype, remove_nodes, scopes
from onnxq.lowering import Chain, fits_blob, gather_block_quantized, matmul_nbits, transposed
from onnxq.numbers.weights import encode
from onnxq.passes.base import Changes, Pass
from onnxq.planning.plan import Plan, Weight
from onnxq.scheme import Mode


@dataclass(frozen=True, eq=False)
class ReplaceWithContrib(Pass):
    """Replace weight-only MatMul and Gemm by MatMulNBits, and Gather by GatherBlockQuantized.

    Leaves nodes whose format, blocks or storage these operators do not know, and those whose weight is codes already.

    Attributes:
        plan: names the nodes and weights.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Replace; new tensors are called ``w.codes``, ``w.scale`` and ``w.zero_point``."""
        names = Names(graph)
        changed, left = [], []
        replaced: list[Node] = []
        for scope in scopes(graph):
            behind: dict[Node, list[Node]] = {}
            for node in scope.nodes:
                decision = self.plan.by_node.get(node.name)
                if decision is None or decision.mode is not Mode.WEIGHT_ONLY:
                    continue
                weight = decision.weights[0]
                source = node.inputs[weight.index]
                if not isinstance(source, Constant):
                    left.append((node.name, "its weight is codes already"))
                elif not fits_blob(weight.spec, node.op):
                    left.append((node.name, f"no operator of onnxruntime reads {weight.spec.format} codes so"))
                else:
                    behind[node] = _replacement(node, source, weight, names)
                    changed.append(node.name)
            insert_nodes(scope, after=behind)
            replaced.extend(behind)
        remove_nodes(graph, replaced)
        return Changes(tuple(changed), tuple(left))


def _replacement(node: Node, source: Constant, weight: Weight, names: Names) -> list[Node]:
    """Take the output away from a node and return the nodes that compute it from packed codes."""
    output, spec, dtype = node.outputs[0], weight.spec, onnx_dtype(source)
    quantized = encode(source.values, spec, channel_axis=weight.axis, reduction_axis=weight.reduction_axis)
    chain = Chain(source.name, names)
    if node.op == "Gather":
        gather_block_quantized(chain, quantized, spec, node.inputs[1], dtype)
    else:
        if node.op == "Gemm" and node.attrs.get("transB", 0):
            quantized = transposed(quantized)
        bias = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
        matmul_nbits(chain, quantized, spec, node.inputs[0], bias, dtype)
    node.outputs.clear()
    chain.nodes[-1].outputs[0] = output
    return chain.nodes
