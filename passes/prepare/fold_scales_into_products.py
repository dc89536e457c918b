"""Fold numbers that scale what was multiplied before into the weight of that product."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.ir import Constant, Graph, Names, Node, Variable, remove_nodes, replace_uses, scopes
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.soundness import Uses, stays_in_range, stored

_LAYOUT = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_FARTHEST = 16
# Before, operands lay along an axis.
_BROADCASTS = 7


class FoldScalesIntoProducts(Pass):
    """Fold a Mul or Div by one number into the weight and bias of the product in front of it.

    A number passes through whatever moves values, through the Add of a bias and through products of two tensors, as
    the scale of an attention does on its way from the scores to the query. Each tensor on the way must have one reader,
    and the weight, a floating-point constant, none but the product. Leaves a weight that may be a table which is looked
    up, numbers by which values may leave the range of their type, and those whose last bit may decide something. Works
    in the main graph and in bodies; linear, since ways end after 16 nodes.
    """

    def apply(self, graph: Graph) -> Changes:
        """Fold; ``changed`` holds the names of the scaling nodes that are gone."""
        names, uses = Names(graph), Uses(graph)
        changed: list[str] = []
        for scope in scopes(graph) if graph.opset >= _BROADCASTS else ():
            inside, folded = set(scope.nodes), []
            for node in scope.nodes:
                if node.op not in ("Mul", "Div") or node.domain or (len(node.inputs), len(node.outputs)) != (2, 1):
                    continue
                scaled = _scaled(node)
                terms = _terms(scaled[0], inside, _FARTHEST) if scaled is not None else None
                if scaled is None or terms is None or uses.decides(node.outputs):
                    continue
                if any(uses.is_like_a_table(one.inputs[index]) for one, index in terms):
                    continue
                if not _fold(terms, scaled[1], names):
                    continue
                # At once, for the next node on the way looks at who reads.
                node.inputs.clear()
                replace_uses(node.outputs[0], scaled[0])
                folded.append(node)
                changed.append(node.name)
            remove_nodes(scope, folded)
        return Changes(tuple(changed))


def _scaled(node: Node) -> tuple[Variable, float] | None:
    """Return what a node scales and by which number, where its result has the shape of that and is inner."""
    data, number = node.inputs
    if node.op == "Mul" and isinstance(data, Constant):
        data, number = number, data
    if not isinstance(data, Variable) or not _is_weight(number) or node.outputs[0].returned_by:
        return None
    if any(extent != 1 for extent in number.shape) or len(number.shape) > len(data.shape or ()):
        return None
    value = float(number.values.item())
    if not math.isfinite(value) or value == 0 or not stays_in_range(value, number.dtype):
        return None
    return data, value if node.op == "Mul" else 1 / value


def _terms(tensor: Any, inside: set[Node], farthest: int) -> list[tuple[Node, int]] | None:
    """Return the node and index of each constant to scale for a tensor to be scaled, or None."""
    producer = tensor.inputs[0] if isinstance(tensor, Variable) and tensor.inputs else None
    if producer not in inside or producer.domain or len(tensor.outputs) != 1 or tensor.returned_by or not farthest:
        return None
    if producer.op in _LAYOUT and producer.inputs:
        return _terms(producer.inputs[0], inside, farthest - 1)
    if producer.op == "Add" and len(producer.inputs) == 2:
        for index in (0, 1):
            bias, source = producer.inputs[index], producer.inputs[1 - index]
            if _is_weight(bias):
                terms = _terms(source, inside, farthest - 1)
                return None if terms is None else [*terms, (producer, index)]
        return None
    if producer.op in _PRODUCTS and len(producer.inputs) > 1:
        return _product_terms(producer, inside, farthest)
    return None


def _product_terms(product: Node, inside: set[Node], farthest: int) -> list[tuple[Node, int]] | None:
    for index in (1, 0):
        weight = product.inputs[index]
        if _is_weight(weight):
            constants = [index, *([2] if len(product.inputs) > 2 and product.inputs[2].name else [])]
            alone = len(weight.outputs) == 1 and all(_is_weight(product.inputs[index]) for index in constants)
            return [(product, index) for index in constants] if alone else None
    if product.op == "MatMul":
        for source in product.inputs:
            if (terms := _terms(source, inside, farthest // 2)) is not None:
                return terms
    return None


def _is_weight(tensor: Any) -> bool:
    return isinstance(tensor, Constant) and tensor.input_source is None and tensor.dtype.kind == "f"


def _fold(terms: list[tuple[Node, int]], factor: float, names: Names) -> bool:
    """Scale the constants, unless one would leave the range of its type."""
    scaled: list[npt.NDArray[Any]] = []
    for node, index in terms:
        before = node.inputs[index].values.astype(np.float64)
        after = stored(before * factor, node.inputs[index].dtype, before)
        if after is None:
            return False
        scaled.append(after)
    for (node, index), values in zip(terms, scaled, strict=True):
        node.inputs[index] = Constant(names.fresh(f"{node.inputs[index].name}.scaled"), values)
    return True
