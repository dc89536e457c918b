"""Store weights as codes that the runtime decodes once, when it loads the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from onnxq.formats import format_named
from onnxq.graph import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    constant,
    insert_nodes,
    onnx_dtype,
    place_constants,
    replace_uses,
    scopes,
)
from onnxq.passes.base import Changes, Pass
from onnxq.plan import Plan, Weight
from onnxq.scheme import Granularity, Mode
from onnxq.weights import quantize_weight


@dataclass(frozen=True, eq=False)
class StoreWeights(Pass):
    """Replace the weights of storage nodes by ``Cast -> Mul`` of codes, in the graph that declares them.

    A runtime folds these two nodes of constants when it loads the model, so inference runs at float speed; a
    DequantizeLinear in their place would run at every inference. A weight shared by several nodes is stored once.

    Attributes:
        plan: names the nodes and weights.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Store; new tensors are called ``w.codes``, ``w.scale`` and ``w.decoded``."""
        names = Names(graph)
        wanted: dict[tuple[Constant, Weight], list[Node]] = {}
        for scope in scopes(graph):
            for node in scope.nodes:
                decision = self.plan.by_node.get(node.name)
                for weight in decision.weights if decision and decision.mode is Mode.STORAGE else ():
                    source = node.inputs[weight.index]
                    if isinstance(source, Constant):
                        key = (source, replace(weight, index=0, axis=weight.axis % len(source.shape)))
                        wanted.setdefault(key, []).append(node)
        declaring = {tensor: scope for scope, tensors in place_constants(graph).items() for tensor in tensors}
        first: dict[Graph, list[Node]] = {}
        for (source, weight), consumers in wanted.items():
            decoder = _decoder(source, weight, names)
            replace_uses(source, decoder[-1].outputs[0], set(consumers))
            first.setdefault(declaring[source], []).extend(decoder)
        for scope, nodes in first.items():
            insert_nodes(scope, first=nodes)
        return Changes(tuple(source.name for source, _ in wanted))


def _decoder(source: Constant, weight: Weight, names: Names) -> list[Node]:
    """Return the nodes that decode the weight; float16 and bfloat16 are decoded in float32 and rounded last."""
    values = source.values.astype(np.float32)
    axis = weight.axis if weight.spec.per is Granularity.CHANNEL else None
    quantized = quantize_weight(values, format_named(weight.spec.format), axis)
    shape, name = list(source.shape), source.name
    codes = constant(names.fresh(f"{name}.codes"), quantized.codes)
    scale = constant(names.fresh(f"{name}.scale"), quantized.parameters.scale)
    spread = Variable(names.fresh(f"{name}.numbers"), dtype=np.dtype(np.float32), shape=shape)
    decoded = Variable(names.fresh(f"{name}.decoded"), dtype=np.dtype(np.float32), shape=shape)
    nodes = [
        Node("Cast", names.fresh(f"{name}.cast"), {"to": int(TensorProto.FLOAT)}, [codes], [spread]),
        Node("Mul", names.fresh(f"{name}.decode"), {}, [spread, scale], [decoded]),
    ]
    if (dtype := onnx_dtype(source)) != TensorProto.FLOAT:
        rounded = Variable(names.fresh(f"{name}.rounded"), dtype=source.dtype, shape=shape)
        nodes.append(Node("Cast", names.fresh(f"{name}.round"), {"to": int(dtype)}, [decoded], [rounded]))
    return nodes
