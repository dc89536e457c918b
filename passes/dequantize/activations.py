"""Dequantize activations: remove QuantizeLinear and DequantizeLinear, and restore the clamps that they replaced."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Tensor,
    Variable,
    all_nodes,
    insert_nodes,
    onnx_dtype,
    optional_input,
    owner_graphs,
    remove_nodes,
    replace_uses,
)
from onnxq.ir.data_types import numpy_dtype
from onnxq.numerics.blocks import along
from onnxq.ops import QUANTIZERS, facts_of
from onnxq.passes.dequantize.quantized_values import (
    QuantizedValue,
    decode_values,
    dequantized,
    encode_values,
    integer_range,
    value_name,
)
from onnxq.rewrite import Changes, Match, NodePattern, OpsetPatternBuilder, Pass, RewriteContext, RewriteRule
from onnxq.rewrite.soundness import range_of

# Clamps end at one-digit numbers, and from zero also at halves below this limit. Calibrated ranges hardly ever do.
_MOST_HALVES: Final = 100.0
# Relative tolerance, because the end of the range passed through a float32 scale.
_CLOSE: Final = 1e-6
_CLIP_HAS_INPUTS: Final = 11


def clamp(value: Tensor, low: float, high: float, step: float, opset: int, names: Names) -> Node | None:
    """Return the Relu or Clip that the quantized range `low` to `high` replaced.

    The quantized model clamps at the same values, up to half a step, so the node adds no error.

    Args:
        value: the tensor in front of QuantizeLinear.
        low: lowest representable value.
        high: highest representable value.
        step: the scale.
        opset: opset of the default domain.
        names: names of the model.

    Returns:
        None if the range is an ordinary calibrated one, or if the values cannot leave it.
    """
    if not isinstance(value, Variable) or not value.inputs or value.inputs[0].op == "Cast":
        return None
    ends, (lowest, highest) = _ends(low, high, step), range_of(value)
    if ends is None or (lowest >= ends[0] and highest <= max(high, ends[1])):
        return None
    new = NodeBuilder(value.name, names)
    clamped = new.variable("clamped", like=value)
    if ends == (0.0, math.inf):
        new.node("Relu", "relu", [value], clamped)
    elif opset < _CLIP_HAS_INPUTS:
        new.node("Clip", "clip", [value], clamped, min=ends[0], max=ends[1])
    else:
        minimum, maximum = (np.asarray(end, value.dtype or np.float32) for end in ends)
        limits = [new.store("minimum", minimum), new.store("maximum", maximum)]
        new.node("Clip", "clip", [value, *limits], clamped)
    return new.nodes[0]


def _ends(low: float, high: float, step: float) -> tuple[float, float] | None:
    """Return the limits of the clamp behind a quantized range; high is inf for a Relu, and None means no clamp.

    >>> _ends(0.0, 6.0, 6 / 255), _ends(0.0, 4.7312, 4.7312 / 255), _ends(-128 * 2 / 255, 127 * 2 / 255, 2 / 255)
    ((0.0, 6.0), (0.0, inf), (-1.0, 1.0))
    """
    if low == 0:
        halves = round(2 * high) / 2 if high < _MOST_HALVES else 0.0
        return 0.0, next((end for end in (_rounded(high), halves) if _is_close(end, high, high)), math.inf)
    # The zero point is rounded, so both ends may have moved.
    start, width = _rounded(low), high - low
    end = 0.0 if _is_close(start + width, 0.0, width) else _rounded(start + width)
    moved = abs(start - low) > step / 2 + _CLOSE * width
    return (start, end) if not moved and _is_close(end, start + width, width) else None


def _rounded(number: float) -> float:
    return float(f"{number:.1g}")


def _is_close(number: float, target: float, size: float) -> bool:
    return abs(number - target) <= _CLOSE * size


# --- quantizers -----------------------------------------------------------------------------------------------------

# Operators that move values, beside those that pass on the scale of their inputs.
_MOVING: Final = frozenset({"Identity", "TopK"})
# Operators whose second output holds indices.
_INDEXING: Final = frozenset({"MaxPool", "TopK"})
# Operators that read only the shape or order of elements, which quantized values and floats share.
_READERS: Final = frozenset({"ArgMax", "ArgMin", "Shape", "Size"})


class RemoveQuantizeDequantize(Pass):
    """Remove QuantizeLinear, DynamicQuantizeLinear and DequantizeLinear of activations, in every graph of the model.

    Nodes between them that only move values, such as Reshape or MaxPool, move floats instead. Quantizing tools remove a
    Relu or Clip if the quantized range ends at its limits. A Relu comes back if the range begins at zero and values may
    be negative, a Clip if the range ends at short numbers. Quantized inputs and outputs of a graph stay behind float
    operators, and so do quantized values that another operator computes with. A factor between the scales of quantizer
    and dequantizer becomes a Mul, also for single channels. Skips DequantizeLinear of constants, which are weights.
    """

    def apply(self, graph: Graph) -> Changes:
        """Remove the nodes.

        Raises:
            ModelError: a node needs quantized values that float operators cannot make, because their scale is dynamic.
                The message names the node.
        """
        rewriting = _Rewriting(Names(graph), graph.opset, owner_graphs(graph))
        for _, node in all_nodes(graph):
            rewriting.visit(node)
        return rewriting.finish(graph)


@dataclass(eq=False)
class _Rewriting:
    """One walk over all nodes in execution order; the lists of nodes are edited at its end."""

    names: Names
    opset: int
    owner: dict[Node, Graph]
    encoded: dict[Tensor, QuantizedValue] = field(default_factory=dict)
    clamped: dict[tuple[Tensor, float, float], Tensor] = field(default_factory=dict)
    makers: dict[Tensor, Node] = field(default_factory=dict)
    kept: set[Tensor] = field(default_factory=set)
    behind: dict[Node, list[Node]] = field(default_factory=lambda: defaultdict(list))
    gone: list[Node] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        if node.op in QUANTIZERS:
            self._quantizer(node)
            return
        if node.op == "DequantizeLinear":
            self._dequantizer(node)
            return
        if node.op in _READERS and not node.domain:
            for index, tensor in enumerate(node.inputs):
                if tensor in self.encoded:
                    node.inputs[index] = self.encoded[tensor].value
            return
        moved = self._moved(node)
        if moved is not None:
            self._carrier(node, moved)
        else:
            for tensor in node.inputs:
                self._keep(tensor, node)

    def finish(self, graph: Graph) -> Changes:
        gone = set(self.gone)
        for node in self.gone:
            if node.op == "DynamicQuantizeLinear":
                for tensor in node.outputs:
                    reader = next((reader for reader in tensor.outputs if reader not in gone), None)
                    if reader is not None or tensor.graph_output_of:
                        what = f"node {reader.name} ({reader.op})" if reader is not None else "the graph's output list"
                        raise ModelError(
                            f"{what} reads {tensor.name} of node {node.name} (DynamicQuantizeLinear), which has no "
                            "float counterpart; remove it first"
                        )
        insert_nodes(graph, after=self.behind)
        remove_nodes(graph, gone)
        return Changes(tuple(self.changed), tuple(self.skipped))

    def _quantizer(self, node: Node) -> None:
        value, quantized = node.inputs[0], node.outputs[0]
        self._drop(node)
        if node.op == "DynamicQuantizeLinear":
            self.encoded[quantized] = QuantizedValue(value, node.outputs[1], node.outputs[2])
            return
        encoded = QuantizedValue.by(node, value)
        if quantized.dtype is None and node.attrs.get("output_dtype"):
            quantized.dtype = numpy_dtype(node.attrs["output_dtype"])
        clamped = self._clamp(node, encoded, self._zero_point(encoded, quantized))
        self._attach(quantized, QuantizedValue(clamped, encoded.scale, encoded.zero_point, encoded.layout), node)

    def _attach(self, quantized: Variable, encoded: QuantizedValue, maker: Node) -> None:
        """Record the meaning of a quantized tensor; quantized graph outputs stay."""
        self.encoded[quantized], self.makers[quantized] = encoded, maker
        if quantized.graph_output_of:
            self._keep(quantized, None)

    def _keep(self, quantized: Tensor, reader: Node | None) -> None:
        """Insert float operators that compute the quantized values for `reader`; None means a graph output."""
        if quantized not in self.encoded or quantized in self.kept:
            return
        encoded, who = self.encoded[quantized], "a graph" if reader is None else f"node {reader.name} ({reader.op})"
        scale = self._spread(encoded.scale, encoded.layout, quantized)
        zero = self._spread(self._zero_point(encoded, quantized), encoded.layout, quantized)
        if quantized not in self.makers or scale is None or not isinstance(zero, Constant):
            raise ModelError(
                f"{who} reads the integers {quantized.name}, whose scale is computed or in blocks, expected a constant "
                "scale; dequantize in front of this node first"
            )
        self.kept.add(quantized)
        maker = self.makers[quantized]
        maker.outputs = [tensor for tensor in maker.outputs if tensor is not quantized]
        self._put(maker, encode_values(encoded.value, scale, zero, quantized, self.names, self.opset))

    def _spread(self, parameter: Tensor, layout: tuple[int, ...], quantized: Tensor) -> Tensor | None:
        """Return a scale or zero point in a shape that broadcasts; None if it is unknown."""
        if not layout:
            return parameter
        axis, block = layout
        if block or quantized.shape is None or not isinstance(parameter, Constant):
            return None
        values = parameter.values
        spread = along(values, axis, len(quantized.shape)) if values.size > 1 else values.reshape(())
        return self.names.store(f"{parameter.name}.spread", spread)

    def _clamp(self, node: Node, encoded: QuantizedValue, zero_point: Tensor) -> Tensor:
        if encoded.layout or not isinstance(encoded.scale, Constant) or not isinstance(zero_point, Constant):
            return encoded.value
        if math.prod(zero_point.shape) != 1:
            return encoded.value
        limits = integer_range(zero_point.dtype)
        if limits is None:
            return encoded.value
        step = float(encoded.scale.values.item())
        low, high = (step * (code - int(zero_point.values.item())) for code in limits)
        key = encoded.value, low, high
        if key not in self.clamped:
            clamping = clamp(encoded.value, low, high, step, self.opset, self.names)
            self.clamped[key] = encoded.value
            if clamping is not None:
                self.clamped[key] = clamping.outputs[0]
                self._put(node, [clamping])
        return self.clamped[key]

    def _dequantizer(self, node: Node) -> None:
        quantized, values = node.inputs[0], node.outputs[0]
        decoded, encoded = QuantizedValue.by(node, quantized), self.encoded.get(quantized)
        if encoded is None and isinstance(quantized, Constant):
            self.skipped.append((node.name, "it decodes a weight"))
            return
        self._drop(node)
        if encoded is not None and encoded.agrees(decoded):
            self._substitute(node, values, encoded.value)
            return
        factor = encoded.factor(decoded) if encoded is not None else None
        if encoded is not None and factor is not None and onnx_dtype(encoded.value) == onnx_dtype(values):
            self._multiply(node, values, encoded.value, factor)
            return
        self._keep(quantized, node)
        scale = self._spread(decoded.scale, decoded.layout, quantized)
        zero_point = decoded.zero_point and self._spread(decoded.zero_point, decoded.layout, quantized)
        if scale is None:
            raise ModelError(
                f"node {node.name} (DequantizeLinear) decodes {quantized.name}, which is not constant, expected one "
                "scale or one per channel of a known axis; dequantize it outside the model"
            )
        node.outputs.clear()
        self._put(node, decode_values(quantized, scale, zero_point, values, self.names))

    def _substitute(self, node: Node, values: Variable, value: Tensor) -> None:
        """Let the consumers of `values` read `value`. A graph output keeps its name and a producer in its graph."""
        makers = value.inputs if isinstance(value, Variable) and not value.graph_output_of else []
        own = any(self.owner.get(maker) is self.owner[node] for maker in makers)
        source_type, target_type = onnx_dtype(value), onnx_dtype(values)
        if source_type and target_type and source_type != target_type:
            op, attributes = "Cast", {"to": target_type}
        elif values.graph_output_of and not own:
            op, attributes = "Identity", {}
        else:
            replace_uses(values, value, graph_outputs=True)
            return
        node.outputs.clear()
        self._put(node, [Node(op, self.names.unique(node.name), attributes, [value], [values])])

    def _multiply(self, node: Node, values: Variable, value: Tensor, factor: NDArray[np.float64]) -> None:
        node.outputs.clear()
        factors = self.names.store(f"{node.name}.factor", np.asarray(factor, value.dtype or np.float32))
        self._put(node, [Node("Mul", self.names.unique(node.name), {}, [value, factors], [values])])

    def _moved(self, node: Node) -> QuantizedValue | None:
        """Return the meaning of the values that a node moves; None if it moves none or their meanings differ."""
        places = _moved_inputs(node)
        moved = [node.inputs[index] for index in places]
        encoded = next((self.encoded[tensor] for tensor in moved if tensor in self.encoded), None) or self._ahead(node)
        if encoded is None or encoded.layout:
            return None
        others = [tensor for index, tensor in enumerate(node.inputs) if index not in places]
        fixed = isinstance(encoded.scale, Constant) and isinstance(encoded.zero_point, Constant | None)
        alike = all(
            encoded.agrees(self.encoded[tensor]) if tensor in self.encoded else fixed and isinstance(tensor, Constant)
            for tensor in moved
        )
        filled = fixed or node.op != "Pad" or len(places) > 1 or node.attrs.get("mode", "constant") != "constant"
        return encoded if alike and filled and not any(tensor in self.encoded for tensor in others) else None

    def _carrier(self, node: Node, encoded: QuantizedValue) -> None:
        if node.op == "Pad" and node.attrs.get("mode", "constant") == "constant" and optional_input(node, 2) is None:
            # The fill value is quantized too. The default 0 need not be the zero point.
            dtype = encoded.zero_point.dtype if encoded.zero_point is not None else node.inputs[0].dtype or np.uint8
            node.inputs.extend([Variable("")] * (3 - len(node.inputs)))
            node.inputs[2] = self.names.store(f"{node.name}.fill", np.zeros((), dtype))
        places = _moved_inputs(node)
        for index in places:
            tensor = node.inputs[index]
            own = self.encoded.get(tensor)
            node.inputs[index] = own.value if own is not None else self._decoded(tensor, encoded)
        for quantized in node.outputs[:1] if node.op in _INDEXING else tuple(node.outputs):
            values = Variable(value_name(quantized.name, self.names), node.inputs[places[0]].dtype, quantized.shape)
            node.outputs[node.outputs.index(quantized)] = values
            self._attach(quantized, QuantizedValue(values, encoded.scale, encoded.zero_point), node)
        self.changed.append(node.name)

    def _decoded(self, tensor: Constant, encoded: QuantizedValue) -> Constant:
        zero_point = encoded.zero_point
        tensor_data = dequantized(tensor.tensor_data, encoded.scale.tensor_data, zero_point and zero_point.tensor_data)
        return Constant(value_name(tensor.name, self.names), tensor_data)

    def _ahead(self, node: Node) -> QuantizedValue | None:
        """Return the meaning of moved quantized constants, from the DequantizeLinear that they reach."""
        moved = [node.inputs[index] for index in _moved_inputs(node)]
        integers = [tensor for tensor in moved if isinstance(tensor, Constant) and integer_range(tensor.dtype)]
        if not moved or len(integers) < len(moved):
            return None
        pending, seen = list(node.outputs[:1]), set(node.outputs[:1])
        while pending:
            tensor = pending.pop()
            for reader in tensor.outputs:
                if reader.op == "DequantizeLinear" and reader.inputs[0] is tensor:
                    return QuantizedValue.by(reader, moved[0])
                if any(reader.inputs[index] is tensor for index in _moved_inputs(reader)):
                    pending.extend(tensor for tensor in reader.outputs if tensor not in seen)
                    seen.update(reader.outputs)
        return None

    def _zero_point(self, encoded: QuantizedValue, quantized: Variable) -> Tensor:
        """Return the zero point, which also determines the type; a missing one becomes 0."""
        zero = np.zeros((), quantized.dtype or np.uint8)
        return encoded.zero_point or self.names.store(f"{quantized.name}.zero_point", zero)

    def _put(self, node: Node, nodes: Sequence[Node]) -> None:
        self.behind[node].extend(nodes)
        self.owner.update(dict.fromkeys(nodes, self.owner[node]))

    def _drop(self, node: Node) -> None:
        self.gone.append(node)
        self.changed.append(node.name)


def _moved_inputs(node: Node) -> list[int]:
    """Return the inputs whose values a node moves unchanged to its outputs; empty for other nodes."""
    facts = facts_of(node)
    if node.domain or not (facts.moves or node.op in _MOVING):
        return []
    if facts.data is None:
        return list(range(len(node.inputs)))
    filling = node.op == "Pad" and node.attrs.get("mode", "constant") == "constant"
    return [0, 2] if filling and optional_input(node, 2) is not None else [0]


# --- clamps and sums ------------------------------------------------------------------------------------------------

_FLOATS: Final = frozenset({"float16", "float32", "float64"})


class RestoreOperators(RewriteRule):
    """``Min(Max(x, a), b) -> Clip(x, a, b)``.

    Turn Max and Min with one number into Relu or Clip, and a Sum of two tensors into Add; drop a Sum of one. Quantized
    models use Max, Min and Sum where Relu, Clip and Add would prevent a runtime's kernels. Quantizers of the float
    model only know Relu, Clip and Add. Skips Max and Min of tensors or integers, and all of them below opset 11.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, low, high = op.any("x"), op.scalar("low"), op.scalar("high")
        # A Max is replaced before the Min behind it is visited.
        raised = op.Clip(x, low), op.Relu(x)
        clamps = (*(op.Min(limited, high) for limited in raised), op.Max(x, low), op.Min(x, high))
        return (*clamps, op.Sum(x, op.any("y")), op.Sum(x))

    def check(self, match: Match) -> str:
        if match.root.op == "Sum":
            return ""
        if match.opset < _CLIP_HAS_INPUTS:
            return "the limits of a Clip are attributes at this opset"
        limits = [match.values[name] for name in ("low", "high") if name in match.values]
        numbers = all(not limit.shape and limit.dtype.name in _FLOATS for limit in limits)
        return "" if numbers and not isinstance(match.x, Constant) else "its limit or data is no float number"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if match.root.op == "Sum":
            if "y" in match.values:
                return new.Add(match.x, match.y)
            return new.Identity(match.x) if match.root.outputs[0].graph_output_of else match.x
        if match.root.op == "Max":
            return new.Clip(match.x, match.low) if match.low.values.any() else new.Relu(match.x)
        return new.Clip(match.x, match.values.get("low", 0.0 if len(match.nodes) > 1 else None), match.high)
