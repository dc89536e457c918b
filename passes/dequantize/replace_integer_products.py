"""Replace integer products that are scaled back to floats by products of floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from onnxq.dequantizing.coded import same_parameter
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
    only_reader,
    optional,
    remove_unused,
    scopes,
)
from onnxq.operators import OPERATORS, operator_of

_FLOAT_OP: Final = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_QUANTIZERS: Final = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
_OPERANDS = 2
_ROUNDING: Final = frozenset({"Cast", "Ceil", "Floor", "Reshape", "Round", "Unsqueeze"})


class ReplaceIntegerProducts(Pass):
    """Replace MatMulInteger and ConvInteger, and the Cast and Mul that scale what they give, by MatMul and Conv.

    The factors of the scale are those of the operands: what a quantizer measured, and a constant, which with the
    constant codes makes the float weight. A bias that was divided by the scale, rounded and added to the integers is
    added as it was. Other operands are read through DequantizeLinear. Removes what nothing reads any longer.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes.

        Raises:
            ModelError: a product is not scaled back in this way; the message names the node.
        """
        products = _Products(Names(graph))
        changed = []
        for scope in scopes(graph):
            behind: dict[Node, Sequence[Node]] = {}
            for node in scope.nodes:
                if node.op in _FLOAT_OP and not node.domain:
                    last, nodes = products.float_nodes(node)
                    behind[last] = nodes
                    changed.append(node.name)
            insert_nodes(scope, after=behind)
        if changed:
            remove_unused(graph)
        return Changes(tuple(changed))


@dataclass(eq=False)
class _Scaled:
    """A product on its way back to floats.

    Attributes:
        factors: what it is multiplied by, broken down.
        bias: integers that are added before, or None.
        last: the node that makes it floats of the right size.
    """

    factors: list[Tensor]
    bias: Tensor | None
    last: Node


@dataclass(eq=False)
class _Products:
    names: Names
    weights: dict[tuple[Tensor | None, ...], Constant] = field(default_factory=dict)

    def float_nodes(self, node: Node) -> tuple[Node, list[Node]]:
        """Return the node that gave the scaled product, and the nodes that make it instead."""
        scaled = _scaled(node)
        op = _FLOAT_OP[node.op]
        nodes: list[Node] = []
        factors = list(scaled.factors)
        inputs: list[Tensor] = [Variable(""), Variable("")]
        for index in (0, 1):
            codes, zero_point = node.inputs[index], optional(node, index + 2)
            if isinstance(codes, Constant):
                continue
            scale = _measured_scale(codes)
            found = next((factor for factor in factors if scale is not None and same_parameter(factor, scale)), None)
            if scale is None or found is None:
                raise _not_scaled(node, f"the scale of {codes.name} is not among its factors")
            factors.remove(found)
            inputs[index] = Variable(self.names.fresh(f"{codes.name}.dequantized"))
            read = [codes, scale, *filter(None, [zero_point])]
            name = self.names.fresh(f"{node.name}.dequantize")
            nodes.append(Node("DequantizeLinear", name, {}, read, [inputs[index]]))
        for index in (0, 1):
            if isinstance(node.inputs[index], Constant):
                inputs[index] = self._weight(node, index, factors)
                factors = []
        if factors:
            raise _not_scaled(node, f"{factors[0].name} is not the scale of one of its operands")
        return scaled.last, [*nodes, *self._product(node, op, inputs, scaled)]

    def _product(self, node: Node, op: str, inputs: list[Tensor], scaled: _Scaled) -> list[Node]:
        output = scaled.last.outputs[0]
        scaled.last.outputs[0] = Variable("")
        bias = None if scaled.bias is None else _float_bias(node, scaled.bias)
        name = self.names.fresh(f"{node.name}.float")
        if bias is None or (op == "Conv" and isinstance(bias, Constant) and len(bias.shape) == 1):
            return [Node(op, name, dict(node.attrs), [*inputs, *filter(None, [bias])], [output])]
        product = Variable(self.names.fresh(f"{output.name}.product"))
        return [
            Node(op, name, dict(node.attrs), inputs, [product]),
            Node("Add", self.names.fresh(f"{node.name}.bias"), {}, [product, bias], [output]),
        ]

    def _weight(self, node: Node, index: int, factors: Sequence[Tensor]) -> Constant:
        """Return the float weight: constant codes times the factors that are no other operand's scale."""
        codes, zero_point = node.inputs[index], optional(node, index + 2)
        stored = [factor for factor in factors if isinstance(factor, Constant)]
        if len(stored) < len(factors) or not isinstance(zero_point, Constant | None):
            raise _not_scaled(node, "the scale or the zero point of its weight is computed")
        axis = OPERATORS["", _FLOAT_OP[node.op]].weights[index].channels(node) % max(1, len(codes.shape))
        key = axis, codes, zero_point, *stored
        if key not in self.weights:
            scale = np.ones((), np.float32)
            for factor in stored:
                scale = scale * factor.values
            extent = codes.shape[axis] if codes.shape else 1
            if scale.size not in (1, extent):
                raise _not_scaled(node, f"its weight has {scale.size} scales, expected 1 or {extent}")
            flat = constant("", np.asarray(scale, np.float32).reshape(-1))
            zero = zero_point and zero_point.payload
            payload = dequantized(codes.payload, flat.payload, zero, axis)
            self.weights[key] = Constant(value_name(codes.name, self.names), payload)
        return self.weights[key]


def _scaled(node: Node) -> _Scaled:
    """Follow a product to where it has the size of floats: [Add] -> Cast -> Mul [-> Mul]."""
    bias = None
    current = only_reader(node.outputs[0])
    if current is not None and current.op == "Add":
        bias = next(tensor for tensor in current.inputs if tensor is not node.outputs[0])
        current = only_reader(current.outputs[0])
    if current is None or current.op != "Cast":
        raise _not_scaled(node, "no Cast to floats is what alone reads it")
    measured = [_measured_scale(tensor) for tensor in node.inputs[:2] if not isinstance(tensor, Constant)]
    factors: list[Tensor] = []
    last = current
    while len(factors) < _OPERANDS or not all(any(same_parameter(one, scale) for one in factors) for scale in measured):
        reader = only_reader(last.outputs[0])
        if reader is None or reader.op != "Mul":
            break
        factors.extend(_factors(next(tensor for tensor in reader.inputs if tensor is not last.outputs[0])))
        last = reader
    if last is current:
        raise _not_scaled(node, "no Mul with a scale is what alone reads its Cast")
    return _Scaled(factors, bias, last)


def _factors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors whose product a tensor is."""
    found, pending = [], [tensor]
    while pending:
        one = pending.pop()
        if one.inputs and one.inputs[0].op == "Mul":
            pending.extend(one.inputs[0].inputs)
        else:
            found.append(one)
    return found


def _measured_scale(codes: Tensor) -> Tensor | None:
    """Return the scale of the quantizer that codes come from, through nodes that only move them."""
    while codes.inputs:
        maker = codes.inputs[0]
        if maker.op in _QUANTIZERS:
            scale: Tensor = maker.outputs[1] if maker.op == "DynamicQuantizeLinear" else maker.inputs[1]
            return scale
        operator = operator_of(maker)
        if operator is None or not operator.moves:
            return None
        codes = maker.inputs[0]
    return None


def _float_bias(node: Node, bias: Tensor) -> Tensor:
    """Return what was divided by the scale and rounded to the integers that are added."""
    while bias.inputs:
        maker = bias.inputs[0]
        if maker.op == "Div":
            divided: Tensor = maker.inputs[0]
            return divided
        if maker.op not in _ROUNDING:
            break
        bias = maker.inputs[0]
    raise _not_scaled(node, f"{bias.name} is added to it, expected a bias divided by the scale")


def _not_scaled(node: Node, reason: str) -> ModelError:
    return ModelError(
        f"node {node.name} ({node.op}) gives integers that have no float meaning known to onnxq: {reason}; "
        "dequantize the model that it was optimised from"
    )
