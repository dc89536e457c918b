"""Store weights as codes that the runtime decodes once, when it loads the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxq.encoding.bias_correction import correct_bias
from onnxq.graph import Changes, Constant, Graph, Names, Node, Pass, insert_nodes, is_fixed, onnx_dtype, replace_uses
from onnxq.lowering import Chain, Emit, decode_folded, decode_linear, is_linear
from onnxq.modelfile import place_constants
from onnxq.numbers.numerics import QTensor
from onnxq.passes.place.planned import encoded, planned_nodes
from onnxq.planning.plan import Plan, Weight
from onnxq.scheme import Mode


@dataclass(frozen=True, eq=False)
class StoreWeights(Pass):
    """Replace the weights of storage nodes by codes and the nodes that decode them, in the graph that declares them.

    A runtime folds these nodes of constants when it loads the model, so inference runs at float speed; a
    DequantizeLinear in their place would run at every inference. A weight shared by several nodes is stored once.

    Attributes:
        plan: names the nodes and weights.
        emit: strict decodes by DequantizeLinear, all others by nodes that are folded.
        means: of each channel by tensor name, for biases that are corrected.
    """

    plan: Plan
    emit: Emit = Emit.QDQ
    means: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def apply(self, graph: Graph) -> Changes:
        """Store; new tensors are called ``w.codes``, ``w.scale``, ``w.decoded`` and alike."""
        names = Names(graph)
        wanted: dict[tuple[Constant, Weight], list[Node]] = {}
        for _, node, decision in planned_nodes(graph, self.plan, Mode.STORAGE):
            for weight in decision.weights:
                source = node.inputs[weight.index]
                if is_fixed(source):
                    wanted.setdefault((source, weight.of_rank(len(source.shape))), []).append(node)
        declaring = {tensor: scope for scope, tensors in place_constants(graph).items() for tensor in tensors}
        first: dict[Graph, list[Node]] = {}
        for (source, weight), consumers in wanted.items():
            quantized = encoded(source, weight)
            for node in consumers:
                correct_bias(node, quantized, self.plan, self.means, names)
            decoder = self._decoder(source, weight, quantized, names)
            replace_uses(source, decoder[-1].outputs[0], set(consumers))
            first.setdefault(declaring[source], []).extend(decoder)
        for scope, nodes in first.items():
            insert_nodes(scope, first=nodes)
        return Changes(tuple(source.name for source, _ in wanted))

    def _decoder(self, source: Constant, weight: Weight, quantized: QTensor, names: Names) -> list[Node]:
        chain, strict = Chain(source.name, names), self.emit is Emit.STRICT
        decode = decode_linear if strict and is_linear(quantized, weight.spec) else decode_folded
        decoded = decode(chain, quantized, weight.spec, onnx_dtype(source), strict=strict)
        decoded.dtype, decoded.shape = source.dtype, list(source.shape)
        return chain.nodes
