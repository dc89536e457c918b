"""Transposes in front of what flattens an image for a product of all of its values."""

from __future__ import annotations

from math import prod
from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.layouts import inverse, permutation_of


class FoldTransposeIntoWeight(RewriteRule):
    """A Transpose in front of Flatten or Reshape and a product becomes another order of the rows of the weight."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for both ways to flatten in front of both products."""
        turned = op.Transpose(op.any("x"), name="turn")
        flat = (op.Flatten(turned, axis=1, name="flat"), op.Reshape(turned, op.constant("target"), name="flat"))
        w, b = op.constant("w"), op.optional("b")
        return tuple(
            product
            for one in flat
            for product in (op.MatMul(one, w, name="product"), op.Gemm(one, w, b, name="product", transA=0))
        )

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        order, shape = permutation_of(found.turn), found.x.shape
        if order is None or order[0] != 0 or shape is None or len(shape) != len(order):
            return "it moves the batch, or its data is of unknown rank"
        if not all(isinstance(size, int) for size in shape[1:]):
            return "the shape of its data is not known"
        if found.flat.op == "Reshape" and not _flattens(found):
            return "it is not known to flatten all but the batch"
        rows = 1 if found.product.attrs.get("transB", 0) else 0
        if len(found.w.shape) != 2 or found.w.shape[rows] != prod(shape[1:]):
            return "the weight does not fit"
        return "others read the weight" if len(found.w.outputs) > 1 else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product with another order of rows."""
        order = permutation_of(found.turn)
        assert order is not None, "looked at before"
        sizes = [found.x.shape[axis] for axis in order[1:]]
        back = [axis - 1 for axis in inverse(order)[1:]]
        weight = found.w.values
        if found.product.attrs.get("transB", 0):
            ordered = weight.reshape(-1, *sizes).transpose(0, *(axis + 1 for axis in back))
        else:
            ordered = weight.reshape(*sizes, -1).transpose(*back, len(sizes))
        flat = new.like(found.flat, found.x, *found.flat.inputs[1:])
        operands = found.product.inputs[2:]
        return new.like(found.product, flat, new.constant(ordered.reshape(weight.shape), "weight"), *operands)


def _flattens(found: Match) -> bool:
    target, shape = found.target.values.tolist(), found.x.shape
    values = prod(shape[1:])
    return len(target) == 2 and (
        (target[1] == values and target[0] in (-1, shape[0]))
        or (target[0] == 0 and not found.flat.attrs.get("allowzero", 0) and target[1] in (-1, values))
    )
