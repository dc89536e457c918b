"""Turn matrix products into integer ones whose data is quantized anew in each run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.encoding.bias_correction import correct_bias
from onnxq.graph import Changes, Constant, Graph, Names, Node, Pass, Variable, constant, optional
from onnxq.lowering import transposed
from onnxq.numbers.formats import format_named
from onnxq.numbers.numerics import QTensor
from onnxq.numbers.weights import quantize_weight
from onnxq.operators import OPERATORS
from onnxq.passes.place.planned import Rewrite, rewrite_planned
from onnxq.planning.plan import Plan, Weight
from onnxq.scheme import Granularity, Mode

_FLOAT = np.dtype(np.float32)
_PRODUCTS = frozenset(op for (domain, op), row in OPERATORS.items() if row.product and not domain)


@dataclass(frozen=True, eq=False)
class QuantizeDynamically(Pass):
    """Replace each dynamic MatMul and Gemm by DynamicQuantizeLinear, MatMulInteger, and the scales' product.

    Products of one graph that read the same data share its DynamicQuantizeLinear. The nodes are standard ONNX; a
    runtime may fuse them into one kernel. Leaves nodes whose weight is codes already. Works in bodies as well.

    Attributes:
        plan: names the nodes and their weights.
        means: of each channel by tensor name, for biases that are corrected.
    """

    plan: Plan
    means: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

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
            turned = bool(node.attrs.get("transB", 0))
            codes = _encoded(source.values.T if turned else source.values, weight)
            correct_bias(node, transposed(codes) if turned else codes, self.plan, self.means, names)
            return Rewrite([*made, *_integer_product(node, source, codes, quantizers[scope, data], names)])

        return rewrite_planned(graph, self.plan, Mode.DYNAMIC, rewrite, op_types=_PRODUCTS)


def _integer_product(node: Node, source: Constant, weight: QTensor, quantizer: Node, names: Names) -> list[Node]:
    """Take the output away from ``node`` and return the nodes that compute it with integers."""
    output = node.outputs[0]
    data_codes, data_scale, data_zero_point = quantizer.outputs
    codes = constant(names.fresh(f"{source.name}.codes"), np.ascontiguousarray(weight.codes))
    weight_scale = weight.parameters.scale
    scale = constant(names.fresh(f"{source.name}.scale"), weight_scale.reshape(-1 if weight_scale.ndim else ()))
    accumulator = Variable(names.fresh(f"{output.name}.accumulator"), np.dtype(np.int32), output.shape)
    number = Variable(names.fresh(f"{output.name}.number"), _FLOAT, output.shape)
    product_scale = Variable(names.fresh(f"{output.name}.scale"), _FLOAT, list(scale.shape))
    bias = optional(node, 2)
    product = output if bias is None else Variable(names.fresh(f"{output.name}.product"), _FLOAT, output.shape)
    node.outputs.clear()
    nodes = [
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


def _encoded(values: NDArray[np.floating], weight: Weight) -> QTensor:
    """Return the codes of a weight that the data's rows are multiplied with."""
    per_channel = weight.spec.per is Granularity.CHANNEL
    axis = values.ndim - 1 if per_channel else None
    return quantize_weight(values, format_named(weight.spec.format), axis, weight.spec.method)
