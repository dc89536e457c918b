"""Multiply data of any rank as it is, where Gemm makes it a matrix and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxq.ir import Constant
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.patterns import Capture
from onnxq.rewrite.ranks import same_extents


class ReplaceGemmBetweenReshapes(RewriteRule):
    """Reshape, Gemm and a Reshape back become MatMul and Add.

    Where the data comes in more axes, which the first Reshape merges, and the last one computes its target, one Reshape
    that copies the rows remains. Reshapes that do not lead back stay: there `ReplaceMatMulBetweenReshapes` makes a
    Gemm, which has its own bias.
    """

    def pattern(self, op: Operators) -> Call:
        """Return Gemm of a constant weight and bias between Reshapes, of which others may read the first."""
        data = op.Reshape(op.any("x"), op.any("rows"), shared=True)
        bias = Capture("bias", constant=True, optional=True)
        gemm = op.Gemm(data, op.constant("weight"), bias, name="gemm", alpha=1.0, beta=1.0, transA=0)
        return op.Reshape(gemm, op.any("target"))

    def obstacle(self, found: Match) -> str:
        """Refuse shapes that are not proven to be the same before and behind."""
        x, result = found.x.shape, found.root.outputs[0].shape
        if x is None or result is None or len(x) < 3 or len(found.weight.shape) != 2:
            return "shapes around it are unknown, or its data is a matrix already"
        inner, outer = found.weight.shape[:: -1 if found.gemm.attrs.get("transB", 0) else 1]
        if not same_extents(result, [*x[: len(result) - 1], outer]) or not _has_rows(x[len(result) - 1 :], inner):
            return "its result does not have the shape of its data"
        if len(x) != len(result) and isinstance(found.target, Constant):
            return "its data needs a Reshape anyway"
        if found.bias is not None and found.bias.shape not in ((outer,), (1, outer)):
            return "its bias is not one value for each channel"
        if found.gemm.attrs.get("transB", 0) and len(set(found.weight.outputs)) > 1:
            return "others read its weight, which it transposes"
        return ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product, and the sum where there is a bias."""
        weight = found.weight
        if found.gemm.attrs.get("transB", 0):
            weight = new.constant(weight.values.T, "weight")
        kept = len(found.root.outputs[0].shape) - 1
        flat = len(found.x.shape) == kept + 1
        data = found.x if flat else new.Reshape(found.x, np.array([*[0] * kept, weight.shape[0]]))
        product = new.named(found.gemm, new.MatMul(data, weight))
        if found.bias is None:
            return product
        return new.Add(
            product, found.bias if len(found.bias.shape) == 1 else new.constant(found.bias.values.reshape(-1), "bias")
        )


def _has_rows(extents: Sequence[Any], length: int) -> bool:
    """Whether these last axes of the data hold one row each."""
    return all(isinstance(extent, int) for extent in extents) and math.prod(extents) == length
