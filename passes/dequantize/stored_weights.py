"""Find the quantized weights of a model: format, number of scales, and the node that uses each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxq.ir import Constant, Graph, Node, Tensor, Variable, all_graphs, constants, onnx_dtype, optional_input
from onnxq.numerics.formats import FORMATS
from onnxq.ops import INTEGER_OPERATORS, facts_of
from onnxq.passes.dequantize.weights import DequantSubgraphs

_BITS: Final = {row.onnx_type: row.bits for row in FORMATS.values()}
# int32 tensors are biases; uint32 tensors may hold packed values.
_QUANTIZED: Final = {type_ for type_, bits in _BITS.items() if bits <= 16} | {TensorProto.UINT32}


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight that a model stores quantized.

    Attributes:
        node: the node that multiplies it or looks up its rows.
        format: name of its number format, such as `int8`, `uint4` or `float4e2m1`.
        bits: bits of one value.
        shape: shape of the weight; None if unknown.
        scales: number of scales, without those of a second level; 0 if none is found.
        integer: whether the node computes with integers.
    """

    node: Node
    format: str
    bits: int
    shape: tuple[int, ...] | None
    scales: int
    integer: bool = False


def holds_quantized(graph: Graph) -> bool:
    """Whether any constant of a graph has a type for quantized weights."""
    return any(onnx_dtype(tensor) in _QUANTIZED for tensor in constants(graph))


def stored_weights(graph: Graph) -> list[StoredWeight]:
    """Find the quantized weights of a graph and its bodies, in whichever form, in the order of their nodes.

    Args:
        graph: with inferred shapes. Without them packed weights have no shape, and embeddings with computed scales are
            not found.
    """
    cones = DequantSubgraphs.of(graph)
    positions = {node: index for index, node in enumerate(node for scope in all_graphs(graph) for node in scope.nodes)}
    weights = [weight for node in positions for weight in _weights_of(node, cones)]
    # Rows of one embedding may be dequantized to several results.
    tables = {table.node: table for tensor in cones.rows if (table := _looked_up(tensor, cones)) is not None}
    return sorted((*weights, *tables.values()), key=lambda weight: positions[weight.node])


def _weights_of(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    """Yield the quantized weights of a node that is not part of a dequantizing subgraph."""
    if node in cones.nodes:
        return
    if node.op in _OF_KERNELS:
        yield from _OF_KERNELS[node.op](node, cones)
    elif node.op in INTEGER_OPERATORS:
        for quantized, scale, _ in INTEGER_OPERATORS[node.op].operands:
            yield from _plain(node, quantized, _scales(optional_input(node, scale), cones))
    else:
        for index in facts_of(node).weights:
            tensor = optional_input(node, index)
            weight = _decoded(node, tensor, cones) if tensor in cones.quantized else None
            if weight is not None and (weight.shape is None or len(weight.shape) > 1):
                yield replace(weight, integer=_is_dequantized(optional_input(node, 0), cones))


def _looked_up(tensor: Tensor, cones: DequantSubgraphs) -> StoredWeight | None:
    """Return the embedding whose dequantized rows the rest of the graph reads."""
    outside = any(consumer not in cones.nodes for consumer in tensor.outputs) or tensor.graph_output_of
    if not outside or tensor not in cones.quantized:
        return None
    trace = _Trace.of(tensor, cones)
    if trace is None or trace.gather is None or trace.is_plain:
        return None
    shape, rows = None, cones.rows[tensor]
    if tensor.shape is not None and rows.indices.shape is not None:
        shape = (rows.count, *tensor.shape[len(rows.indices.shape) :])
    return StoredWeight(trace.gather, trace.format, trace.bits, trace.shape(shape), trace.scales)


def _decoded(node: Node, tensor: Tensor, cones: DequantSubgraphs) -> StoredWeight | None:
    if (trace := _Trace.of(tensor, cones)) is None or trace.is_plain:
        return None
    return StoredWeight(node, trace.format, trace.bits, trace.shape(tensor.shape), trace.scales)


# --- from a dequantized weight back to its constant -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Trace:
    """The path from a dequantized tensor back to its constant.

    Attributes:
        quantized: the constant at the end.
        scales: number of first-level scales.
        gather: the node that selects rows.
        table: the lookup table of bit patterns.
        mask: mask of one value in a word; 0 if values are not packed.
        signed: whether a sign bit is flipped.
    """

    quantized: Constant
    scales: int = 0
    gather: Node | None = None
    table: Constant | None = None
    mask: int = 0
    signed: bool = False

    @classmethod
    def of(cls, tensor: Tensor, cones: DequantSubgraphs) -> _Trace | None:
        """Follow the data input of each node; None if the path does not end in a constant."""
        path: list[Node] = []
        while not isinstance(tensor, Constant):
            maker = cones.makers.get(tensor)
            if maker is None:
                return None
            path.append(maker)
            tensor = maker.inputs[_data_input(maker, cones)]
        trace = cls(tensor)
        for maker in path:
            trace = trace._behind(maker, cones)
        return trace

    def _behind(self, maker: Node, cones: DequantSubgraphs) -> _Trace:
        others = [tensor for tensor in maker.inputs if tensor is not maker.inputs[_data_input(maker, cones)]]
        if maker.op in ("DequantizeLinear", "Mul", "Div") and others:
            return replace(self, scales=max(self.scales, _scales(others[0], cones)))
        if maker.op == "Gather" and _chooses_rows(maker, cones):
            return replace(self, gather=maker)
        if maker.op == "Gather" and isinstance(maker.inputs[0], Constant):
            return replace(self, table=maker.inputs[0])
        if maker.op == "BitwiseAnd" and isinstance(others[0], Constant):
            # Either one mask follows the shift, or several precede it, of which the smallest is for the lowest bits.
            return replace(self, mask=int(others[0].values.min()))
        return replace(self, signed=True) if maker.op == "BitwiseXor" else self

    @property
    def is_plain(self) -> bool:
        """Whether the constant is a float weight itself."""
        return onnx_dtype(self.quantized) in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)

    @property
    def format(self) -> str:
        if self.table is not None:
            values = self.table.values
            for row in FORMATS.values():
                if row.is_float and values.size == 2**row.bits and np.array_equal(row.values, values, equal_nan=True):
                    return row.name
        if self.mask:
            return f"{'int' if self.signed else 'uint'}{self.bits}"
        return _type_name(self.quantized)

    @property
    def bits(self) -> int:
        return self.mask.bit_length() or _bits(self.quantized)

    def shape(self, inferred: object) -> tuple[int, ...] | None:
        """Return the inferred shape; if unknown, the shape of the constant unless it is packed."""
        extents = tuple(inferred) if isinstance(inferred, list | tuple) else (None,)
        if all(isinstance(extent, int) for extent in extents):
            return extents
        return None if self.mask else tuple(self.quantized.shape)


def _data_input(node: Node, cones: DequantSubgraphs) -> int:
    """Return the input that leads to the quantized values: scales and zero points have fewer elements."""
    if node.op == "Gather":
        return 0 if _chooses_rows(node, cones) else 1
    if node.op not in ("Add", "Div", "Mul", "Sub"):
        return 0
    sizes = [math.prod(read.shape) if isinstance(read, Constant) else cones.elements[read] for read in node.inputs]
    return sizes.index(max(sizes))


def _chooses_rows(node: Node, cones: DequantSubgraphs) -> bool:
    return not (isinstance(node.inputs[1], Constant) or node.inputs[1] in cones.makers)


def _scales(tensor: Tensor | None, cones: DequantSubgraphs) -> int:
    """Return the number of elements of a scale, also if nodes compute it."""
    while tensor is not None and not isinstance(tensor, Constant):
        maker = cones.makers.get(tensor)
        if maker is None:
            return 0
        tensor = maker.inputs[_data_input(maker, cones)]
    return math.prod(tensor.shape) if tensor is not None else 0


# --- operators that read quantized weights --------------------------------------------------------------------------


def _plain(node: Node, index: int, scales: int, *, integer: bool = True) -> Iterator[StoredWeight]:
    """Yield the constant at an input if it has two axes or more."""
    quantized = optional_input(node, index)
    if isinstance(quantized, Constant) and len(quantized.shape) > 1:
        yield StoredWeight(node, _type_name(quantized), _bits(quantized), tuple(quantized.shape), scales, integer)


def _integer_product(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    for index in (0, 1):
        yield from _plain(node, index, max((_later_scales(tensor, cones) for tensor in node.outputs), default=0))


def _later_scales(product: Variable, cones: DequantSubgraphs) -> int:
    """Return the number of scales that multiply an integer result, alone or times the input scale."""
    casts = [node for node in product.outputs if node.op == "Cast"]
    factors = [
        factor
        for cast in casts
        for number in cast.outputs
        for node in number.outputs
        if node.op == "Mul"
        for factor in node.inputs
        if factor is not number
    ]
    for factor in factors:
        maker = factor.inputs[0] if isinstance(factor, Variable) and factor.inputs else None
        stored = maker.inputs if maker is not None and maker.op == "Mul" and factor not in cones.makers else [factor]
        if scales := max(_scales(tensor, cones) for tensor in stored):
            return scales
    return 0


def _block_product(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    yield _blocks(node, int(node.attrs.get("bits", 4)), (node.attrs.get("K", 0), node.attrs.get("N", 0)), cones)


def _block_lookup(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    quantized = optional_input(node, 0)
    if isinstance(quantized, Constant) and quantized.shape:
        bits = int(node.attrs.get("bits", 4)) if onnx_dtype(quantized) == TensorProto.UINT8 else _bits(quantized)
        yield _blocks(node, bits, (*quantized.shape[:-1], quantized.shape[-1] * _bits(quantized) // bits), cones)


def _blocks(node: Node, bits: int, shape: tuple[int, ...], cones: DequantSubgraphs) -> StoredWeight:
    """Return a weight of packed blocks. Without zero points its format is signed."""
    format = f"{'int' if optional_input(node, 3) is None else 'uint'}{bits}"
    return StoredWeight(node, format, bits, shape, _scales(optional_input(node, 2), cones))


def _experts(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    bits = int(node.attrs.get("expert_weight_bits", 4))
    for index, zero_points in ((2, 11), (5, 12)):
        quantized = optional_input(node, index)
        if isinstance(quantized, Constant) and quantized.shape:
            shape = (*quantized.shape[:-1], quantized.shape[-1] * 8 // bits)
            format = f"{'int' if optional_input(node, zero_points) is None else 'uint'}{bits}"
            yield StoredWeight(node, format, bits, shape, _scales(optional_input(node, index + 1), cones))


def _bitsandbytes(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    format = "nf4" if node.attrs.get("quant_type", 1) else "fp4"
    shape = node.attrs.get("K", 0), node.attrs.get("N", 0)
    yield StoredWeight(node, format, 4, shape, _scales(optional_input(node, 2), cones))


def _recurrent(node: Node, cones: DequantSubgraphs) -> Iterator[StoredWeight]:
    for index, scale in ((1, 8), (2, 10)):
        yield from _plain(node, index, _scales(optional_input(node, scale), cones))


_OF_KERNELS: Final[Mapping[str, Callable[[Node, DequantSubgraphs], Iterator[StoredWeight]]]] = {
    "ConvInteger": _integer_product,
    "DynamicQuantizeLSTM": _recurrent,
    "GatherBlockQuantized": _block_lookup,
    "MatMulBnb4": _bitsandbytes,
    "MatMulInteger": _integer_product,
    "MatMulNBits": _block_product,
    "QMoE": _experts,
}


def _is_dequantized(data: Tensor | None, cones: DequantSubgraphs) -> bool:
    return data not in cones.makers and any(maker.op == "DequantizeLinear" for maker in getattr(data, "inputs", ()))


def _type_name(tensor: Tensor) -> str:
    return str(TensorProto.DataType.Name(onnx_dtype(tensor))).lower()


def _bits(tensor: Constant) -> int:
    return _BITS.get(onnx_dtype(tensor), 8 * tensor.dtype.itemsize)
