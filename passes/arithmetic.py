"""Sums, differences, products and quotients with constants."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.ir import Constant
from onnxq.passes.activations import is_gelu_before_halving
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule
from onnxq.rewrite.soundness import stays_in_range, stored

_MOST_BYTES: Final = 1 << 20


class UseAddAndMul(RewriteRule):
    """Replace Sub and Div by a floating-point constant by Add and Mul, and a Sum of two by Add.

    ``Sub(x, c) -> Add(x, -c); Div(x, c) -> Mul(x, 1 / c); Sum(x, y) -> Add(x, y)``

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
        if match.opset < 7:
            return "operands of this opset lie along an axis"
        if "constant" not in match.values:
            return ""
        if isinstance(match.x, Constant):
            return "both of its operands are constant"
        if match.constant.dtype.kind != "f":
            return "its constant is not floating point"
        if match.constant.nbytes > _MOST_BYTES and len(match.constant.outputs) > 1:
            return "others read its constant, which is large"
        if match.root.op == "Sub":
            return ""
        if _reciprocal(match.constant) is None:
            return "its reciprocal is not a number of its type"
        before_erf = any(reader.op == "Erf" and not reader.domain for reader in match.root.outputs[0].outputs)
        return "it is a part of Gelu" if before_erf and self.rounds(match) else ""

    def rounds(self, match: Match) -> bool:
        return match.root.op == "Div" and bool((np.abs(np.frexp(match.constant.values)[0]) != 0.5).any())

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if match.root.op == "Sub":
            return new.Add(match.x, -match.constant.values)
        if match.root.op == "Div":
            return new.Mul(match.x, _reciprocal(match.constant))
        return new.Add(match.x, match.z) if "z" in match.values else match.x


def _reciprocal(constant: Constant) -> npt.NDArray[Any] | None:
    with np.errstate(divide="ignore", over="ignore"):
        return stored(1.0 / constant.values.astype(np.float64), constant.dtype, 1.0)


# Largest error of the merged shift, relative to the smaller one; far above the rounding of two shifts of one size.
_MOST_LOST = 2.0**-8


class MergeScalars(RewriteRule):
    """Merge two scalar factors or shifts into one; drop a factor of 1 and a shift of 0.

    ``Mul(Mul(x, a), b) -> Mul(x, a * b)``

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
        if match.opset < 7:
            return "operands of this opset lie along an axis"
        if isinstance(match.x, Constant) or match.x.shape is None:
            return "its data is constant, or of unknown rank"
        if any(len(scalar.shape) > len(match.x.shape) for scalar in _scalars(match)):
            return "it may raise the rank"
        if len(match.nodes) == 1:
            return ""
        if is_gelu_before_halving(match.x):
            return "it is a part of Gelu"
        if match.second.dtype.kind != "f":
            return "whole numbers may overflow"
        first, second = map(float, _values(match))
        dtype, merged = match.second.dtype, _merged(match)
        if merged is None:
            return "the merged number is not one of its type"
        if match.root.op == "Mul" and 0 in (first, second):
            return "zero times what overflows is no number"
        if match.root.op == "Mul":
            return "" if stays_in_range([first, second], dtype) else "a factor is too far from 1"
        # Adding a number and subtracting it again rounds on purpose.
        if abs(float(merged)) < max(abs(first), abs(second)):
            return "they cancel"
        # If data cancels the first shift, only the second is left, such as the epsilon in front of a logarithm.
        lost = abs((float(merged) - max(first, second, key=abs)) - min(first, second, key=abs))
        return "the smaller one would lose digits" if lost > _MOST_LOST * min(abs(first), abs(second)) else ""

    def rounds(self, match: Match) -> bool:
        return len(match.nodes) > 1

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if len(match.nodes) == 1:
            return match.x
        return new.call("", match.root.op, match.x, _merged(match))


def _scalars(match: Match) -> list[Constant]:
    """Return the constant operands in graph order."""
    return [tensor for node in match.nodes[::-1] for tensor in node.inputs if isinstance(tensor, Constant)]


def _values(match: Match) -> list[Any]:
    return [scalar.values.reshape(()) for scalar in _scalars(match)]


@np.errstate(over="ignore", invalid="ignore")
def _merged(match: Match) -> Any:
    first, second = (np.float64(value) for value in _values(match))
    if match.root.op == "Mul":
        return stored(first * second, match.second.dtype, first, second)
    return stored(first + second, match.second.dtype)
