"""Turn matrix products into integer ones whose data is quantized anew in each run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Granularity, Mode
from onnxq.ir import Constant, Graph, Names, Node, Variable, constant, optional_input
from onnxq.lowering import transposed
from onnxq.numerics.affine import Array
from onnxq.ops import OPERATORS
from onnxq.passes.quantize.planned import Rewrite, correct_bias, rewrite_planned
from onnxq.planning.plan import Plan, Weight
from onnxq.rewrite import Changes, Pass

_FLOAT = np.dtype(np.float32)
_PRODUCTS = frozenset(op for (domain, op), row in OPERATORS.items() if row.product and not domain)


@dataclass(frozen=True, eq=False)
class QuantizeDynamically(Pass):
    """Replace each dynamic MatMul and Gemm by DynamicQuantizeLinear, MatMulInteger, and the scales' product.

    Products of one graph that read the same data share its DynamicQuantizeLinear. The nodes are standard ONNX; a
    runtime may fuse them into one kernel. Leaves nodes whose weight is codes already. Works in bodies as well.

    Attributes:
        plan: names the nodes and their weights.
        codes: what was chosen for their weights and biases.
    """

    plan: Plan
    codes: Codes

    def apply(self, graph: Graph) -> Changes:
        """Replace; new tensors are called ``x.codes``, ``w.codes``, ``w.scale`` and ``y.accumulator``."""
        names = Names(graph)
        quantizers: dict[tuple[Graph, Variable], Node] = {}

        def rewrite(scope: Graph, node: Node, source: Constant, weight: Weight) -> Rewrite:
            data = node.inputs[0]
            made = []
            if (scope, data) not in quantizers:
                quantizers[scope, data] = _quantizer(data, names)
                made.append(quantizers[scope, data])
            codes = self.codes.weights[node.name, weight.index]
            correct_bias(node, self.codes, names)
            turned = transposed(codes) if node.attrs.get("transB", 0) else codes
            scale = turned.parameters.scale.reshape(-1 if weight.spec.per is Granularity.CHANNEL else ())
            return Rewrite(
                [*made, *_integer_product(node, source, turned.codes, scale, quantizers[scope, data], names)]
            )

        return rewrite_planned(graph, self.plan, Mode.DYNAMIC, rewrite, op_types=_PRODUCTS)


def _integer_product(
    node: Node, source: Constant, weight: Array, weight_scale: Array, quantizer: Node, names: Names
) -> list[Node]:
    """Take the output away from ``node`` and return the nodes that compute it with integers."""
    output = node.outputs[0]
    data_codes, data_scale, data_zero_point = quantizer.outputs
    codes = constant(names.unique(f"{source.name}.codes"), np.ascontiguousarray(weight))
    scale = constant(names.unique(f"{source.name}.scale"), weight_scale)
    accumulator = Variable(names.unique(f"{output.name}.accumulator"), np.dtype(np.int32), output.shape)
    number = Variable(names.unique(f"{output.name}.number"), _FLOAT, output.shape)
    product_scale = Variable(names.unique(f"{output.name}.scale"), _FLOAT, list(scale.shape))
    bias = optional_input(node, 2)
    product = output if bias is None else Variable(names.unique(f"{output.name}.product"), _FLOAT, output.shape)
    node.outputs.clear()
    nodes = [
        Node("MatMulInteger", node.name, {}, [data_codes, codes, data_zero_point], [accumulator]),
        Node("Cast", names.unique(f"{node.name}.cast"), {"to": int(TensorProto.FLOAT)}, [accumulator], [number]),
        Node("Mul", names.unique(f"{node.name}.scale"), {}, [data_scale, scale], [product_scale]),
        Node("Mul", names.unique(f"{node.name}.decode"), {}, [number, product_scale], [product]),
    ]
    if bias is not None:
        nodes.append(Node("Add", names.unique(f"{node.name}.bias"), {}, [product, bias], [output]))
    return nodes


def _quantizer(data: Variable, names: Names) -> Node:
    outputs = [
        Variable(names.unique(f"{data.name}.codes"), np.dtype(np.uint8), data.shape),
        Variable(names.unique(f"{data.name}.scale"), _FLOAT, []),
        Variable(names.unique(f"{data.name}.zero_point"), np.dtype(np.uint8), []),
    ]
    return Node("DynamicQuantizeLinear", names.unique(f"{data.name}.quantize"), {}, [data], outputs)
