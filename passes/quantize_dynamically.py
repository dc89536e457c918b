"""Turn matrix products into integer ones whose data is quantized anew in each run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxq.graph import Constant, Graph, Names, Node, Variable, constant, insert_nodes, remove_nodes, scopes
from onnxq.numbers.formats import format_named
from onnxq.numbers.weights import quantize_weight
from onnxq.passes.base import Changes, Pass
from onnxq.planning.plan import Decision, Plan
from onnxq.scheme import Granularity, Mode

_FLOAT = np.dtype(np.float32)
_PRODUCTS = frozenset({"Gemm", "MatMul"})


@dataclass(frozen=True, eq=False)
class QuantizeDynamically(Pass):
    """Replace each dynamic MatMul and Gemm by DynamicQuantizeLinear, MatMulInteger, and the scales' product.

    Products of one graph that read the same data share its DynamicQuantizeLinear. The nodes are standard ONNX; a
    runtime may fuse them into one kernel. Leaves nodes whose weight is codes already. Works in bodies as well.

    Attributes:
        plan: names the nodes and their weights.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Replace; new tensors are called ``x.codes``, ``w.codes``, ``w.scale`` and ``y.accumulator``."""
        names = Names(graph)
        changed, left = [], []
        replaced: list[Node] = []
        for scope in scopes(graph):
            quantized: dict[Variable, Node] = {}
            behind: dict[Node, list[Node]] = {}
            for node in scope.nodes:
                decision = self.plan.by_node.get(node.name)
                if decision is None or decision.mode is not Mode.DYNAMIC or node.op not in _PRODUCTS:
                    continue
                if not isinstance(node.inputs[1], Constant):
                    left.append((node.name, "its weight is codes already"))
                    continue
                behind[node] = _integer_product(node, decision, quantized, names)
                changed.append(node.name)
            insert_nodes(scope, after=behind)
            replaced.extend(behind)
        remove_nodes(graph, replaced)
        return Changes(tuple(changed), tuple(left))


def _integer_product(node: Node, decision: Decision, quantized: dict[Variable, Node], names: Names) -> list[Node]:
    """Take the output away from ``node`` and return the nodes that compute it with integers."""
    data, source, output = node.inputs[0], node.inputs[1], node.outputs[0]
    nodes = []
    if data not in quantized:
        quantized[data] = _quantizer(data, names)
        nodes.append(quantized[data])
    data_codes, data_scale, data_zero_point = quantized[data].outputs
    codes, scale = _weight(node, source, decision, names)
    accumulator = Variable(names.fresh(f"{output.name}.accumulator"), np.dtype(np.int32), output.shape)
    number = Variable(names.fresh(f"{output.name}.number"), _FLOAT, output.shape)
    product_scale = Variable(names.fresh(f"{output.name}.scale"), _FLOAT, list(scale.shape))
    bias = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
    product = output if bias is None else Variable(names.fresh(f"{output.name}.product"), _FLOAT, output.shape)
    node.outputs.clear()
    nodes += [
        Node("MatMulInteger", names.fresh(node.name), {}, [data_codes, codes, data_zero_point], [accumulator]),
        Node("Cast", names.fresh(f"{node.name}.cast"), {"to": int(TensorProto.FLOAT)}, [accumulator], [number]),
        Node("Mul", names.fresh(f"{node.name}.scale"), {}, [data_scale, scale], [product_scale]),
        Node("Mul", names.fresh(f"{node.name}.decode"), {}, [number, product_scale], [product]),
    ]
    if bias is not None:
        nodes.append(Node("Add", names.fresh(f"{node.name}.bias"), {}, [product, bias], [output]))
    return nodes


def _quantizer(data: Variable, names: Names) -> Node:
    outputs = [
        Variable(names.fresh(f"{data.name}.codes"), np.dtype(np.uint8), data.shape),
        Variable(names.fresh(f"{data.name}.scale"), _FLOAT, []),
        Variable(names.fresh(f"{data.name}.zero_point"), np.dtype(np.uint8), []),
    ]
    return Node("DynamicQuantizeLinear", names.fresh(f"{data.name}.quantize"), {}, [data], outputs)


def _weight(node: Node, source: Constant, decision: Decision, names: Names) -> tuple[Constant, Constant]:
    """Return the weight's codes, data's rows times these being the product, and their scale."""
    weight = decision.weights[0]
    values = source.values.T if node.attrs.get("transB", 0) else source.values
    per_channel = weight.spec.per is Granularity.CHANNEL
    axis = values.ndim - 1 if per_channel else None
    quantized = quantize_weight(values, format_named(weight.spec.format), axis, weight.spec.method)
    scale = quantized.parameters.scale.reshape(-1 if per_channel else ())
    return (
        constant(names.fresh(f"{source.name}.codes"), np.ascontiguousarray(quantized.codes)),
        constant(names.fresh(f"{source.name}.scale"), scale),
    )
