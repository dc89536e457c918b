"""Help onnxruntime's fusions: biases into integer kernels, and nodes that it must not fuse."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Tensor,
    Variable,
    all_graphs,
    all_nodes,
    insert_nodes,
    producer,
    remove_nodes,
    replace_uses,
    sole_consumer,
)
from onnxq.numerics.affine import QTensor, QuantParams, quantize_bias
from onnxq.numerics.formats import FORMATS
from onnxq.ops import Role, facts_of
from onnxq.passes.quantize.planned import PlannedPass, copy_of
from onnxq.rewrite import Changes, Pass

# The other half of the int32 accumulator is for the products.
_LARGEST_VALUE = 2.0**30
_MATRIX = 2


class FuseBiases(Pass):
    """Turn a quantized MatMul and the Add of its bias into a Gemm, whose kernel adds the bias to its sums.

    A Gemm multiplies matrices, so quantized activations and the result of another rank are reshaped, which takes no
    time. The fusion saves a pass over the result: a fifth of the time of small matrix multiplications. Skips a MatMul
    with other readers. Its bias must be a vector of its channels and fit the accumulator.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        changed, skipped, gone = [], [], []
        before: dict[Node, Sequence[Node]] = {}
        after: dict[Node, Sequence[Node]] = {}
        for scope in all_graphs(graph):
            here = set(scope.nodes)
            shared = _Reshaped(names)
            for node in scope.nodes:
                product = _product(node)
                if product is None or product.add not in here:
                    continue
                bias = _bias(product)
                if isinstance(bias, str):
                    skipped.append((node.name, bias))
                    continue
                before[node], after[node] = shared.rewrite(product, bias)
                gone.append(product.add)
                changed.append(node.name)
        insert_nodes(graph, before=before, after=after)
        remove_nodes(graph, gone)
        return Changes(tuple(changed), tuple(skipped))


class _Product(NamedTuple):
    """A MatMul of dequantized inputs, and the Add of a constant that is its only reader."""

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
    decoders = all(maker.op == "DequantizeLinear" and isinstance(maker.inputs[1], Constant) for maker in (data, weight))
    quantized = weight.inputs[0]
    if bias is None or not decoders or not isinstance(quantized, Constant) or isinstance(data.inputs[0], Constant):
        return None
    return _Product(node, data, weight, add, bias) if len(quantized.shape) == _MATRIX else None


def _bias(product: _Product) -> QTensor | str:
    shape, quantized = product.node.inputs[0].shape, product.weight.inputs[0]
    if product.bias.overridable_input is not None:
        return "its bias can be overridden by an input"
    channels, scale = quantized.shape[1], product.weight.inputs[1].values
    if product.bias.shape[-1:] != (channels,) or int(np.prod(product.bias.shape)) != channels:
        return f"its bias is no vector of {channels} values"
    if len(product.bias.shape) > (1 if shape is None else len(shape)):
        return "its bias has more axes than its data"
    if product.data.inputs[1].shape or scale.size not in (1, channels):
        return "its scales are not one for the data and one for each channel"
    weight = QTensor(quantized.values, QuantParams(scale.reshape(-1) if scale.ndim else scale, None), FORMATS["int8"])
    bias = quantize_bias(product.bias.values, weight, float(product.data.inputs[1].values))
    largest = np.abs(product.bias.values.reshape(-1).astype(np.float64) / bias.parameters.scale).max(initial=0.0)
    return bias if largest < _LARGEST_VALUE else "its bias is too large for its accumulator"


@dataclass(eq=False)
class _Reshaped:
    """The activations of one graph's Gemms as matrices; Gemms with the same activations share one."""

    names: Names
    matrices: dict[Node, Variable] = field(default_factory=dict)
    leading: dict[Node, Variable] = field(default_factory=dict)

    def rewrite(self, product: _Product, bias: QTensor) -> tuple[list[Node], list[Node]]:
        """Turn the MatMul into a Gemm; return the nodes to insert before and after it."""
        node, output, shape = product.node, product.add.outputs[0], product.node.inputs[0].shape
        extent, channels = product.weight.inputs[0].shape
        before, behind = NodeBuilder(product.bias.name, self.names), NodeBuilder(node.name, self.names)
        stored = [before.store("codes", bias.values), before.store("scale", bias.parameters.scale)]
        axis: dict[str, Any] = {"axis": 0} if bias.parameters.scale.ndim else {}
        decoded = before.node("DequantizeLinear", "dequantize", stored, "dequantized", np.float32, [channels], **axis)
        data, result = node.inputs[0], output
        product.add.outputs.clear()
        if shape is None or len(shape) != _MATRIX:
            data = self._matrix(product.data, extent, before)
            result = behind.named_after(output.name).variable("matrix", output.dtype, [None, channels])
            target = self._shape(product, None if shape is None else shape[:-1], channels, before)
            behind.node("Reshape", "reshape", [result, target], output)
        node.op, node.attrs, node.inputs, node.outputs = "Gemm", {}, [data, node.inputs[1], decoded], [result]
        return before.nodes, behind.nodes

    def _matrix(self, decoder: Node, extent: int, new: NodeBuilder) -> Variable:
        if decoder not in self.matrices:
            (quantized, *parameters), values, shape = decoder.inputs, decoder.outputs[0], [None, extent]
            new = new.named_after(quantized.name)
            rows = new.store("shape", np.array([-1, extent], np.int64))
            matrix = new.node("Reshape", "reshape", [quantized, rows], "matrix", quantized.dtype, shape)
            new, inputs = new.named_after(values.name), [matrix, *parameters]
            decoded = new.node("DequantizeLinear", "dequantize", inputs, "matrix", values.dtype, shape)
            self.matrices[decoder] = decoded
        return self.matrices[decoder]

    def _shape(
        self, product: _Product, leading: Sequence[object] | None, channels: int, new: NodeBuilder
    ) -> Constant | Variable:
        """Return the shape of the result, a constant if at most one of its extents is unknown."""
        extents = [extent if isinstance(extent, int) else -1 for extent in leading or ()]
        new = new.named_after(product.node.name)
        if leading is not None and extents.count(-1) <= 1 and 0 not in extents:
            return new.store("shape", np.array([*extents, channels], np.int64))
        whole = new.store("shape", np.array([channels], np.int64))
        return new.node("Concat", "concat", [self._leading(product.data, new), whole], "shape", np.int64, axis=0)

    def _leading(self, decoder: Node, new: NodeBuilder) -> Variable:
        if decoder not in self.leading:
            quantized = decoder.inputs[0]
            new = new.named_after(quantized.name)
            extents = new.node("Shape", "measure", [quantized], "extents", np.int64)
            ends = [new.store(end, np.array([number])) for end, number in (("from", 0), ("to", -1))]
            self.leading[decoder] = new.node("Slice", "cut", [extents, *ends], "leading", np.int64)
        return self.leading[decoder]


# --- nodes behind quantized compute nodes ---------------------------------------------------------------------------

_CLAMPS = frozenset({"Clip", "Relu"})


class IsolateProducts(PlannedPass):
    """Write the nodes behind quantized compute nodes in operators that onnxruntime does not fuse wrongly.

    After these fusions onnxruntime would dequantize in each run:

    - It takes a Relu or Clip behind a compute node, also behind its bias, for the beginning of a quantizer.
    - It takes a QuantizeLinear behind a weight-only node for the end of a static node.
    - It merges the Add of a matrix into a matrix multiplication.
    - It merges the Add of a bias into a static node with a float result.

    A clamp becomes Max and Min, an Add becomes a Sum, and a QuantizeLinear reads a copy. It also reads a copy if a
    static node has other readers. Skips clamps with limits in attributes (below opset 11), and nodes in another graph,
    because onnxruntime fuses nodes of one graph only.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        changed = []
        before: dict[Node, list[Node]] = {}
        after: dict[Node, list[Node]] = {}
        for scope in all_graphs(graph):
            here = set(scope.nodes)
            for node in scope.nodes:
                mode = self.plan.by_node[node.name].mode if node.name in self.plan.by_node else Mode.FLOAT
                if not facts_of(node).product or mode not in (Mode.WEIGHT_ONLY, Mode.STATIC):
                    continue
                product, reader = node.outputs[0], _reader_here(node.outputs[0], here)
                static = mode is Mode.STATIC
                if reader is not None and reader.op == "Add" and not reader.domain:
                    if _is_merged(reader, product) or (static and not _is_quantized(reader.outputs[0], here)):
                        reader.op = "Sum"
                        changed.append(reader.name)
                        continue
                    product, reader = reader.outputs[0], _reader_here(reader.outputs[0], here)
                if _quantizers(product) and not (static and reader is not None):
                    new = NodeBuilder(product.name, names)
                    replace_uses(product, copy_of(product, new), set(_quantizers(product)))
                    after[product.inputs[0]] = new.nodes
                    changed.append(product.inputs[0].name)
                elif (
                    reader is not None
                    and not (static and _quantizers(reader.outputs[0]))
                    and (ends := _ends(reader, names))
                ):
                    before[reader] = _replace(reader, ends, names)
                    changed.append(reader.name)
        insert_nodes(graph, before=before, after=after)
        return Changes(tuple(changed))


def _reader_here(tensor: Variable, here: Set[Node]) -> Node | None:
    reader = sole_consumer(tensor)
    return reader if reader in here else None


def _quantizers(tensor: Variable) -> list[Node]:
    return [node for node in tensor.outputs if node.op == "QuantizeLinear"]


def _is_quantized(tensor: Variable, here: Set[Node]) -> bool:
    """Return whether the only reader is a quantizer, directly or behind a clamp."""
    reader = _reader_here(tensor, here)
    if reader is not None and reader.op in _CLAMPS:
        reader = _reader_here(reader.outputs[0], here)
    return reader is not None and reader.op == "QuantizeLinear"


def _is_merged(reader: Node, product: Variable) -> bool:
    """Return whether onnxruntime may merge the Add of a matrix into the compute node."""
    others = [tensor for tensor in reader.inputs if tensor is not product]
    return _may_have_rank_2(product) and any(_may_have_rank_2(tensor) for tensor in others)


def _may_have_rank_2(tensor: Tensor) -> bool:
    return tensor.shape is None or len(tensor.shape) == 2


def _ends(clamp: Node, names: Names) -> list[tuple[str, Tensor]]:
    """Return Max and Min with their limits for a clamp; none if it stays."""
    if clamp.op not in _CLAMPS or clamp.domain or clamp.attrs or not clamp.outputs[0].outputs:
        return []
    if clamp.op == "Relu":
        zero = np.zeros((), clamp.inputs[0].dtype or np.float32)
        return [("Max", names.store(f"{clamp.name}.zero", zero))]
    limits = zip(("Max", "Min"), clamp.inputs[1:], strict=False)
    return [(op, limit) for op, limit in limits if limit.name]


def _replace(clamp: Node, ends: list[tuple[str, Tensor]], names: Names) -> list[Node]:
    """Turn a clamp into its last operator; return the one to insert before it, if any."""
    data, (last, limit), new = clamp.inputs[0], ends[-1], NodeBuilder("", names)
    if len(ends) > 1:
        data = new.node("Max", f"{clamp.name}.max", [data, ends[0][1]], f"{clamp.outputs[0].name}.raised", like=data)
    clamp.op, clamp.inputs = last, [data, limit]
    return new.nodes


# --- float compute nodes between quantized values -------------------------------------------------------------------


class IsolateFloats(PlannedPass):
    """Let float compute nodes between DequantizeLinear and QuantizeLinear read a copy.

    Otherwise onnxruntime takes them for static nodes. It then quantizes their weights at load time, more coarsely than
    they were stored, and runs an integer kernel. The kernel fails if the quantizer has a scale for each channel.
    onnxruntime also looks through clamps and nodes that only move elements.
    """

    def apply(self, graph: Graph) -> Changes:
        names = Names(graph)
        before: dict[Node, list[Node]] = {}
        for _, node in all_nodes(graph):
            decision = self.plan.by_node.get(node.name)
            is_float = decision is None or decision.mode is not Mode.STATIC
            # onnxruntime would turn these into static ones; it leaves all others in float.
            if facts_of(node).adds_bias and is_float and _is_between_quantized(node):
                new = NodeBuilder(node.inputs[0].name, names)
                node.inputs[0] = copy_of(node.inputs[0], new)
                before[node] = new.nodes
        insert_nodes(graph, before=before)
        return Changes(tuple(node.name for node in before))


def _is_between_quantized(node: Node) -> bool:
    maker = producer(node.inputs[0])
    while maker is not None and facts_of(maker).moves:
        maker = producer(maker.inputs[0])
    if maker is None or maker.op != "DequantizeLinear":
        return False
    reader = sole_consumer(node.outputs[0])
    while reader is not None and facts_of(reader).role in (Role.PASS_THROUGH, Role.CLAMP):
        reader = sole_consumer(reader.outputs[0])
    return reader is not None and reader.op == "QuantizeLinear"
