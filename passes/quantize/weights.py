"""Write the weights of a plan: behind DequantizeLinear, packed for onnxruntime's operators, or compressed on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    insert_nodes,
    is_constant,
    onnx_dtype,
    operator_key,
    optional_input,
    place_constants,
    replace_uses,
)
from onnxq.lowering import (
    AllowedOps,
    decode_folded,
    decode_linear,
    decode_rows,
    gather_block_quantized,
    is_linear,
    kernel_supports,
    matmul_nbits,
    qmoe,
    should_use_kernel,
    stored_experts,
    transposed,
)
from onnxq.numerics.affine import QTensor
from onnxq.ops import OPERATORS
from onnxq.passes.quantize.planned import EncodedPass, NodeReplacement, correct_bias, planned_nodes, rewrite_planned
from onnxq.planning.experts import experts_obstacle, is_moe
from onnxq.planning.plan import Decision, Weight
from onnxq.rewrite import Changes, Pass

# --- static: integer kernels read weights and biases behind DequantizeLinear ------------------------------------------

_BYTE = 8


class QuantizeWeights(EncodedPass):
    """Replace the constant weight and bias of each static node by quantized values and a DequantizeLinear.

    The DequantizeLinear stands in the graph of the node, because runtimes fuse nodes of one graph only. An outer graph
    may declare its inputs. Skips nodes with an already quantized weight. A float initializer without other readers
    goes.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        decoders: dict[Graph, list[Node]] = defaultdict(list)
        changed, skipped = [], []
        for scope, node, decision in planned_nodes(graph, self.plan, Mode.STATIC):
            if not decision.weights:
                continue
            if not is_constant(node.inputs[decision.weights[0].index]):
                skipped.append((node.name, "its weight is quantized already"))
                continue
            decoders[scope] += self._quantize(node, decision, names)
            changed.append(node.name)
        # At the front: onnxruntime takes quadratic time to load such nodes if they are spread among the others.
        insert_nodes(graph, first=decoders)
        return Changes(tuple(changed), tuple(skipped))

    def _quantize(self, node: Node, decision: Decision, names: Names) -> list[Node]:
        weight = decision.weights[0]
        correct_bias(node, self.encodings, names)
        axis = weight.axis % len(node.inputs[weight.index].shape)
        nodes = [_replace(node, weight.index, self.encodings.weights[node.name, weight.index], axis, names)]
        bias, index = self.encodings.biases.get(node.name), OPERATORS[operator_key(node)].bias
        if index is not None and bias is not None and bias.quantized is not None:
            nodes.append(_replace(node, index, bias.quantized, len(node.inputs[index].shape) - 1, names))
        return nodes


def _replace(node: Node, index: int, quantized: QTensor, axis: int, names: Names) -> Node:
    source = node.inputs[index]
    scale = quantized.parameters.scale
    attributes: dict[str, Any] = {} if scale.size == 1 else {"axis": axis}
    flat = scale.reshape(-1) if attributes else scale.reshape(())
    chain, stored = NodeBuilder(source.name, names), quantized.values.reshape(source.shape)
    inputs = [chain.store_quantized("codes", stored, quantized.format), chain.store("scale", flat)]
    if quantized.format.bits == _BYTE:
        # Runtimes need the zero point, though it is 0, to select an integer kernel.
        inputs.append(chain.store("zero_point", np.zeros(flat.shape, quantized.values.dtype)))
    shape = list(source.shape)
    node.inputs[index] = chain.node(
        "DequantizeLinear", "dequantize", inputs, "dequantized", np.float32, shape, **attributes
    )
    return chain.nodes[0]


# --- weight-only: standard ONNX -------------------------------------------------------------------------------------


class DecodeWeights(EncodedPass):
    """Dequantize the weights of matrix multiplications by DequantizeLinear, and the rows that Gather selects.

    onnxruntime fuses such a multiplication into one kernel. A Gemm that transposes its weight gets a transposed one.
    Skips nodes with an already quantized weight.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)

        def rewrite(_scope: Graph, node: Node, source: Constant, weight: Weight) -> NodeReplacement:
            if node.op == "Gather":
                return NodeReplacement(instead=self._rows(node, source, weight, names))
            weights = self.plan.by_node[node.name].weights
            return NodeReplacement(first=[new for entry in weights for new in self._multiplied(node, entry, names)])

        return rewrite_planned(graph, self.plan, Mode.WEIGHT_ONLY, rewrite)

    def _multiplied(self, node: Node, weight: Weight, names: Names) -> list[Node]:
        source = node.inputs[weight.index]
        quantized = self.encodings.weights[node.name, weight.index]
        correct_bias(node, self.encodings, names)
        if node.op == "Gemm" and node.attrs.pop("transB", 0):
            quantized = transposed(quantized)
        chain = NodeBuilder(source.name, names)
        decode = decode_linear if is_linear(quantized, weight.spec) else decode_folded
        decoded = decode(chain, quantized, weight.spec, onnx_dtype(source))
        decoded.dtype, decoded.shape = source.dtype, list(quantized.shape)
        node.inputs[weight.index] = decoded
        return chain.nodes

    def _rows(self, node: Node, source: Constant, weight: Weight, names: Names) -> list[Node]:
        indices, chain = node.inputs[1], NodeBuilder(source.name, names)
        quantized = self.encodings.weights[node.name, weight.index]
        decode_rows(chain, quantized, weight.spec, indices, len(indices.shape), onnx_dtype(source))
        return chain.instead_of(node)


# --- weight-only: onnxruntime's operators for packed blocks ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReplaceWithContrib(EncodedPass):
    """Replace weight-only MatMul and Gemm by MatMulNBits, Gather by GatherBlockQuantized, and MoE by QMoE.

    Skips nodes whose format, blocks or storage the operator does not support, and nodes with an already quantized
    weight. Nodes that are as fast in standard ONNX stay too, unless `emit` replaces all.

    Attributes:
        emit: the allowed operators.
    """

    emit: AllowedOps = AllowedOps.ORT

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)

        def rewrite(scope: Graph, node: Node, source: Constant, weight: Weight) -> NodeReplacement | str:
            weights, in_body = self.plan.by_node[node.name].weights, scope is not graph
            if is_moe(node):
                problem = experts_obstacle(node, weights, self.emit, in_body=in_body)
                return problem or NodeReplacement(instead=_with_experts(node, weights, self.encodings, names))
            if not kernel_supports(weight.spec, node.op):
                return f"no operator of onnxruntime reads {weight.spec.format} values so"
            if not should_use_kernel(weight.spec, node.op, self.emit, in_body=in_body):
                return "standard ONNX is as fast"
            quantized = self.encodings.weights[node.name, weight.index]
            correct_bias(node, self.encodings, names)
            return NodeReplacement(instead=_replacement(node, source, weight, quantized, names))

        return rewrite_planned(graph, self.plan, Mode.WEIGHT_ONLY, rewrite)


def _replacement(node: Node, source: Constant, weight: Weight, quantized: QTensor, names: Names) -> list[Node]:
    chain, spec, dtype = NodeBuilder(source.name, names), weight.spec, onnx_dtype(source)
    if node.op == "Gather":
        gather_block_quantized(chain, quantized, spec, node.inputs[1], dtype)
    else:
        if node.op == "Gemm" and node.attrs.get("transB", 0):
            quantized = transposed(quantized)
        matmul_nbits(chain, quantized, spec, node.inputs[0], optional_input(node, 2), dtype)
    return chain.instead_of(node)


def _with_experts(node: Node, weights: Sequence[Weight], encodings: Encodings, names: Names) -> list[Node]:
    experts, biases = [], []
    for weight in weights:
        source = node.inputs[weight.index]
        quantized = encodings.weights[node.name, weight.index]
        experts.append(stored_experts(NodeBuilder(source.name, names), quantized, weight.spec, onnx_dtype(source)))
        biases.append(optional_input(node, weight.index + 1))
    chain = NodeBuilder(node.name, names)
    qmoe(chain, weights[0].spec, node.inputs[:2], experts, biases, node.attrs)
    return chain.instead_of(node)


# --- storage: compressed on disk, dequantized at load ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CompressWeights(EncodedPass):
    """Replace the weights of storage nodes by quantized values and dequantizing nodes, in the graph that declares them.

    A runtime folds these nodes when it loads the model, so inference has float speed. A DequantizeLinear would run at
    each inference instead. A weight shared by several nodes is stored once.

    Attributes:
        constants: op types whose weights the runtime needs as constants, but does not fold from narrow types.
    """

    constants: frozenset[str] = frozenset()

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        wanted: dict[tuple[Constant, Weight], dict[Node, QTensor]] = {}
        for _, node, decision in planned_nodes(graph, self.plan, Mode.STORAGE):
            for weight in decision.weights:
                source = node.inputs[weight.index]
                if is_constant(source):
                    stored = self.encodings.weights[node.name, weight.index]
                    wanted.setdefault((source, weight.of_rank(len(source.shape))), {})[node] = stored
        declaring = {tensor: scope for scope, tensors in place_constants(graph).items() for tensor in tensors}
        first: dict[Graph, list[Node]] = defaultdict(list)
        for (source, weight), consumers in wanted.items():
            for node in consumers:
                correct_bias(node, self.encodings, names)
            widened = any(node.op in self.constants for node in consumers)
            chain, quantized = NodeBuilder(source.name, names), next(iter(consumers.values()))
            decoded = decode_folded(chain, quantized, weight.spec, onnx_dtype(source), widened=widened)
            decoded.dtype, decoded.shape = source.dtype, list(source.shape)
            replace_uses(source, decoded, set(consumers))
            first[declaring[source]] += chain.nodes
        insert_nodes(graph, first=first)
        return Changes(tuple(source.name for source, _ in wanted))


# --- AWQ: divide the channels of float activations ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DivideChannels(Pass):
    """Replace the constants of normalizations and Muls so that their outputs are divided.

    Works in the main graph. Other readers of a constant keep the original.

    Attributes:
        encodings: encodings with the constants.
    """

    encodings: Encodings

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        changed: dict[str, None] = {}
        for node in graph.nodes if self.encodings.floats else ():
            for index, source in enumerate(node.inputs):
                values = self.encodings.floats.get((node.name, index))
                if values is not None and not np.array_equal(values, source.values):
                    node.inputs[index] = names.store(f"{source.name}.divided", values)
                    changed[node.name] = None
        return Changes(tuple(changed))
