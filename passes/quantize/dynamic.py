"""Write dynamic nodes: matrix multiplications and LSTMs that quantize their activations in each run."""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto

from onnxq.config.scheme import Granularity, Mode
from onnxq.ir import Constant, Graph, Names, Node, NodeBuilder, Tensor, Variable, is_constant, optional_input
from onnxq.lowering import transposed
from onnxq.lowering.kernels import DOMAIN
from onnxq.numerics.affine import Array, QTensor
from onnxq.ops import OPERATORS
from onnxq.passes.quantize.planned import EncodedPass, NodeReplacement, correct_bias, planned_nodes, rewrite_planned
from onnxq.planning.plan import Weight
from onnxq.rewrite import Changes

_FLOAT = np.dtype(np.float32)
_PRODUCTS = frozenset(op for (domain, op), row in OPERATORS.items() if row.product and not domain)


class QuantizeDynamically(EncodedPass):
    """Replace each dynamic MatMul and Gemm by DynamicQuantizeLinear, MatMulInteger and a Mul by the scales.

    Nodes of one graph that read the same activations share the DynamicQuantizeLinear. All nodes are standard ONNX; a
    runtime may fuse them into one kernel. Skips nodes with an already quantized weight. Works in bodies as well.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        quantizers: dict[tuple[Graph, Variable], Node] = {}

        def rewrite(scope: Graph, node: Node, source: Constant, weight: Weight) -> NodeReplacement:
            data = node.inputs[0]
            nodes = []
            if (scope, data) not in quantizers:
                quantizers[scope, data] = _quantizer(data, names)
                nodes.append(quantizers[scope, data])
            stored = self.encodings.weights[node.name, weight.index]
            correct_bias(node, self.encodings, names)
            turned = transposed(stored) if node.attrs.get("transB", 0) else stored
            scale = turned.parameters.scale.reshape(-1 if weight.spec.granularity is Granularity.CHANNEL else ())
            return NodeReplacement(
                [*nodes, *_integer_product(node, source, turned.values, scale, quantizers[scope, data], names)]
            )

        return rewrite_planned(graph, self.plan, Mode.DYNAMIC, rewrite, op_types=_PRODUCTS)


def _integer_product(
    node: Node, source: Constant, weight: Array, weight_scale: Array, quantizer: Node, names: Names
) -> list[Node]:
    output, bias = node.outputs[0], optional_input(node, 2)
    quantized_data, data_scale, data_zero_point = quantizer.outputs
    node.outputs.clear()
    new, role, result = NodeBuilder("", names), node.name, output.name
    stored = new.store(f"{source.name}.codes", np.ascontiguousarray(weight))
    scale = new.store(f"{source.name}.scale", weight_scale)
    inputs = [quantized_data, stored, data_zero_point]
    sums = new.node("MatMulInteger", node, inputs, f"{result}.accumulator", np.int32, output.shape)
    numbers = new.node(
        "Cast", f"{role}.cast", [sums], f"{result}.number", _FLOAT, output.shape, to=int(TensorProto.FLOAT)
    )
    factors = new.node("Mul", f"{role}.scale", [data_scale, scale], f"{result}.scale", _FLOAT, list(scale.shape))
    product = output if bias is None else new.variable(f"{result}.product", _FLOAT, output.shape)
    new.node("Mul", f"{role}.decode", [numbers, factors], product)
    if bias is not None:
        new.node("Add", f"{role}.bias", [product, bias], output)
    return new.nodes


def _quantizer(data: Variable, names: Names) -> Node:
    new = NodeBuilder(data.name, names)
    outputs = [
        new.variable("codes", np.uint8, data.shape),
        new.variable("scale", _FLOAT, []),
        new.variable("zero_point", np.uint8, []),
    ]
    return Node("DynamicQuantizeLinear", new.named("quantize"), {}, [data], outputs)


# --- recurrent cells: onnxruntime's own operator --------------------------------------------------------------------

_INPUTS: Final = 8


class QuantizeRecurrentCells(EncodedPass):
    """Replace each dynamic LSTM by onnxruntime's DynamicQuantizeLSTM, which reads transposed weights.

    With per-channel granularity each row of a weight in each direction has a scale. All activations have one scale, and
    so have the hidden states of each step that one thread computes. A weight that several cells share is quantized
    once. Skips cells with a computed weight. Works in bodies as well.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        stored: dict[tuple[Constant, Weight], tuple[Constant, Constant, Constant]] = {}
        changed, skipped = [], []
        for _, node, decision in planned_nodes(graph, self.plan, Mode.DYNAMIC):
            if node.op != "LSTM":
                continue
            # Scales and zero points follow in the order of the weights.
            weights = sorted(decision.weights, key=lambda weight: weight.index)
            sources = {weight: node.inputs[weight.index] for weight in weights}
            if not all(is_constant(source) for source in sources.values()):
                skipped.append((node.name, "its weight is computed at run time"))
                continue
            inputs: list[Tensor] = [*node.inputs, *(Variable("") for _ in range(_INPUTS - len(node.inputs)))]
            for weight, source in sources.items():
                key = source, weight.of_rank(len(source.shape))
                if key not in stored:
                    stored[key] = _stored(source, weight, self.encodings.weights[node.name, weight.index], names)
                inputs[weight.index], *parameters = stored[key]
                inputs += parameters
            node.inputs = inputs
            node.op, node.domain = "DynamicQuantizeLSTM", DOMAIN
            # DynamicQuantizeLSTM lacks this attribute. Cells with another value than 0 are never planned.
            node.attrs.pop("layout", None)
            changed.append(node.name)
        return Changes(tuple(changed), tuple(skipped))


def _stored(source: Constant, weight: Weight, quantized: QTensor, names: Names) -> tuple[Constant, Constant, Constant]:
    """Return values of shape [directions, size, gates], and scale and zero point for each direction or its gates."""
    directions, gates, _ = source.shape
    stored, scale = quantized.values.transpose(0, 2, 1), quantized.parameters.scale
    if weight.spec.granularity is Granularity.CHANNEL:
        scale = scale.reshape(directions, gates)
    else:
        scale = np.full(directions, scale.reshape(()))
    new = NodeBuilder(source.name, names)
    return (
        new.store("codes", np.ascontiguousarray(stored)),
        new.store("scale", scale),
        new.store("zero_point", np.zeros(scale.shape, stored.dtype)),
    )
