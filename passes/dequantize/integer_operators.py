"""Replace operators that compute with quantized values by the float operators they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Tensor,
    TensorData,
    Variable,
    all_nodes,
    constant,
    insert_nodes,
    optional_input,
    remove_unused,
    replace_nodes,
    sole_consumer,
    without_absent,
)
from onnxq.ir.computed_data import computed
from onnxq.numerics.affine import Array, dequantize_linear
from onnxq.ops import INTEGER_OPERATORS, OPERATORS, QUANTIZERS, IntegerOperator, check_inputs, facts_of
from onnxq.passes.dequantize.quantized_values import dequantized, same_parameter, stored_data, value_name
from onnxq.rewrite import Changes, Pass

_AXES_ARE_INPUTS: Final = {"ReduceMean": 18}
_SOFTMAX_TAKES_AN_AXIS: Final = 13
_LSTM_INPUTS: Final = 8


class ReplaceIntegerOperators(Pass):
    """Replace the nodes of `INTEGER_OPERATORS`, and DynamicQuantizeLSTM, by float operators.

    A constant operand becomes its dequantized float weight. Other operands are read through DequantizeLinear, and a
    quantized result passes through QuantizeLinear. Works in every graph of the model.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace the operators.

        Raises:
            ModelError: the scale or layout of a node is not supported; the message names the node.
        """
        replacing = _Replacing(Names(graph), graph.opset)
        instead: dict[Node, Sequence[Node]] = {}
        for _, node in all_nodes(graph):
            row = INTEGER_OPERATORS.get(node.op)
            if row is not None:
                instead[node] = replacing.float_nodes(node, row)
            elif node.op == "DynamicQuantizeLSTM":
                instead[node] = replacing.recurrent(node)
        replace_nodes(graph, instead)
        return Changes(tuple(node.name for node in instead))


@dataclass(eq=False)
class _Replacing:
    """Makes float nodes; a shared weight is dequantized once."""

    names: Names
    opset: int
    weights: dict[tuple[object, ...], Constant] = field(default_factory=dict)

    def float_nodes(self, node: Node, row: IntegerOperator) -> list[Node]:
        triples = _triples(node, row)
        check_inputs(node, [*row.first, *(index for triple in triples for index in triple[:2])])
        attributes = self._attributes(node, row)
        new, output = NodeBuilder(node.name, self.names), node.outputs[0]
        inputs = self._inputs(node, row, triples, attributes, new)
        bias = self._bias(node, row, triples)
        if bias is not None and OPERATORS[row.domain, row.float_op].adds_bias:
            inputs, bias = [*inputs, bias], None
        scale = optional_input(node, row.result[0]) if row.result is not None else None
        product = values = Variable("")
        if scale is not None:
            product = values = Variable(value_name(output.name, self.names), scale.dtype, output.shape)
        if bias is not None:
            product = new.named_after(output.name).variable("product", bias.dtype, output.shape)
        new.node(row.float_op, "float", inputs, product, domain=row.domain, **attributes)
        if bias is not None:
            new.node("Add", "bias", [product, bias], values)
        if row.result is not None and scale is not None:
            zero = optional_input(node, row.result[1])
            read = [values, scale] if zero is None else [values, scale, zero]
            new.node("QuantizeLinear", "quantize", read, Variable(""))
        return new.instead_of(node)

    def _inputs(
        self,
        node: Node,
        row: IntegerOperator,
        triples: Sequence[tuple[int, int, int]],
        attributes: dict[str, Any],
        new: NodeBuilder,
    ) -> list[Tensor]:
        probe = Node(row.float_op, attrs=attributes, domain=row.domain)
        inputs = [node.inputs[index] for index in row.first]
        inputs += [self._operand(node, probe, place, triple, new) for place, triple in enumerate(triples, len(inputs))]
        inputs += [optional_input(node, index) or Variable("") for index in row.last]
        inputs = without_absent(inputs)
        if "axes" in attributes and self.opset >= _AXES_ARE_INPUTS.get(row.float_op, self.opset + 1):
            inputs.append(new.store("axes", np.array(attributes.pop("axes"), np.int64)))
        return inputs

    def _attributes(self, node: Node, row: IntegerOperator) -> dict[str, Any]:
        if node.attrs.get("channels_last", 0):
            raise ModelError(
                f"node {node.name} ({node.op}) has its channels last, expected first; "
                "dequantize the model from before it was optimised"
            )
        written = int(node.attrs.get("opset", self.opset))
        sides = [version >= _SOFTMAX_TAKES_AN_AXIS for version in (written, self.opset)]
        if node.op == "QLinearSoftmax" and sides[0] != sides[1] and node.attrs.get("axis") != -1:
            raise ModelError(
                f"node {node.name} ({node.op}) follows opset {written}, expected that of the model, {self.opset}; "
                "quantize a model of one opset"
            )
        return {key: value for key, value in node.attrs.items() if key not in row.dropped}

    def _operand(self, node: Node, probe: Node, place: int, triple: tuple[int, int, int], new: NodeBuilder) -> Tensor:
        """Return an operand in float: dequantized if constant, otherwise behind a DequantizeLinear."""
        quantized, scale = node.inputs[triple[0]], node.inputs[triple[1]]
        zero_point = optional_input(node, triple[2])
        if isinstance(quantized, Constant):
            axes = facts_of(probe).weights.get(place)
            axis = -1 if axes is None else axes.channels(probe)
            return self._weight(node, quantized, scale, zero_point, axis)
        inputs = [quantized, scale, *filter(None, [zero_point])]
        values = new.named_after(quantized.name).variable("dequantized")
        return new.node("DequantizeLinear", "dequantize", inputs, values)

    def _weight(self, node: Node, quantized: Constant, scale: Tensor, zero_point: Tensor | None, axis: int) -> Constant:
        key = quantized, scale, zero_point, axis
        if key not in self.weights:
            zero = zero_point and stored_data(node, zero_point)
            tensor_data = dequantized(
                quantized.tensor_data, stored_data(node, scale), zero, axis % max(1, len(quantized.shape))
            )
            self.weights[key] = self._constant(quantized, tensor_data)
        return self.weights[key]

    def _bias(self, node: Node, row: IntegerOperator, triples: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """Return the float bias; its scale is the product of the operands' scales."""
        bias = optional_input(node, row.bias) if row.bias is not None else None
        if not isinstance(bias, Constant) or bias.dtype.kind != "i":
            return bias
        scales = [np.asarray(stored_data(node, node.inputs[triple[1]]).load(), np.float32) for triple in triples]
        product: Array = np.array(node.attrs.get("alpha", 1), np.float32)
        for scale in scales:
            if 1 not in (scale.size, product.size):
                raise ModelError(
                    f"node {node.name} ({node.op}) has scales of {[scale.size for scale in scales]} numbers, expected "
                    "one number for all operands but one; the model is damaged, export it again"
                )
            product = np.multiply(product, scale.reshape(-1))
        flat = constant("", product.reshape(-1))
        return self._constant(bias, dequantized(bias.tensor_data, flat.tensor_data, None, len(bias.shape) - 1))

    def recurrent(self, node: Node) -> list[Node]:
        """Return the LSTM of a DynamicQuantizeLSTM, whose weights are transposed."""
        check_inputs(node, (0, 1, 2, *range(_LSTM_INPUTS, _LSTM_INPUTS + 4)))
        inputs = list(node.inputs[:_LSTM_INPUTS])
        for index, scale in ((1, _LSTM_INPUTS), (2, _LSTM_INPUTS + 2)):
            tensors = node.inputs[index], *node.inputs[scale : scale + 2]
            key = node.op, *tensors
            if key not in self.weights:
                parts = [stored_data(node, tensor) for tensor in tensors]
                self.weights[key] = self._constant(tensors[0], computed(partial(_transposed, *parts)))
            inputs[index] = self.weights[key]
        inputs = without_absent(inputs)
        new = NodeBuilder(node.name, self.names)
        new.node("LSTM", "float", inputs, Variable(""), **node.attrs)
        return new.instead_of(node)

    def _constant(self, quantized: Tensor, tensor_data: TensorData) -> Constant:
        return Constant(value_name(quantized.name, self.names), tensor_data)


def _triples(node: Node, row: IntegerOperator) -> tuple[tuple[int, int, int], ...]:
    """Return the input indices of value, scale and zero point of each operand."""
    if not row.repeats:
        return row.operands
    return tuple((index, index + 1, index + 2) for index in range(row.operands[0][0], len(node.inputs), 3))


def _transposed(quantized: TensorData, scale: TensorData, zero_point: TensorData) -> Array:
    """Return [directions, gates, size] weights of an LSTM from [directions, size, gates] integers.

    There is one scale for each direction, or one for each direction and gate.
    """
    scales, zero_points = (values.load().reshape(values.shape[0], 1, -1) for values in (scale, zero_point))
    return np.ascontiguousarray(dequantize_linear(quantized.load(), scales, zero_points).transpose(0, 2, 1))


# --- MatMulInteger and ConvInteger ----------------------------------------------------------------------------------

_FLOAT_OP: Final = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_OPERANDS = 2
_ROUNDING: Final = frozenset({"Cast", "Ceil", "Floor", "Round"})
_SHAPING: Final = frozenset({"Reshape", "Unsqueeze"})


class ReplaceIntegerProducts(Pass):
    """Replace MatMulInteger and ConvInteger, with the Cast and Mul that scale their results, by MatMul and Conv.

    The Mul's factors are the operands' scales: dynamic ones from a quantizer, or constants. Constant factors go into
    the float weight. Other factors are multiplied behind the result. A bias that was divided by the scale, rounded and
    added to the integers is added in float. Operands that are not constant are read through DequantizeLinear. If a
    result is not scaled, its integers are computed in float and rounded. Removes nodes that are no longer read.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace the operators.

        Raises:
            ModelError: the dynamic scale of an operand is missing among the factors, or a computed operand has several
                zero points. The message names the node.
        """
        products = _Products(Names(graph))
        replaced = [node for _, node in all_nodes(graph) if node.op in _FLOAT_OP and not node.domain]
        insert_nodes(graph, after=dict(map(products.float_nodes, replaced)))
        if replaced:
            remove_unused(graph)
        return Changes(tuple(node.name for node in replaced))


@dataclass(eq=False)
class _Scaled:
    """An integer result and the nodes that scale it to floats.

    Attributes:
        last: the last of these nodes, or the integer node itself if there are none.
        factors: the factors of the result.
        bias: float bias that is added behind the factors, or None.
        by_channel: whether the bias has one number for each channel of a convolution.
    """

    last: Node
    factors: list[Tensor] = field(default_factory=list)
    bias: Tensor | None = None
    by_channel: bool = False


@dataclass(eq=False)
class _Products:
    names: Names
    weights: dict[tuple[Tensor | None, ...], Constant] = field(default_factory=dict)

    def float_nodes(self, node: Node) -> tuple[Node, list[Node]]:
        """Return the node that produced the scaled result, and the float nodes that replace it."""
        scaled = _scaled(node) or _Scaled(node)
        op, factors, new = _FLOAT_OP[node.op], list(scaled.factors), NodeBuilder(node.name, self.names)
        inputs: list[Tensor] = [Variable(""), Variable("")]
        stored = [index for index in OPERATORS["", op].weights if isinstance(node.inputs[index], Constant)]
        for index in (0, 1):
            if index not in stored:
                inputs[index] = self._operand(node, index, factors, new)
        for index in stored:
            own = [factor for factor in factors if _is_of_channels(factor, node, index)]
            factors = [factor for factor in factors if factor not in own]
            inputs[index] = self._weight(node, index, own)
        output = scaled.last.outputs[0]
        scaled.last.outputs[0] = Variable("")
        if scaled.by_channel and not factors and scaled.bias is not None:
            inputs.append(scaled.bias)
        chain: list[tuple[str, str, Sequence[Tensor], dict[str, Any]]] = [(op, "float", inputs, dict(node.attrs))]
        chain += [("Mul", "factor", [factor], {}) for factor in factors]
        if scaled.bias is not None and scaled.bias not in inputs:
            chain.append(("Add", "bias", [scaled.bias], {}))
        if scaled.last is node:
            chain += [("Round", "round", [], {}), ("Cast", "integers", [], {"to": int(TensorProto.INT32)})]
        before: list[Tensor] = []
        for op_type, role, others, attributes in chain[:-1]:
            product = new.named_after(output.name).variable("product", np.float32, output.shape)
            before = [new.node(op_type, role, [*before, *others], product, **attributes)]
        op_type, role, others, attributes = chain[-1]
        new.node(op_type, role, [*before, *others], output, **attributes)
        return scaled.last, new.nodes

    def _operand(self, node: Node, index: int, factors: list[Tensor], new: NodeBuilder) -> Variable:
        """Return an operand behind a DequantizeLinear; its scale is removed from the factors."""
        quantized, zero_point = node.inputs[index], optional_input(node, index + 2)
        scale = _measured_scale(quantized) or _likely_scale(quantized, factors) or self._number(node, np.ones(()))
        measured = next((factor for factor in factors if same_parameter(factor, scale)), None)
        if measured is not None:
            factors.remove(measured)
        elif isinstance(scale, Constant) and scale.values.all():
            factors.append(self._number(node, 1 / scale.values))
        else:
            raise _not_read(node, f"the measured scale of {quantized.name} is not among its factors")
        if isinstance(scale, Constant) and scale.shape:
            scale = self._number(node, scale.values.reshape(()))
        if isinstance(zero_point, Constant) and zero_point.shape:
            if zero_point.values.size != 1:
                raise _not_read(node, f"{quantized.name} has {zero_point.values.size} zero points, expected one")
            zero_point = self.names.store(f"{node.name}.zero", zero_point.values.reshape(()))
        read = [quantized, scale, *filter(None, [zero_point])]
        values = new.named_after(quantized.name).variable("dequantized", np.float32, quantized.shape)
        return new.node("DequantizeLinear", "dequantize", read, values)

    def _number(self, node: Node, value: NDArray[Any]) -> Constant:
        return self.names.store(f"{node.name}.scale", np.asarray(value, np.float32))

    def _weight(self, node: Node, index: int, factors: Sequence[Tensor]) -> Constant:
        quantized, zero_point = node.inputs[index], optional_input(node, index + 2)
        if not isinstance(zero_point, Constant | None):
            raise _not_read(node, f"the zero point of {quantized.name} is computed, expected a constant")
        axis = _channels(node, index) % max(1, len(quantized.shape))
        key = axis, quantized, zero_point, *factors
        if key not in self.weights:
            scale = np.ones((), np.float32)
            for factor in factors:
                scale = scale * factor.values.reshape(-1)
            flat = constant("", np.asarray(scale, np.float32).reshape(-1))
            zero = zero_point and zero_point.tensor_data
            tensor_data = dequantized(quantized.tensor_data, flat.tensor_data, zero, axis)
            self.weights[key] = Constant(value_name(quantized.name, self.names), tensor_data)
        return self.weights[key]


def _channels(node: Node, index: int) -> int:
    return OPERATORS["", _FLOAT_OP[node.op]].weights[index].channels(node)


def _is_of_channels(factor: Tensor, node: Node, index: int) -> bool:
    """Whether a factor is a constant number, or has one number for each channel of a constant operand."""
    if not isinstance(factor, Constant):
        return False
    shape, weight = factor.shape, node.inputs[index].shape
    if len(shape) > max(1, len(weight)):
        return False
    size, axis = math.prod(shape), _channels(node, index)
    # The result of a convolution has channels on axis 1, the result of a matrix multiplication where the weight has
    # them.
    place = 1 - len(weight) if node.op == "ConvInteger" else axis
    return size == 1 or (len(weight) > 1 and size == weight[axis] and -place <= len(shape) and shape[place] == size)


def _scaled(node: Node) -> _Scaled | None:
    """Follow an integer result to its scaled float, [Add] -> Cast -> Mul [-> Mul]; None if it is not scaled."""
    bias = None
    current = sole_consumer(node.outputs[0])
    if current is not None and current.op == "Add":
        bias = next(tensor for tensor in current.inputs if tensor is not node.outputs[0])
        current = sole_consumer(current.outputs[0])
    if current is None or current.op != "Cast" or current.attrs.get("to") != TensorProto.FLOAT:
        return None
    measured = [_measured_scale(tensor) for tensor in node.inputs[:2] if not isinstance(tensor, Constant)]
    factors: list[Tensor] = []
    last = current
    while len(factors) < _OPERANDS or not all(
        any(same_parameter(factor, scale) for factor in factors) for scale in measured
    ):
        reader = sole_consumer(last.outputs[0])
        if reader is None or reader.op != "Mul":
            break
        factors.extend(_factors(next(tensor for tensor in reader.inputs if tensor is not last.outputs[0])))
        last = reader
    if last is current:
        return None
    return _Scaled(last, factors) if bias is None else _with_bias(_Scaled(last, factors), node, bias)


def _factors(tensor: Tensor) -> list[Tensor]:
    factors, pending = [], [tensor]
    while pending:
        factor = pending.pop()
        if factor.inputs and factor.inputs[0].op == "Mul":
            pending.extend(factor.inputs[0].inputs)
        else:
            factors.append(factor)
    return factors


def _measured_scale(quantized: Tensor) -> Tensor | None:
    """Return the scale of the quantizers behind a tensor, through nodes that only move values."""
    scales: list[Tensor] = []
    pending, seen = [quantized], {quantized}
    while pending:
        maker = next(iter(pending.pop().inputs), None)
        if maker is None:
            return None
        if maker.op in QUANTIZERS:
            scales.append(maker.outputs[1] if maker.op == "DynamicQuantizeLinear" else maker.inputs[1])
            continue
        facts = facts_of(maker)
        if not facts.moves:
            return None
        moved = maker.inputs if facts.data is None else [maker.inputs[index] for index in facts.data]
        pending.extend(tensor for tensor in moved if tensor not in seen)
        seen.update(moved)
    first = scales[0]
    single = not isinstance(first, Constant) or math.prod(first.shape) == 1
    return first if single and all(same_parameter(first, scale) for scale in scales) else None


def _likely_scale(quantized: Tensor, factors: Sequence[Tensor]) -> Constant | None:
    """Return a factor that may be the scale of a tensor without a quantizer: another reader's scale, or any number."""
    numbers = [factor for factor in factors if isinstance(factor, Constant) and math.prod(factor.shape) == 1]
    decoders = [node for node in quantized.outputs if node.op == "DequantizeLinear" and node.inputs[0] is quantized]
    shared = (number for number in numbers for node in decoders if same_parameter(number, node.inputs[1]))
    return next(shared, None) or next(iter(numbers), None)


def _with_bias(scaled: _Scaled, node: Node, added: Tensor) -> _Scaled | None:
    """Return the result with the float bias whose quantized form is added to the integers."""
    tensor, shaped = added, False
    while tensor.inputs:
        maker = tensor.inputs[0]
        if maker.op == "Div":
            if not _are_same(scaled.factors, _factors(maker.inputs[1])):
                return None
            bias = maker.inputs[0]
            by_channel = node.op == "ConvInteger" and isinstance(bias, Constant) and _is_by_channel(added, bias)
            return replace(scaled, bias=bias, by_channel=by_channel) if by_channel or not shaped else None
        if maker.op not in _ROUNDING | _SHAPING:
            return None
        shaped = shaped or maker.op in _SHAPING
        tensor = maker.inputs[0]
    return None


def _is_by_channel(added: Tensor, bias: Constant) -> bool:
    """Whether a vector is added along the second axis of a convolution's result."""
    sizes = list(added.shape or ())
    return len(bias.shape) == 1 and len(sizes) > 1 and sizes == [1, bias.shape[0], *(1,) * (len(sizes) - 2)]


def _are_same(left_factors: Sequence[Tensor], right_factors: Sequence[Tensor]) -> bool:
    remaining = list(right_factors)
    for factor in left_factors:
        equal = next((tensor for tensor in remaining if tensor is factor or _are_equal(factor, tensor)), None)
        if equal is None:
            return False
        remaining.remove(equal)
    return not remaining


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same constants along the same axes, counted from the last."""
    stored, extents = [], []
    for tensor in (left, right):
        sizes = list(tensor.shape or ())
        while sizes and sizes[0] == 1:
            sizes.pop(0)
        extents.append(sizes if tensor.shape is not None else None)
        while tensor.inputs and tensor.inputs[0].op in _SHAPING:
            tensor = tensor.inputs[0].inputs[0]
        stored.append(tensor)
    fixed = all(isinstance(tensor, Constant) for tensor in stored)
    return fixed and None not in extents and extents[0] == extents[1] and same_parameter(*stored)


def _not_read(node: Node, reason: str) -> ModelError:
    return ModelError(
        f"node {node.name} ({node.op}) gives integers that have no float meaning known to onnxq: {reason}; "
        "dequantize the model that it was optimised from"
    )
