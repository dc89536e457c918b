"""Let floats flow where activations passed through QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxq.dequantizing.clamps import Intervals
from onnxq.dequantizing.code_ports import code_range, decode_codes, encode_codes
from onnxq.dequantizing.coded import Coded
from onnxq.dequantizing.decoding import dequantized, value_name
from onnxq.errors import ModelError
from onnxq.graph import (
    Changes,
    Constant,
    Graph,
    Names,
    Node,
    Pass,
    Tensor,
    Variable,
    constant,
    insert_nodes,
    onnx_dtype,
    optional,
    remove_nodes,
    replace_uses,
    scopes,
)
from onnxq.graph.data_types import numpy_dtype
from onnxq.operators import OPERATORS, operator_of

_QUANTIZERS: Final = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_CARRIERS: Final = frozenset(
    {"Identity", "TopK"} | {op for (domain, op), row in OPERATORS.items() if row.moves and not domain}
)
# Their second output holds indices.
_INDEXING: Final = frozenset({"MaxPool", "TopK"})
# They look at the shape or the order of what they read, which codes and floats share.
_READERS: Final = frozenset({"ArgMax", "ArgMin", "Shape", "Size"})


class RemoveQuantizeDequantize(Pass):
    """Remove QuantizeLinear, DynamicQuantizeLinear and DequantizeLinear of activations, in every graph of the model.

    Nodes between them that only move codes, such as Reshape or MaxPool, move floats instead. Where codes begin at zero
    and nothing else keeps the values from falling below, a Relu takes over, or a Clip where codes end at six: tools
    that quantize leave these nodes out. Codes that a graph is fed or returns stay, behind float operators. A factor
    that lies in the scale with which codes are decoded becomes a Mul, and so do factors of single channels. Leaves
    DequantizeLinear of constants, which are weights.
    """

    def apply(self, graph: Graph) -> Changes:
        """Remove; ``changed`` holds the names of the nodes that are gone or work on floats now.

        Raises:
            ModelError: a node computes with codes in a way that is not known for floats; the message names it.
        """
        rewriting = _Rewriting(Names(graph), graph.opset)
        for scope in scopes(graph):
            for node in scope.nodes:
                rewriting.visit(node, scope)
        return rewriting.finish(graph)


@dataclass(eq=False)
class _Rewriting:
    """One walk over all nodes in an order of execution; nodes are put in and taken out when it ends."""

    names: Names
    opset: int
    coded: dict[Tensor, Coded] = field(default_factory=dict)
    owner: dict[Node, Graph] = field(default_factory=dict)
    intervals: Intervals = field(default_factory=Intervals)
    clamped: dict[tuple[Tensor, float], Tensor] = field(default_factory=dict)
    behind: dict[Graph, dict[Node, list[Node]]] = field(default_factory=lambda: defaultdict(dict))
    gone: list[Node] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def visit(self, node: Node, scope: Graph) -> None:
        """Rewrite a node whose inputs have been rewritten."""
        self.owner[node] = scope
        reads = [tensor for tensor in node.inputs if tensor in self.coded]
        if node.op in _QUANTIZERS:
            self._quantizer(node, scope)
        elif node.op == "DequantizeLinear":
            self._dequantizer(node, scope)
        elif node.domain or node.op not in _CARRIERS | _READERS:
            if reads:
                raise ModelError(
                    f"node {node.name} ({node.op}) computes with the integer codes {reads[0].name}, and onnxq does not "
                    "know what it means for floats; dequantize in front of this node first"
                )
            self.intervals.see(node)
        elif node.op in _READERS:
            for index, tensor in enumerate(node.inputs):
                if tensor in self.coded:
                    node.inputs[index] = self.coded[tensor].value
        elif reads or (ahead := self._ahead(node)) is None:
            if reads:
                self._carrier(node, scope, self.coded[reads[0]])
            self.intervals.see(node)
        else:
            self._carrier(node, scope, ahead)
            self.intervals.see(node)

    def finish(self, graph: Graph) -> Changes:
        """Edit the lists of nodes, and say what was done."""
        gone = set(self.gone)
        for node in self.gone:
            if node.op == "DynamicQuantizeLinear":
                for tensor in node.outputs:
                    reader = next((reader for reader in tensor.outputs if reader not in gone), None)
                    if reader is not None or tensor.returned_by:
                        what = f"node {reader.name} ({reader.op})" if reader is not None else "the graph's output list"
                        raise ModelError(
                            f"{what} reads {tensor.name} of node {node.name} (DynamicQuantizeLinear), and onnxq does "
                            "not know what it means for floats; remove it first"
                        )
        for scope, after in self.behind.items():
            insert_nodes(scope, after=after)
        remove_nodes(graph, gone)
        return Changes(tuple(self.changed), tuple(self.left))

    def _quantizer(self, node: Node, scope: Graph) -> None:
        value, codes = node.inputs[0], node.outputs[0]
        if node.op == "DynamicQuantizeLinear":
            self.coded[codes] = Coded(value, node.outputs[1], node.outputs[2])
            self._drop(node)
            return
        coded = Coded.by(node, value)
        if codes.dtype is None and node.attrs.get("output_dtype"):
            codes.dtype = numpy_dtype(node.attrs["output_dtype"])
        zero_point = self._zero_point(coded, codes)
        clamped = self._clamp(node, scope, coded, zero_point)
        self.coded[codes] = Coded(clamped, coded.scale, coded.zero_point, coded.layout)
        self._drop(node)
        if codes.returned_by:
            node.outputs.clear()
            self._return(self.coded[codes], zero_point, codes, node, scope)

    def _clamp(self, node: Node, scope: Graph, coded: Coded, zero_point: Tensor) -> Tensor:
        if coded.layout or not isinstance(zero_point, Constant) or math.prod(zero_point.shape) != 1:
            return coded.value
        limits = code_range(zero_point.dtype)
        if limits is None or zero_point.values.item() != limits[0]:
            return coded.value
        high = float(coded.scale.values.item()) * (limits[1] - limits[0])
        key = coded.value, high
        if key not in self.clamped:
            clamp = self.intervals.clamp(coded.value, 0.0, high, self.opset, self.names.fresh)
            self.clamped[key] = coded.value
            if clamp is not None:
                self.clamped[key] = clamp.outputs[0]
                self._put(scope, node, [clamp])
        return self.clamped[key]

    def _return(self, coded: Coded, zero_point: Tensor, codes: Variable, node: Node, scope: Graph) -> None:
        """Make the codes, which a graph returns, from floats."""
        if coded.layout or not isinstance(zero_point, Constant):
            raise ModelError(
                f"the codes {codes.name} leave the graph with several scales, expected one; dequantize them first"
            )
        self._put(scope, node, encode_codes(coded.value, coded.scale, zero_point, codes, self.names, self.opset))

    def _dequantizer(self, node: Node, scope: Graph) -> None:
        codes, values = node.inputs[0], node.outputs[0]
        wanted = Coded.by(node, codes)
        known = self.coded.get(codes)
        if known is not None:
            if known.agrees(wanted):
                self._substitute(node, values, known.value, scope)
            elif (factor := known.factor(wanted)) is not None and onnx_dtype(known.value) == onnx_dtype(values):
                self._multiply(node, values, known.value, factor, scope)
            else:
                raise ModelError(
                    f"node {node.name} (DequantizeLinear) decodes {codes.name} with another scale or zero point than "
                    "it was encoded with, so that it has no float meaning; give both the same"
                )
        elif isinstance(codes, Constant):
            self.left.append((node.name, "it decodes a weight"))
            return
        elif wanted.layout:
            raise ModelError(
                f"node {node.name} (DequantizeLinear) decodes {codes.name}, which the model is fed or computes, with "
                "several scales, expected one; dequantize it outside of the model"
            )
        else:
            node.outputs.clear()
            self._put(scope, node, decode_codes(codes, wanted.scale, wanted.zero_point, values, self.names))
        self._drop(node)

    def _substitute(self, node: Node, values: Variable, value: Tensor, scope: Graph) -> None:
        """Let the consumers of ``values`` read ``value``; what a graph returns keeps its name and a producer there."""
        makers = value.inputs if isinstance(value, Variable) and not value.returned_by else []
        own = any(self.owner.get(maker) is scope for maker in makers)
        given, wanted = onnx_dtype(value), onnx_dtype(values)
        if given and wanted and given != wanted:
            op, attributes = "Cast", {"to": wanted}
        elif values.returned_by and not own:
            op, attributes = "Identity", {}
        else:
            replace_uses(values, value, graph_outputs=True)
            return
        node.outputs.clear()
        self._put(scope, node, [Node(op, self.names.fresh(node.name), attributes, [value], [values])])

    def _multiply(self, node: Node, values: Variable, value: Tensor, factor: NDArray[np.float64], scope: Graph) -> None:
        """Make ``values`` by a multiplication that codes had in their scale."""
        node.outputs.clear()
        factors = constant(self.names.fresh(f"{node.name}.factor"), np.asarray(factor, value.dtype or np.float32))
        self._put(scope, node, [Node("Mul", self.names.fresh(node.name), {}, [value, factors], [values])])

    def _carrier(self, node: Node, scope: Graph, coded: Coded) -> None:
        """Let a node that moves codes move the floats that they stand for."""
        operator = operator_of(node)
        indices = range(len(node.inputs)) if operator is not None and operator.data is None else [0]
        if node.op == "Pad" and node.attrs.get("mode", "constant") == "constant":
            # What is filled in is a code as well; left out it is code zero, which need not mean zero.
            if optional(node, 2) is None:
                dtype = coded.zero_point.dtype if coded.zero_point is not None else node.inputs[0].dtype or np.uint8
                fill = constant(self.names.fresh(f"{node.name}.fill"), np.zeros((), dtype))
                if len(node.inputs) < 3:
                    node.inputs.append(fill)
                node.inputs[2] = fill
            indices = [0, 2]
        for index in indices:
            tensor = node.inputs[index]
            other = self.coded.get(tensor, coded)
            if coded.layout or not coded.agrees(other) or not (tensor in self.coded or isinstance(tensor, Constant)):
                raise ModelError(
                    f"node {node.name} ({node.op}) brings together codes that are not known to have one scale, such as "
                    f"{tensor.name}; dequantize in front of this node first"
                )
            node.inputs[index] = other.value if tensor in self.coded else self._decoded(tensor, coded)
        for codes in node.outputs[:1] if node.op in _INDEXING else tuple(node.outputs):
            values = Variable(value_name(codes.name, self.names), node.inputs[indices[0]].dtype, codes.shape)
            self.coded[codes] = Coded(values, coded.scale, coded.zero_point)
            node.outputs[node.outputs.index(codes)] = values
            if codes.returned_by:
                self._return(self.coded[codes], self._zero_point(coded, codes), codes, node, scope)
        self.changed.append(node.name)

    def _decoded(self, tensor: Constant, coded: Coded) -> Constant:
        """Return the floats that constant codes stand for."""
        scale, zero_point = coded.scale, coded.zero_point
        if not isinstance(scale, Constant) or not isinstance(zero_point, Constant | None):
            raise ModelError(
                f"the codes {tensor.name} have a scale that is not constant, so they have no float meaning"
            )
        payload = dequantized(tensor.payload, scale.payload, zero_point and zero_point.payload)
        return Constant(value_name(tensor.name, self.names), payload)

    def _ahead(self, node: Node) -> Coded | None:
        """Return what the constant codes of a carrier mean: what the DequantizeLinear says that they reach."""
        source = node.inputs[0]
        if not isinstance(source, Constant) or code_range(source.dtype) is None:
            return None
        pending, seen = list(node.outputs[:1]), set(node.outputs[:1])
        while pending:
            for reader in pending.pop().outputs:
                if reader.op == "DequantizeLinear":
                    return Coded.by(reader, source)
                if reader.op in _CARRIERS:
                    pending.extend(tensor for tensor in reader.outputs if tensor not in seen)
                    seen.update(reader.outputs)
        return None

    def _zero_point(self, coded: Coded, codes: Variable) -> Tensor:
        """Return the zero point, which carries the type of the codes; left out it is a zero of theirs."""
        zero = np.zeros((), codes.dtype or np.uint8)
        return coded.zero_point or constant(self.names.fresh(f"{codes.name}.zero_point"), zero)

    def _put(self, scope: Graph, node: Node, nodes: Sequence[Node]) -> None:
        """Have nodes inserted behind ``node``."""
        self.behind[scope].setdefault(node, []).extend(nodes)
        self.owner.update(dict.fromkeys(nodes, scope))

    def _drop(self, node: Node) -> None:
        self.gone.append(node)
        self.changed.append(node.name)
