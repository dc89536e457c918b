"""Store weights as codes that the runtime decodes once, when it loads the model."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    insert_nodes,
    is_constant,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.lowering import AllowedOps, NodeBuilder, decode_folded, decode_linear, is_linear
from onnxq.numerics.affine import QTensor
from onnxq.passes.quantize.planned import correct_bias, planned_nodes
from onnxq.planning.plan import Plan, Weight
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True, eq=False)
class StoreWeights(Pass):
    """Replace the weights of storage nodes by codes and the nodes that decode them, in the graph that declares them.

    A runtime folds these nodes of constants when it loads the model, so inference runs at float speed; a
    DequantizeLinear in their place would run at every inference. A weight shared by several nodes is stored once.

    Attributes:
        plan: names the nodes and weights.
        codes: what was chosen for their weights and biases.
        emit: strict decodes by DequantizeLinear, all others by nodes that are folded.
        constants: op types whose weights the runtime wants folded, but does not fold from narrow codes.
    """

    plan: Plan
    codes: Codes
    emit: AllowedOps = AllowedOps.QDQ
    constants: frozenset[str] = frozenset()

    def apply(self, graph: Graph) -> Changes:
        """Store; new tensors are called ``w.codes``, ``w.scale``, ``w.decoded`` and alike."""
        names = Names(graph)
        wanted: dict[tuple[Constant, Weight], dict[Node, QTensor]] = {}
        for _, node, decision in planned_nodes(graph, self.plan, Mode.STORAGE):
            for weight in decision.weights:
                source = node.inputs[weight.index]
                if is_constant(source):
                    codes = self.codes.weights[node.name, weight.index]
                    wanted.setdefault((source, weight.of_rank(len(source.shape))), {})[node] = codes
        declaring = {tensor: scope for scope, tensors in place_constants(graph).items() for tensor in tensors}
        first: dict[Graph, list[Node]] = {}
        for (source, weight), consumers in wanted.items():
            for node in consumers:
                correct_bias(node, self.codes, names)
            widened = any(node.op in self.constants for node in consumers)
            decoder = self._decoder(source, weight, next(iter(consumers.values())), names, widened=widened)
            replace_uses(source, decoder[-1].outputs[0], set(consumers))
            first.setdefault(declaring[source], []).extend(decoder)
        for scope, nodes in first.items():
            insert_nodes(scope, first=nodes)
        return Changes(tuple(source.name for source, _ in wanted))

    def _decoder(
        self, source: Constant, weight: Weight, quantized: QTensor, names: Names, *, widened: bool
    ) -> list[Node]:
        chain, strict, dtype = NodeBuilder(source.name, names), self.emit is AllowedOps.STRICT, onnx_dtype(source)
        if strict and is_linear(quantized, weight.spec):
            decoded = decode_linear(chain, quantized, weight.spec, dtype, strict=strict)
        else:
            decoded = decode_folded(chain, quantized, weight.spec, dtype, strict=strict, widened=widened)
        decoded.dtype, decoded.shape = source.dtype, list(source.shape)
        return chain.nodes
