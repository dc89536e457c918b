"""Replace operators that compute with codes by the float operators that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

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
    constant,
    optional_input,
    replace_nodes,
)
from onnxq.ops import INTEGER_OPERATORS, IntegerOperator, check_inputs, operator_of
from onnxq.passes.dequantize.decoding import dequantized, value_name
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import Array, computed, dequantize_linear

_ADDS_A_BIAS: Final = frozenset({"Conv", "ConvTranspose", "Gemm"})
_AXES_ARE_INPUTS: Final = {"ReduceMean": 18}
_SOFTMAX_TAKES_AN_AXIS: Final = 13
_LSTM_INPUTS: Final = 8


class ReplaceIntegerOperators(Pass):
    """Replace the nodes of INTEGER_OPERATORS, and DynamicQuantizeLSTM, by float ones.

    A constant operand becomes the float weight that its codes stand for; any other is read through DequantizeLinear,
    and what comes out passes through QuantizeLinear where it is codes. Works in every graph of the model.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes.

        Raises:
            ModelError: a node says what its codes mean in a way that is not known; the message names it.
        """
        replacing = _Replacing(Names(graph), graph.opset)
        instead: dict[Node, Sequence[Node]] = {}
        for _, node in all_nodes(graph):
            row = INTEGER_OPERATORS.get(node.op)
            if row is not None:
                instead[node] = replacing.float_nodes(node, row)
            elif node.op == "DynamicQuantizeLSTM":
                instead[node] = [replacing.recurrent(node)]
        replace_nodes(graph, instead)
        return Changes(tuple(node.name for node in instead))


@dataclass(eq=False)
class _Replacing:
    """Makes float nodes; weights that several nodes share are decoded once."""

    names: Names
    opset: int
    weights: dict[tuple[object, ...], Constant] = field(default_factory=dict)

    def float_nodes(self, node: Node, row: IntegerOperator) -> list[Node]:
        """Return the nodes that compute what ``node`` stands for, whose outputs they take over."""
        triples = _triples(node, row)
        check_inputs(node, [*row.first, *(index for triple in triples for index in triple[:2])])
        attributes = self._attributes(node, row)
        nodes: list[Node] = []
        inputs = self._inputs(node, row, triples, attributes, nodes)
        bias = self._bias(node, row, triples)
        if bias is not None and row.float_op in _ADDS_A_BIAS:
            inputs.append(bias)
        name = self.names.unique(f"{node.name}.float")
        nodes.append(Node(row.float_op, name, attributes, inputs, domain=row.domain))
        output, shape = node.outputs[0].name, node.outputs[0].shape
        if bias is not None and row.float_op not in _ADDS_A_BIAS:
            self._then(
                nodes, "Add", f"{node.name}.bias", Variable(self.names.unique(f"{output}.product"), shape=shape), bias
            )
        scale = optional_input(node, row.result[0]) if row.result is not None else None
        if row.result is not None and scale is not None:
            parameters: list[Tensor] = [scale]
            parameters += filter(None, [optional_input(node, row.result[1])])
            values = Variable(value_name(output, self.names), shape=shape)
            self._then(nodes, "QuantizeLinear", f"{node.name}.quantize", values, *parameters)
        outputs = list(node.outputs)
        node.outputs.clear()
        nodes[-1].outputs.extend(outputs)
        return nodes

    def _then(self, nodes: list[Node], op: str, name: str, values: Variable, *others: Tensor) -> None:
        """Append a node that reads what the last one makes."""
        values.dtype = others[0].dtype
        nodes[-1].outputs.append(values)
        nodes.append(Node(op, self.names.unique(name), {}, [values, *others]))

    def _inputs(
        self,
        node: Node,
        row: IntegerOperator,
        triples: Sequence[tuple[int, int, int]],
        attributes: dict[str, object],
        nodes: list[Node],
    ) -> list[Tensor]:
        """Return what the float node reads, its bias aside; what decodes it is appended to ``all_nodes``."""
        probe = Node(row.float_op, attrs=attributes, domain=row.domain)
        inputs = [node.inputs[index] for index in row.first]
        inputs += [
            self._operand(node, probe, place, triple, nodes) for place, triple in enumerate(triples, len(inputs))
        ]
        inputs += [optional_input(node, index) or Variable("") for index in row.last]
        while not inputs[-1].name:
            inputs.pop()
        if "axes" in attributes and self.opset >= _AXES_ARE_INPUTS.get(row.float_op, self.opset + 1):
            axes = np.array(attributes.pop("axes"), np.int64)
            inputs.append(constant(self.names.unique(f"{node.name}.axes"), axes))
        return inputs

    def _attributes(self, node: Node, row: IntegerOperator) -> dict[str, object]:
        """Return the attributes of the float node."""
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

    def _operand(self, node: Node, probe: Node, place: int, triple: tuple[int, int, int], nodes: list[Node]) -> Tensor:
        """Return the floats of an operand: decoded where it is constant, else behind a DequantizeLinear."""
        codes, scale = node.inputs[triple[0]], node.inputs[triple[1]]
        zero_point = optional_input(node, triple[2])
        if isinstance(codes, Constant):
            known = operator_of(probe)
            axis = known.weights[place].channels(probe) if known is not None and place in known.weights else -1
            return self._weight(node, codes, scale, zero_point, axis)
        values = Variable(self.names.unique(f"{codes.name}.dequantized"))
        inputs = [codes, scale, *filter(None, [zero_point])]
        nodes.append(Node("DequantizeLinear", self.names.unique(f"{node.name}.dequantize"), {}, inputs, [values]))
        return values

    def _weight(self, node: Node, codes: Constant, scale: Tensor, zero_point: Tensor | None, axis: int) -> Constant:
        key = codes, scale, zero_point, axis
        if key not in self.weights:
            zero = zero_point and _payload(node, zero_point)
            tensor_data = dequantized(codes.tensor_data, _payload(node, scale), zero, axis % max(1, len(codes.shape)))
            self.weights[key] = self._constant(codes, tensor_data)
        return self.weights[key]

    def _bias(self, node: Node, row: IntegerOperator, triples: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """Return the bias as floats: its codes count in the product of the operands' scales."""
        bias = optional_input(node, row.bias) if row.bias is not None else None
        if not isinstance(bias, Constant) or bias.dtype.kind != "i":
            return bias
        scales = [np.asarray(_payload(node, node.inputs[triple[1]]).load(), np.float32) for triple in triples]
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

    def recurrent(self, node: Node) -> Node:
        """Return the LSTM that a DynamicQuantizeLSTM stands for; its weights lie transposed."""
        check_inputs(node, (0, 1, 2, *range(_LSTM_INPUTS, _LSTM_INPUTS + 4)))
        inputs = list(node.inputs[:_LSTM_INPUTS])
        for index, scale in ((1, _LSTM_INPUTS), (2, _LSTM_INPUTS + 2)):
            tensors = node.inputs[index], *node.inputs[scale : scale + 2]
            key = node.op, *tensors
            if key not in self.weights:
                parts = [_payload(node, tensor) for tensor in tensors]
                self.weights[key] = self._constant(tensors[0], computed(partial(_transposed, *parts)))
            inputs[index] = self.weights[key]
        while not inputs[-1].name:
            inputs.pop()
        outputs = list(node.outputs)
        node.outputs.clear()
        return Node("LSTM", self.names.unique(f"{node.name}.float"), dict(node.attrs), inputs, outputs)

    def _constant(self, codes: Tensor, tensor_data: TensorData) -> Constant:
        return Constant(value_name(codes.name, self.names), tensor_data)


def _triples(node: Node, row: IntegerOperator) -> tuple[tuple[int, int, int], ...]:
    """Return the input indices of codes, scale and zero point of each operand."""
    if not row.repeats:
        return row.operands
    return tuple((index, index + 1, index + 2) for index in range(row.operands[0][0], len(node.inputs), 3))


def _transposed(codes: TensorData, scale: TensorData, zero_point: TensorData) -> Array:
    """Return [directions, gates, size] weights of an LSTM from [directions, size, gates] codes.

    There is one scale for each direction, or one for each direction and gate.
    """
    scales, zero_points = (values.load().reshape(values.shape[0], 1, -1) for values in (scale, zero_point))
    return np.ascontiguousarray(dequantize_linear(codes.load(), scales, zero_points).transpose(0, 2, 1))


def _payload(node: Node, tensor: Tensor) -> TensorData:
    if not isinstance(tensor, Constant):
        raise ModelError(
            f"node {node.name} ({node.op}) reads {tensor.name}, which is computed, expected a constant; "
            "its codes have no float meaning that is known beforehand"
        )
    return tensor.tensor_data
