"""Dequantize weights: subgraphs of constants that dequantize, and onnxruntime's packed blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Tensor,
    TensorData,
    Variable,
    all_nodes,
    become_constant,
    is_constant,
    onnx_dtype,
    remove_nodes,
    replace_nodes,
    replace_uses,
    without_absent,
)
from onnxq.ir.computed_data import computed
from onnxq.numerics.affine import Array, dequantize_linear
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.ort_packing import unpack_matmul_nbits
from onnxq.numerics.packing import unpack_rows
from onnxq.ops import check_inputs
from onnxq.passes.dequantize.quantized_values import stored_data, value_name
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import Step, evaluate, is_small

_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
# Wider constants are indices, sizes and masks in float models, unless bitwise operators read them.
_QUANTIZED: Final = frozenset(map(np.dtype, (np.int8, np.uint8, np.int16, np.uint16, np.uint32)))
_BITWISE: Final = frozenset({"BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"})
_LINEAR: Final = frozenset({"DequantizeLinear", "QuantizeLinear"})
# Operators that compute each row of the output from the same row of the input.
_ROW_BY_ROW: Final = frozenset(
    {"Add", "Cast", "Div", "Mul", "Neg", "Pow", "Sub", "Where", *_BITWISE, *_LINEAR}
    | {"Gather", "Identity", "Pad", "Reshape", "Slice", "Unsqueeze"}
)
# Operators of dequantizing subgraphs; none is random or has bodies.
_DECODING: Final = _ROW_BY_ROW | {"Concat", "Exp", "Expand", "Flatten", "Mod", "Split", "Squeeze", "Tile", "Transpose"}
# Operators that dequantize themselves and need constant scales.
_KERNELS: Final = frozenset({"GatherBlockQuantized", "MatMulNBits", "QMoE"})
# A word holds at most 16 values; broadcast scales and small lookup tables account for the rest.
_MOST_GROWTH = 64
_ALWAYS_FINE = 1 << 20
_SAMPLED_ROWS = 5
_TOO_LARGE = "it is far larger than the constants that it is computed from"
_MIXED = "its rows cannot be computed one by one"


@dataclass(frozen=True)
class GatheredRows:
    """A selection of rows: a tensor of indices into tables of `count` rows."""

    indices: Variable
    count: int


@dataclass(frozen=True, eq=False)
class DequantizedResult:
    """A tensor that a dequantizing subgraph passes to the rest of the graph.

    Attributes:
        tensor: the result.
        scope: the graph of its producer.
        quantized: name of a quantized constant it is computed from.
        tensor_data: its values, or those of the whole table; None if they cannot replace it.
        rows: the selected rows of the table; None for all.
        obstacle: why the values cannot replace it.
        computation: how the values are computed; equal recipes give equal values.
    """

    tensor: Variable
    scope: Graph
    quantized: str
    tensor_data: TensorData | None
    rows: GatheredRows | None
    obstacle: str
    computation: tuple[object, ...]


@dataclass(eq=False)
class DequantSubgraphs:
    """The dequantizing subgraphs of a graph and its bodies.

    Attributes:
        nodes: in execution order, with the graph of each.
        positions: index of each node in that order.
        makers: producer of each tensor.
        quantized: for each dequantized tensor, the name of the first quantized constant it is computed from.
        elements: number of stored elements each tensor is computed from; elements read twice count twice.
        rows: selected rows, for each tensor that holds only these.
    """

    nodes: dict[Node, Graph] = field(default_factory=dict)
    positions: dict[Node, int] = field(default_factory=dict)
    makers: dict[Variable, Node] = field(default_factory=dict)
    quantized: dict[Tensor, str] = field(default_factory=dict)
    elements: dict[Tensor, int] = field(default_factory=dict)
    rows: dict[Tensor, GatheredRows] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> DequantSubgraphs:
        """Find the subgraphs."""
        cones = cls()
        for scope, node in all_nodes(graph):
            if node.op in _DECODING and (not node.domain or node.op == "DequantizeLinear"):
                cones._take(node, scope)
        return cones

    def _take(self, node: Node, scope: Graph) -> None:
        inputs = [tensor for tensor in node.inputs if tensor.name]
        chosen = {self.rows[tensor] for tensor in inputs if tensor in self.rows}
        chooses = node.op == "Gather" and len(inputs) == 2 and not node.attrs.get("axis", 0)
        if chooses and not chosen and not self._is_computable(inputs[1]):
            count = (inputs[0].shape or (None,))[0]
            if not isinstance(count, int):
                return
            chosen.add(GatheredRows(inputs[1], count))
            inputs = inputs[:1]
        if not inputs or not all(map(self._is_computable, inputs)):
            return
        if len(chosen) > 1 or (chosen and node.op not in _ROW_BY_ROW):
            return
        self.nodes[node] = scope
        self.positions[node] = len(self.positions)
        quantized = next((self.quantized[tensor] for tensor in inputs if tensor in self.quantized), "") or next(
            (tensor.name for tensor in inputs if isinstance(tensor, Constant) and _is_quantized(tensor)), ""
        )
        read = sum(math.prod(t.shape) if isinstance(t, Constant) else self.elements[t] for t in inputs)
        for tensor in node.outputs:
            self.makers[tensor] = node
            self.elements[tensor] = read
            if quantized or node.op in _LINEAR or node.op in _BITWISE:
                self.quantized[tensor] = quantized or inputs[0].name
            if chosen:
                self.rows[tensor] = next(iter(chosen))

    def _is_computable(self, tensor: Tensor) -> bool:
        return is_constant(tensor) or tensor in self.makers

    def results(self, opset: int) -> list[DequantizedResult]:
        """Return the dequantized float tensors that the rest of the graph reads, in execution order.

        If a tensor cannot be replaced or is no float, its producer stays, and the inputs of that producer become
        results.

        Raises:
            ModelError: a tensor cannot be computed; the message names the node.
        """
        results: list[DequantizedResult] = []
        left: set[Node] = set()
        for tensor, maker in reversed(self.makers.items()):
            outside = [consumer for consumer in tensor.outputs if consumer in left or consumer not in self.nodes]
            if not (outside or tensor.graph_output_of):
                continue
            is_dequantized = tensor in self.quantized or any(consumer.op in _KERNELS for consumer in outside)
            is_float = onnx_dtype(tensor) in {*_FLOATS, 0}
            result = self._result(tensor, maker, opset) if is_dequantized and is_float else None
            if result is not None and (result.tensor_data is not None or not left.intersection(outside)):
                results.append(result)
            if result is not None and result.tensor_data is not None:
                continue
            left.add(maker)
        return results[::-1]

    def _result(self, tensor: Variable, maker: Node, opset: int) -> DequantizedResult | None:
        """Return a tensor with its values, or with the obstacle; None if it is not a float tensor."""
        rows, steps = self.rows.get(tensor), self._steps(tensor)
        if rows is None:
            tensor_data, obstacle = self._whole(tensor, steps, opset), _TOO_LARGE
        else:
            tensor_data, obstacle = _table(tensor, steps, rows, opset), _MIXED
        if tensor_data is not None and tensor_data.onnx_dtype not in _FLOATS:
            return None
        computation = _computation(tensor, steps, rows)
        return DequantizedResult(
            tensor, self.nodes[maker], self.quantized.get(tensor, ""), tensor_data, rows, obstacle, computation
        )

    def _whole(self, tensor: Variable, steps: Sequence[Step], opset: int) -> TensorData | None:
        sizes = [size for size in tensor.shape or () if isinstance(size, int)]
        if math.prod(sizes) > max(_ALWAYS_FINE, _MOST_GROWTH * self.elements[tensor]):
            return None
        return computed(partial(evaluate, steps, tensor, opset), onnx_dtype(tensor), tensor.shape)

    def _steps(self, tensor: Tensor) -> tuple[Step, ...]:
        needed: set[Node] = set()
        pending = [tensor]
        while pending:
            maker = self.makers.get(pending.pop())
            if maker is not None and maker not in needed:
                needed.add(maker)
                pending.extend(maker.inputs)
        return tuple(map(Step.of, sorted(needed, key=self.positions.__getitem__)))

    def unread(self) -> set[Node]:
        """Return the nodes whose results are no longer read."""
        unread: set[Node] = set()
        for node in reversed(self.nodes):
            results = [tensor for tensor in node.outputs if tensor.name]
            if not any(tensor.graph_output_of or set(tensor.outputs) - unread for tensor in results):
                unread.add(node)
        return unread


def _table(tensor: Variable, steps: Sequence[Step], rows: GatheredRows, opset: int) -> TensorData | None:
    """Return all rows if each depends only on its own index; None otherwise."""
    rank = len(rows.indices.shape or ())
    if not rank or not rows.count:
        return None

    def rows_at(indices: Array) -> Array:
        """Return the rows one after the other, for indices of any shape."""
        gathered = evaluate(steps, tensor, opset, {rows.indices: indices})
        if gathered.shape[:rank] != indices.shape:
            raise ModelError(f"node {steps[-1].node} ({steps[-1].op}) joins rows; expected one result for each")
        return gathered.reshape(indices.size, *gathered.shape[rank:])

    column, row = (-1, *(1,) * (rank - 1)), (*(1,) * (rank - 1), -1)
    few = np.linspace(0, rows.count - 1, _SAMPLED_ROWS).astype(np.int64)
    try:
        sample, turned = rows_at(few.reshape(column)), rows_at(few[::-1].reshape(row))
    except ModelError:
        return None
    if not np.array_equal(sample.astype(np.float64), turned[::-1].astype(np.float64), equal_nan=True):
        return None
    shape = (rows.count, *sample.shape[1:])
    return computed(lambda: rows_at(np.arange(rows.count).reshape(column)), ArrayData(sample).onnx_dtype, shape)


def _computation(tensor: Variable, steps: Sequence[Step], rows: GatheredRows | None) -> tuple[object, ...]:
    """Return the steps with positions instead of names."""
    places: dict[object, object] = {} if rows is None else {rows.indices: rows.count}
    computation: list[object] = []
    for index, step in enumerate(steps):
        read = tuple(places.get(source, source) for source in step.inputs)
        computation.append((step.op, repr(sorted(step.attributes.items())), read))
        places.update({output: (index, place) for place, output in enumerate(step.outputs)})
    return (*computation, places[tensor])


def _is_quantized(tensor: Constant) -> bool:
    dtype = tensor.dtype
    return dtype in _QUANTIZED or (is_small(dtype) and dtype != np.dtype(ml_dtypes.bfloat16))


# --- subgraphs of constants -----------------------------------------------------------------------------------------


class DequantizeWeights(Pass):
    """Compute the float weights of dequantizing subgraphs, in every graph of the model.

    A subgraph counts if it gives floats and holds DequantizeLinear, bitwise operators, or constants of a quantized
    type. If it dequantizes the rows that a Gather selects, it becomes a Gather from the dequantized table. Large
    weights are computed one by one when the model is written. Equal computations give one weight. A weight takes the
    name of its quantized tensor without the suffix if that is free. Skips the constants of float models, and results
    far larger than their inputs.
    """

    def apply(self, graph: Graph) -> Changes:
        """Dequantize the weights.

        Raises:
            ModelError: a weight cannot be computed; the message names its node.
        """
        names = Names(graph)
        cones = DequantSubgraphs.of(graph)
        changed: list[str] = []
        skipped: list[tuple[str, str]] = []
        weights: dict[object, Constant] = {}
        chosen: dict[object, Variable] = {}
        for result in tuple(cones.results(graph.opset)):
            if result.tensor_data is None:
                skipped.append((result.tensor.name, result.obstacle))
                continue
            weight = weights.get(result.computation)
            place = result.scope, result.computation, result.rows
            if result.rows is not None and place in chosen and not result.tensor.graph_output_of:
                replace_uses(result.tensor, chosen[place])
            elif result.rows is not None or result.tensor.graph_output_of:
                if weight is None:
                    weight = Constant(value_name(result.quantized or result.tensor.name, names), result.tensor_data)
                _make_by_node(result, weight, names)
                chosen[place] = result.tensor
            elif weight is None:
                weight = become_constant(result.tensor, result.tensor_data)
                weight.name = value_name(result.quantized, names, otherwise=weight.name)
                result.scope.initializers.append(weight)
            else:
                replace_uses(result.tensor, weight)
            if weight is not None:
                weights[result.computation] = weight
            changed.append(result.tensor.name)
        remove_nodes(graph, cones.unread())
        return Changes(tuple(changed), tuple(skipped))


def _make_by_node(result: DequantizedResult, values: Constant, names: Names) -> None:
    """Let a node produce the tensor from its values, for graph outputs and selected rows."""
    maker = result.tensor.inputs[0]
    maker.outputs[maker.outputs.index(result.tensor)] = Variable("")
    op = "Identity" if result.rows is None else "Gather"
    inputs = [values] if result.rows is None else [values, result.rows.indices]
    result.scope.nodes.append(Node(op, names.unique(f"{maker.name}.decoded"), {}, inputs, [result.tensor]))


# --- packed blocks of MatMulNBits, MatMulBnb4, GatherBlockQuantized and QMoE -----------------------------------------

_FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
# Values of bitsandbytes by the attribute `quant_type`; in FP4 the highest bit is the sign.
_BNB_VALUES: Final = (np.array([*_FP4, *(-value for value in _FP4)], np.float32), FORMATS["nf4"].values)


class UnpackBlockWeights(Pass):
    """Replace MatMulNBits and MatMulBnb4 by MatMul, GatherBlockQuantized by Gather and QMoE by MoE, in every graph.

    The weights become floats in the type of the scales. A shared weight is dequantized once.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace the operators.

        Raises:
            ModelError: a weight is not constant, or is packed for one machine; the message names the node.
        """
        unpacking = _Unpacking(Names(graph))
        packed = (node for _, node in all_nodes(graph) if node.op in _OPERATORS)
        instead = {node: unpacking.float_nodes(node) for node in packed}
        replace_nodes(graph, instead)
        return Changes(tuple(node.name for node in instead))


@dataclass(eq=False)
class _Unpacking:
    names: Names
    weights: dict[tuple[object, ...], Constant] = field(default_factory=dict)

    def float_nodes(self, node: Node) -> list[Node]:
        check_inputs(node, (0, 1, 2))
        new = NodeBuilder(node.name, self.names)
        if node.op == "QMoE":
            return self._moe(node, new)
        if node.op == "GatherBlockQuantized":
            quantized, scales, others = node.inputs[0], node.inputs[2], node.inputs[3:4]
            inputs = [self._weight(node, quantized, scales, others), node.inputs[1]]
            new.node("Gather", "float", inputs, Variable(""), axis=int(node.attrs.get("gather_axis", 0)))
            return new.instead_of(node)
        quantized, scales, others = node.inputs[1], node.inputs[2], node.inputs[3:4]
        unknown = [tensor for tensor in node.inputs[4:5] if tensor.name]
        if unknown or node.attrs.get("weight_prepacked", 0) or node.attrs.get("transB", 1) != 1:
            raise ModelError(
                f"node {node.name} ({node.op}) has a weight with an index of groups, prepacked or not transposed, "
                "expected the plain layout; quantize the float model again"
            )
        weight = self._weight(node, quantized, scales, others)
        bias = next((tensor for tensor in node.inputs[5:6] if tensor.name), None)
        product = Variable("" if bias is None else self.names.unique(f"{node.outputs[0].name}.product"))
        new.node("MatMul", "float", [node.inputs[0], weight], product)
        if bias is not None:
            new.node("Add", "bias", [product, bias], Variable(""))
        return new.instead_of(node)

    def _moe(self, node: Node, new: NodeBuilder) -> list[Node]:
        check_inputs(node, (5, 6))
        inputs = [*node.inputs, *[Variable("")] * (_QMOE_INPUTS - len(node.inputs))]
        shares, normalized = inputs[14], int(node.attrs.get("normalize_routing_weights", 0))
        maker = shares.inputs[0] if shares.name and shares.inputs else None
        soft = maker is not None and maker.op == "Softmax" and maker.inputs[0] is inputs[1] and not normalized
        packed = int(node.attrs.get("weights_prepacked", 0)) == 1 or node.attrs.get("quant_type", "int") != "int"
        third = any(inputs[index].name for index in (8, 9, 10, 13))
        if packed or third or (shares.name and not soft) or _OWN_BITS & node.attrs.keys():
            raise ModelError(
                f"node {node.name} ({node.op}) has three weights, bits or packing of one of them, or other shares than "
                "the softmax of its scores, expected two plain weights; quantize the float model again"
            )
        first = self._weight(node, inputs[2], inputs[3], inputs[11:12])
        second = self._weight(node, inputs[5], inputs[6], inputs[12:13])
        attributes = {name: value for name, value in node.attrs.items() if name not in _OF_QMOE}
        # Without shares of its own, a QMoE always weighs by the softmax of the chosen scores.
        attributes["normalize_routing_weights"] = int(not shares.name)
        operands = without_absent([*inputs[:2], first, inputs[4], second, inputs[7]])
        new.node("MoE", "float", operands, Variable(""), domain=node.domain, **attributes)
        return new.instead_of(node)

    def _weight(self, node: Node, quantized: Tensor, scales: Tensor, others: Sequence[Tensor]) -> Constant:
        tensors = (quantized, scales, *(tensor for tensor in others if tensor.name))
        key = node.op, repr(sorted(node.attrs.items())), *tensors
        if key not in self.weights:
            payloads = [stored_data(node, tensor) for tensor in tensors]
            tensor_data = computed(partial(_decoded, node.op, dict(node.attrs), *payloads))
            self.weights[key] = Constant(value_name(quantized.name, self.names), tensor_data)
        return self.weights[key]


def _decoded(op: str, attributes: dict[str, Any], *payloads: TensorData) -> Array:
    """Return a weight in the type of the scales, the second payload."""
    values = _OPERATORS[op](attributes, *(tensor_data.load() for tensor_data in payloads))
    return values.astype(payloads[1].dtype, copy=False)


def _matmul_nbits(
    attributes: dict[str, Any], quantized: Array, scales: Array, zero_points: Array | None = None
) -> Array:
    bits, block_size, rows = int(attributes.get("bits", 4)), int(attributes["block_size"]), int(attributes["K"])
    weight = unpack_matmul_nbits(quantized, scales, zero_points, bits=bits, block_size=block_size, rows=rows)
    if zero_points is None or zero_points.dtype == np.uint8:
        return weight.dequantize()
    # The kernel rounds the product of a float zero point and the scale separately.
    scale = weight.parameters.scale
    values = dequantize_linear(weight.values, scale, None, 0, block_size)
    values -= np.repeat(scale * np.asarray(weight.parameters.zero_point), block_size, axis=0)[:rows]
    return values


def _gather_block_quantized(
    attributes: dict[str, Any], quantized: Array, scales: Array, zero_points: Array | None = None
) -> Array:
    axis, block_size = int(attributes.get("quantize_axis", 1)), int(attributes.get("block_size", 128))
    if quantized.dtype == np.uint8:
        bits = int(attributes.get("bits", 4))
        quantized = unpack_rows(quantized, bits, quantized.shape[-1] * 8 // bits)
        quantized = (
            quantized[..., : scales.shape[-1] * block_size]
            if axis % quantized.ndim == quantized.ndim - 1
            else quantized
        )
        if zero_points is None:
            zero_points = np.array(2 ** (bits - 1), np.uint8)
        else:
            zero_points = unpack_rows(zero_points, bits, scales.shape[-1])
    return dequantize_linear(quantized, scales.astype(np.float32), zero_points, axis, block_size)


def _experts(attributes: dict[str, Any], quantized: Array, scales: Array, zero_points: Array | None = None) -> Array:
    bits, block_size = int(attributes.get("expert_weight_bits", 4)), int(attributes.get("block_size", 0))
    values = unpack_rows(quantized, bits, quantized.shape[-1] * 8 // bits)
    zeros: Array = np.array(2 ** (bits - 1), np.uint8)
    if block_size == 0:
        # One scale a row, and zero points packed along the rows.
        zeros = zeros if zero_points is None else unpack_rows(zero_points, bits, scales.shape[-1])[..., np.newaxis]
        scales, block_size = scales.reshape(*values.shape[:-1], 1), values.shape[-1]
    elif zero_points is not None:
        zeros = unpack_rows(zero_points, bits, scales.shape[-1])
    return dequantize_linear(values, scales.astype(np.float32), zeros, values.ndim - 1, block_size)


def _matmul_bnb4(attributes: dict[str, Any], quantized: Array, largest: Array) -> Array:
    """Return a weight that is stored transposed, with the first of two values in the high bits of a byte."""
    rows, columns = int(attributes["K"]), int(attributes["N"])
    flat = quantized.reshape(-1)
    indices = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)[: rows * columns]
    values = _BNB_VALUES[attributes["quant_type"]][indices]
    values *= np.repeat(largest.astype(np.float32), int(attributes["block_size"]))[: values.size]
    return np.ascontiguousarray(values.reshape(columns, rows).T)


_OPERATORS: Final[dict[str, Callable[..., Array]]] = {
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulBnb4": _matmul_bnb4,
    "MatMulNBits": _matmul_nbits,
    "QMoE": _experts,
}
_QMOE_INPUTS: Final = 15
# The attributes of a QMoE that a MoE does not have, and those that give one of its weights other bits.
_OF_QMOE: Final = frozenset({"accuracy_level", "block_size", "expert_weight_bits", "quant_type", "weights_prepacked"})
_OWN_BITS: Final = frozenset({"fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits"})
