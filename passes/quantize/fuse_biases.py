"""Give static products the bias that is added behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    all_graphs,
    constant,
    insert_nodes,
    producer,
    remove_nodes,
    sole_consumer,
)
from onnxq.numerics.affine import Parameters, QTensor, quantize_bias
from onnxq.numerics.formats import FORMATS
from onnxq.rewrite import Changes, Pass

# The other half of an int32 accumulator is left to the products.
_LARGEST_CODE = 2.0**30
_MATRIX = 2


class FuseBiases(Pass):
    """Turn a MatMul of codes and the Add of its bias into a Gemm, whose kernel adds the bias to its sums.

    A Gemm multiplies matrices, so data of another rank is reshaped, as codes, and so is what comes out; neither takes
    time. A pass over all results saved is a fifth of the time of small products. Leaves a MatMul whose result others
    read, or whose bias is no vector of its channels or too large for its accumulator.
    """

    def apply(self, graph: Graph) -> Changes:
        """Fuse; ``changed`` holds the names of the products, ``left`` of those that an Add of a constant follows."""
        names = Names(graph)
        changed, left = [], []
        for scope in all_graphs(graph):
            here = set(scope.nodes)
            shared = _Reshaped(names)
            before: dict[Node, Sequence[Node]] = {}
            after: dict[Node, Sequence[Node]] = {}
            gone = []
            for node in scope.nodes:
                found = _product(node)
                if found is None or found.add not in here:
                    continue
                bias = _bias(found)
                if isinstance(bias, str):
                    left.append((node.name, bias))
                    continue
                before[node], after[node] = shared.rewrite(found, bias)
                gone.append(found.add)
                changed.append(node.name)
            insert_nodes(scope, before=before, after=after)
            remove_nodes(scope, gone)
        return Changes(tuple(changed), tuple(left))


class _Product(NamedTuple):
    """A MatMul between decoders of codes, and the Add of a constant that alone reads it."""

    node: Node
    data: Node
    weight: Node
    add: Node
    bias: Constant


def _product(node: Node) -> _Product | None:
    if node.op != "MatMul" or node.domain or len(node.inputs) != _MATRIX:
        return None
    add = sole_consumer(node.outputs[0])
    data, weight = (producer(tensor) for tensor in node.inputs)
    if add is None or add.op != "Add" or add.domain or data is None or weight is None:
        return None
    bias = next((tensor for tensor in add.inputs if isinstance(tensor, Constant)), None)
    decoders = all(one.op == "DequantizeLinear" and isinstance(one.inputs[1], Constant) for one in (data, weight))
    codes = weight.inputs[0]
    if bias is None or not decoders or not isinstance(codes, Constant) or isinstance(data.inputs[0], Constant):
        return None
    return _Product(node, data, weight, add, bias) if len(codes.shape) == _MATRIX else None


def _bias(product: _Product) -> QTensor | str:
    """Return the codes of the bias, or why the product cannot have them."""
    shape, codes = product.node.inputs[0].shape, product.weight.inputs[0]
    if product.bias.overridable_input is not None:
        return "its bias can be overridden by an input"
    channels, scale = codes.shape[1], product.weight.inputs[1].values
    if product.bias.shape[-1:] != (channels,) or int(np.prod(product.bias.shape)) != channels:
        return f"its bias is no vector of {channels} values"
    if len(product.bias.shape) > (1 if shape is None else len(shape)):
        return "its bias has more axes than its data"
    if product.data.inputs[1].shape or scale.size not in (1, channels):
        return "its scales are not one for the data and one for each channel"
    weight = QTensor(codes.values, Parameters(scale.reshape(-1) if scale.ndim else scale, None), FORMATS["int8"])
    found = quantize_bias(product.bias.values, weight, float(product.data.inputs[1].values))
    largest = np.abs(product.bias.values.reshape(-1).astype(np.float64) / found.parameters.scale).max(initial=0.0)
    return found if largest < _LARGEST_CODE else "its bias is too large for its accumulator"


@dataclass(eq=False)
class _Reshaped:
    """The data of the products of one graph as matrices; products of the same data share one."""

    names: Names
    matrices: dict[Node, Variable] = field(default_factory=dict)
    leading: dict[Node, Variable] = field(default_factory=dict)

    def rewrite(self, product: _Product, bias: QTensor) -> tuple[list[Node], list[Node]]:
        """Make the product a Gemm, and return the nodes that must stand before and behind it."""
        node, output = product.node, product.add.outputs[0]
        shape = node.inputs[0].shape
        channels = product.weight.inputs[0].shape[1]
        name = product.bias.name
        stored = [
            constant(self.names.unique(f"{name}.codes"), bias.codes),
            constant(self.names.unique(f"{name}.scale"), bias.parameters.scale),
        ]
        decoded = Variable(self.names.unique(f"{name}.dequantized"), np.dtype(np.float32), [channels])
        axis = {"axis": 0} if bias.parameters.scale.ndim else {}
        before = [Node("DequantizeLinear", self.names.unique(f"{name}.dequantize"), axis, stored, [decoded])]
        data, after, result = node.inputs[0], list[Node](), output
        if shape is None or len(shape) != _MATRIX:
            data = self._matrix(product.data, product.weight.inputs[0].shape[0], before)
            result = Variable(self.names.unique(f"{output.name}.matrix"), output.dtype, [None, channels])
            target = self._shape(product, None if shape is None else shape[:-1], channels, before)
            after.append(Node("Reshape", self.names.unique(f"{node.name}.reshape"), {}, [result, target]))
        product.add.outputs.clear()
        (after[-1] if after else node).outputs = [output]
        if after:
            node.outputs = [result]
        node.op, node.attrs, node.inputs = "Gemm", {}, [data, node.inputs[1], decoded]
        return before, after

    def _matrix(self, decoder: Node, extent: int, before: list[Node]) -> Variable:
        """Return the data with all axes but the last in one."""
        if decoder not in self.matrices:
            codes, values = decoder.inputs[0], decoder.outputs[0]
            rows = constant(self.names.unique(f"{codes.name}.shape"), np.array([-1, extent], np.int64))
            matrix = Variable(self.names.unique(f"{codes.name}.matrix"), codes.dtype, [None, extent])
            decoded = Variable(self.names.unique(f"{values.name}.matrix"), values.dtype, [None, extent])
            before.append(Node("Reshape", self.names.unique(f"{codes.name}.reshape"), {}, [codes, rows], [matrix]))
            name = self.names.unique(f"{values.name}.dequantize")
            before.append(Node("DequantizeLinear", name, {}, [matrix, *decoder.inputs[1:]], [decoded]))
            self.matrices[decoder] = decoded
        return self.matrices[decoder]

    def _shape(
        self, product: _Product, leading: Sequence[object] | None, channels: int, before: list[Node]
    ) -> Constant | Variable:
        """Return the shape of what comes out, which is known beforehand when at most one of its extents is not."""
        known = [extent if isinstance(extent, int) else -1 for extent in leading or ()]
        name = f"{product.node.name}.shape"
        if leading is not None and known.count(-1) <= 1 and 0 not in known:
            return constant(self.names.unique(name), np.array([*known, channels], np.int64))
        whole = constant(self.names.unique(name), np.array([channels], np.int64))
        shape = Variable(self.names.unique(name), np.dtype(np.int64))
        parts = [self._leading(product.data, before), whole]
        before.append(Node("Concat", self.names.unique(f"{product.node.name}.concat"), {"axis": 0}, parts, [shape]))
        return shape

    def _leading(self, decoder: Node, before: list[Node]) -> Variable:
        """Return all extents of the data but the last."""
        if decoder not in self.leading:
            codes = decoder.inputs[0]
            shape = Variable(self.names.unique(f"{codes.name}.extents"), np.dtype(np.int64))
            leading = Variable(self.names.unique(f"{codes.name}.leading"), np.dtype(np.int64))
            ends = [
                constant(self.names.unique(f"{codes.name}.{end}"), np.array([number], np.int64))
                for end, number in (("from", 0), ("to", -1))
            ]
            before.append(Node("Shape", self.names.unique(f"{codes.name}.measure"), {}, [codes], [shape]))
            before.append(Node("Slice", self.names.unique(f"{codes.name}.cut"), {}, [shape, *ends], [leading]))
            self.leading[decoder] = leading
        return self.leading[decoder]
