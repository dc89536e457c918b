"""Multiply as a matrix what is reshaped before and behind."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule


class ReplaceMatMulBetweenReshapes(RewriteRule):
    """MatMul and Add between two Reshapes become Gemm between two Reshapes, which has its own bias.

    Reshapes that lead back to the shape of the data stay: there `ReplaceGemmBetweenReshapes` makes MatMul and Add.
    """

    def pattern(self, op: Operators) -> Call:
        """Return the product and the sum between Reshapes."""
        product = op.MatMul(op.Reshape(op.any("x"), op.any("rows")), op.constant("weight"), name="product")
        return op.Reshape(op.Add(product, op.constant("bias")), op.constant("target"))

    def obstacle(self, found: Match) -> str:
        """Refuse unknown shapes, those that lead back, and biases that are none."""
        x, target = found.x.shape, found.target.values.reshape(-1).tolist()
        if x is None or len(found.weight.shape) != 2:
            return "the shape of its data is unknown, or its weight is no matrix"
        inner, outer = found.weight.shape
        if not inner or not outer or 0 in target:
            return "an extent is 0, or copied from the data"
        back = [*x[:-1], outer]
        if len(target) == len(back) and all(extent in (-1, own) for extent, own in zip(target, back, strict=True)):
            return "its result may have the shape of its data"
        if found.bias.dtype.kind != "f" or found.bias.shape[-1:] != (outer,) or found.bias.values.size != outer:
            return "its bias is not one value for each channel"
        if len(found.bias.shape) > (len(found.root.inputs[0].shape or ())):
            return "its bias may have more dimensions than its data"
        return ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the rows, their product and the wanted shape of it."""
        rows = new.Reshape(found.x, np.array([-1, found.weight.shape[0]]))
        flat = len(found.bias.shape) == 1
        bias = found.bias if flat else new.constant(found.bias.values.reshape(-1), "bias")
        product = new.named(found.product, new.Gemm(rows, found.weight, bias))
        return new.like(found.root, product, found.target)
