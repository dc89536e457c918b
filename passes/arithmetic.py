"""Sums, differences, products and quotients with constants."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from onnxq.ir import Constant
from onnxq.passes.activations import is_gelu_before_halving
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule
from onnxq.rewrite.soundness import is_float, may_widen, stays_in_range, stored

_MOST_BYTES: Final = 1 << 20


class UseAddAndMul(RewriteRule):
    """``Sub(x, c) -> Add(x, -c); Div(x, c) -> Mul(x, 1 / c); Sum(x, y) -> Add(x, y)``.

    Replace Sub and Div by a floating-point constant by Add and Mul, and a Sum of two by Add.

    Max, Mean, Min and Sum of one tensor go. Not for a Div in front of Erf, by which runtimes match Gelu, or whose last
    bit may decide something.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x = op.any("x")
        constant = op.constant("constant")
        return (
            op.Sub(x, constant),
            op.Div(x, constant),
            op.Sum(x, op.any("z")),
            *(getattr(op, name)(x) for name in ("Max", "Mean", "Min", "Sum")),
        )

    def check(self, match: Match) -> str:
        if "constant" not in match.values:
            return ""
        if isinstance(match.x, Constant):
            return "both of its operands are constant"
        if not is_float(match.constant):
            return "its constant is not floating point"
        if match.constant.nbytes > _MOST_BYTES and len(match.constant.outputs) > 1:
            return "others read its constant, which is large"
        before_erf = any(reader.op == "Erf" and not reader.domain for reader in match.root.outputs[0].outputs)
        return "it is a part of Gelu" if before_erf and self.rounds(match) else ""

    def rounds(self, match: Match) -> bool:
        return match.root.op == "Div" and bool((np.abs(np.frexp(match.constant.values)[0]) != 0.5).any())

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if match.root.op == "Sub":
            return new.Add(match.x, -match.constant.values)
        if match.root.op == "Div":
            with np.errstate(divide="ignore", over="ignore"):
                reciprocal = stored(1.0 / match.constant.values.astype(np.float64), match.constant.dtype, 1.0)
            return "its reciprocal is not a number of its type" if reciprocal is None else new.Mul(match.x, reciprocal)
        return new.Add(match.x, match.z) if "z" in match.values else match.x


# Largest error of the merged shift, relative to the smaller one; far above the rounding of two shifts of one size.
_MOST_LOST = 2.0**-8


class MergeScalars(RewriteRule):
    """``Mul(Mul(x, a), b) -> Mul(x, a * b)``.

    Merge two scalar factors or shifts into one; drop a factor of 1 and a shift of 0.

    Not for shifts that cancel, or of very different size: data may cancel the larger one.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, first, second = op.any("x"), op.scalar("first"), op.scalar("second")
        return (
            op.Mul(op.Mul(x, first), second),
            op.Add(op.Add(x, first), second),
            op.Mul(x, 1.0),
            op.Add(x, 0.0),
        )

    def check(self, match: Match) -> str:
        if isinstance(match.x, Constant) or match.x.shape is None:
            return "its data is constant, or of unknown rank"
        if may_widen(match.nodes, match.x):
            return "it may raise the rank"
        if len(match.nodes) == 1:
            return ""
        if is_gelu_before_halving(match.x):
            return "it is a part of Gelu"
        return "" if is_float(match.second) else "whole numbers may overflow"

    def rounds(self, match: Match) -> bool:
        return len(match.nodes) > 1

    @np.errstate(over="ignore", invalid="ignore")
    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if len(match.nodes) == 1:
            return match.x
        first, second = float(match.first.values.item()), float(match.second.values.item())
        dtype, is_product = match.second.dtype, match.root.op == "Mul"
        merged = stored(first * second, dtype, first, second) if is_product else stored(first + second, dtype)
        if merged is None:
            return "the merged number is not one of its type"
        if is_product:
            if 0 in (first, second):
                return "zero times what overflows is no number"
            return new.Mul(match.x, merged) if stays_in_range([first, second], dtype) else "a factor is too far from 1"
        # Adding a number and subtracting it again rounds on purpose.
        if abs(float(merged)) < max(abs(first), abs(second)):
            return "they cancel"
        # If data cancels the first shift, only the second is left, such as the epsilon in front of a logarithm.
        lost = abs((float(merged) - max(first, second, key=abs)) - min(first, second, key=abs))
        if lost > _MOST_LOST * min(abs(first), abs(second)):
            return "the smaller one would lose digits"
        return new.Add(match.x, merged)
