"""Rid Gemm of what integer kernels do not have."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import Constant, is_fixed
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.soundness import stays_in_range, stored

_BIAS_IS_OPTIONAL = 11


class FoldGemmFactors(RewriteRule):
    """Gemm's alpha goes into a constant weight, beta into a constant bias, and transA becomes a Transpose in front."""

    def pattern(self, op: Operators) -> Call:
        """Return a Gemm with a constant weight."""
        return op.Gemm(op.any("x"), op.constant("weight"), op.optional("bias"), name="gemm")

    def obstacle(self, found: Match) -> str:
        """Refuse a bias that cannot take beta, and a weight of integers."""
        alpha, beta, transposed = _factors(found)
        if (alpha, beta, transposed) == (1.0, 1.0, False):
            return "it has no alpha, beta or transA"
        if found.weight.dtype.kind != "f":
            return "its weight is not floating point"
        tied = found.uses is not None and found.uses.is_like_a_table(found.weight)
        if alpha != 1.0 and (tied or any(reader.op == "Gather" for reader in found.weight.outputs)):
            return "its weight is a table that is looked up too"
        if beta not in (0.0, 1.0) and found.bias is not None and not is_fixed(found.bias):
            return "its beta scales a bias that is computed at run time"
        if beta == 0.0 and found.opset < _BIAS_IS_OPTIONAL:
            return "Gemm needs a bias at this opset"
        if alpha == 0.0 or not stays_in_range([alpha, beta], found.weight.dtype):
            return "its factors are too far from 1"
        lost = (alpha != 1.0 and _times(found.weight, alpha) is None) or (
            beta not in (0.0, 1.0) and _times(found.bias, beta) is None
        )
        return "its weight or bias would leave the range of its type" if lost else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make a Gemm without factors."""
        alpha, beta, transposed = _factors(found)
        data = new.Transpose(found.x, perm=[1, 0]) if transposed else found.x
        weight = found.weight if alpha == 1.0 else new.constant(_times(found.weight, alpha), "weight")
        bias = found.bias if beta != 0.0 else None
        if bias is not None and beta != 1.0:
            bias = new.constant(_times(bias, beta), "bias")
        operands = (data, weight) if bias is None else (data, weight, bias)
        return new.like(found.gemm, *operands, alpha=None, beta=None, transA=None)


def _factors(found: Match) -> tuple[float, float, bool]:
    attributes = found.gemm.attrs
    beta = float(attributes.get("beta", 1.0)) if found.bias is not None else 1.0
    return float(attributes.get("alpha", 1.0)), beta, bool(attributes.get("transA", 0))


@np.errstate(over="ignore", invalid="ignore")
def _times(tensor: Constant, factor: float) -> Any:
    values = tensor.values.astype(np.float64)
    return stored(values * factor, tensor.dtype, values)
