"""Let the product of a matrix add its bias by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import rank


class ReplaceMatMulOfMatrices(RewriteRule):
    """MatMul of a matrix and Add of a bias become Gemm."""

    def pattern(self, op: Operators) -> Call:
        """Return the product with a constant weight, and the sum."""
        return op.Add(op.MatMul(op.any("x"), op.constant("weight"), name="product"), op.constant("bias"))

    def obstacle(self, found: Match) -> str:
        """Refuse data that is no matrix, and what is not a bias of floats."""
        if rank(found.x) != 2 or len(found.weight.shape) != 2:
            return "its data or weight is not known to be a matrix"
        if found.weight.dtype.kind != "f" or found.weight.dtype.itemsize > 4:
            return f"it is of type {found.weight.dtype}"
        channels = found.weight.shape[1]
        if found.bias.shape not in ((), (1,), (1, 1), (channels,), (1, channels)) or not channels:
            return "its bias is not one value for each channel"
        return ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the Gemm; a bias of one value is repeated for each channel."""
        channels, bias = found.weight.shape[1], found.bias
        if bias.shape != (channels,):
            bias = new.constant(np.broadcast_to(bias.values.reshape(-1), channels).copy(), "bias")
        return new.named(found.product, new.Gemm(found.x, found.weight, bias))
