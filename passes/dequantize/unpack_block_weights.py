"""Replace onnxruntime's operators on packed blocks of codes by products with float weights and lookups in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    TensorData,
    Variable,
    all_nodes,
    replace_nodes,
)
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.ort_packing import unpack_matmul_nbits
from onnxq.numerics.packing import unpack_rows
from onnxq.ops import check_inputs
from onnxq.passes.dequantize.decoding import value_name
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import Array, computed, dequantize_linear

_FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
# Of bitsandbytes, by the attribute quant_type; the first type keeps the sign in the highest bit.
_BNB_VALUES: Final = (np.array([*_FP4, *(-value for value in _FP4)], np.float32), FORMATS["nf4"].values)


class UnpackBlockWeights(Pass):
    """Replace MatMulNBits and MatMulBnb4 by MatMul, and GatherBlockQuantized by Gather, in every graph of the model.

    Their weights become floats of the type that the scales have; a weight that several nodes share is decoded once.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes.

        Raises:
            ModelError: a node's weight is not constant, or is packed for one machine; the message names the node.
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
        """Return the nodes that do the same with a float weight, whose output they take over."""
        check_inputs(node, (0, 1, 2))
        outputs = list(node.outputs)
        if node.op == "GatherBlockQuantized":
            codes, scales, others = node.inputs[0], node.inputs[2], node.inputs[3:4]
            weight = self._weight(node, codes, scales, others)
            inputs, attributes = [weight, node.inputs[1]], {"axis": int(node.attrs.get("gather_axis", 0))}
            node.outputs.clear()
            return [Node("Gather", self.names.unique(f"{node.name}.float"), attributes, inputs, outputs)]
        codes, scales, others = node.inputs[1], node.inputs[2], node.inputs[3:4]
        unknown = [tensor for tensor in node.inputs[4:5] if tensor.name]
        if unknown or node.attrs.get("weight_prepacked", 0) or node.attrs.get("transB", 1) != 1:
            raise ModelError(
                f"node {node.name} ({node.op}) has a weight in a layout of its own (an index of groups, packed for one "
                "machine, or not transposed), which onnxq does not read; quantize the float model again without it"
            )
        weight = self._weight(node, codes, scales, others)
        bias = next((tensor for tensor in node.inputs[5:6] if tensor.name), None)
        product = outputs[0] if bias is None else Variable(self.names.unique(f"{outputs[0].name}.product"))
        node.outputs.clear()
        nodes = [Node("MatMul", self.names.unique(f"{node.name}.float"), {}, [node.inputs[0], weight], [product])]
        if bias is not None:
            nodes.append(Node("Add", self.names.unique(f"{node.name}.bias"), {}, [product, bias], outputs))
        return nodes

    def _weight(self, node: Node, codes: Tensor, scales: Tensor, others: Sequence[Tensor]) -> Constant:
        tensors = (codes, scales, *(tensor for tensor in others if tensor.name))
        key = node.op, repr(sorted(node.attrs.items())), *tensors
        if key not in self.weights:
            payloads = []
            for tensor in tensors:
                if not isinstance(tensor, Constant):
                    raise ModelError(
                        f"node {node.name} ({node.op}) reads {tensor.name}, which is computed, expected a constant; "
                        "its codes have no float meaning that is known beforehand"
                    )
                payloads.append(tensor.tensor_data)
            tensor_data = computed(partial(_decoded, node.op, dict(node.attrs), *payloads))
            self.weights[key] = Constant(value_name(codes.name, self.names), tensor_data)
        return self.weights[key]


def _decoded(op: str, attributes: dict[str, Any], *payloads: TensorData) -> Array:
    """Return a weight in the type of the scales, which are the second tensor_data."""
    values = _OPERATORS[op](attributes, *(tensor_data.load() for tensor_data in payloads))
    return values.astype(payloads[1].dtype, copy=False)


def _matmul_nbits(attributes: dict[str, Any], codes: Array, scales: Array, zero_points: Array | None = None) -> Array:
    bits, block_size, rows = int(attributes.get("bits", 4)), int(attributes["block_size"]), int(attributes["K"])
    found = unpack_matmul_nbits(codes, scales, zero_points, bits=bits, block_size=block_size, rows=rows)
    if zero_points is None or zero_points.dtype == np.uint8:
        return found.dequantize()
    # The kernel rounds the product of a float zero point and the scale by itself.
    scale = found.parameters.scale
    values = dequantize_linear(found.codes, scale, None, 0, block_size)
    values -= np.repeat(scale * np.asarray(found.parameters.zero_point), block_size, axis=0)[:rows]
    return values


def _gather_block_quantized(
    attributes: dict[str, Any], codes: Array, scales: Array, zero_points: Array | None = None
) -> Array:
    axis, block_size = int(attributes.get("quantize_axis", 1)), int(attributes.get("block_size", 128))
    if codes.dtype == np.uint8:
        bits = int(attributes.get("bits", 4))
        codes = unpack_rows(codes, bits, codes.shape[-1] * 8 // bits)
        codes = codes[..., : scales.shape[-1] * block_size] if axis % codes.ndim == codes.ndim - 1 else codes
        if zero_points is None:
            zero_points = np.array(2 ** (bits - 1), np.uint8)
        else:
            zero_points = unpack_rows(zero_points, bits, scales.shape[-1])
    return dequantize_linear(codes, scales.astype(np.float32), zero_points, axis, block_size)


def _matmul_bnb4(attributes: dict[str, Any], codes: Array, largest: Array) -> Array:
    """Return a weight whose codes lie transposed, the first of two in the high bits of a byte."""
    rows, columns = int(attributes["K"]), int(attributes["N"])
    flat = codes.reshape(-1)
    found = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)[: rows * columns]
    values = _BNB_VALUES[attributes["quant_type"]][found]
    values *= np.repeat(largest.astype(np.float32), int(attributes["block_size"]))[: values.size]
    return np.ascontiguousarray(values.reshape(columns, rows).T)


_OPERATORS: Final[dict[str, Callable[..., Array]]] = {
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulBnb4": _matmul_bnb4,
    "MatMulNBits": _matmul_nbits,
}
