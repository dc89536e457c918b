"""Sums, differences, products and quotients with constants."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.ir import Constant
from onnxq.passes.activations import is_gelu_before_halving
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.soundness import stays_in_range, stored

_MOST_BYTES: Final = 1 << 20


class UseAddAndMul(RewriteRule):
    """Sub and Div by a floating-point constant are Add and Mul; a Sum of two is Add, and one of one is nothing.

    A quotient stays where its last bit may decide something, and in front of Erf, by which runtimes know a Gelu.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each of them."""
        x = op.any("x")
        constant = op.constant("constant")
        return (
            op.Sub(x, constant),
            op.Div(x, constant),
            op.Sum(x, op.any("z")),
            *(getattr(op, name)(x) for name in ("Max", "Mean", "Min", "Sum")),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        if found.opset < 7:
            return "operands of this opset lie along an axis"
        if "constant" not in found.values:
            return ""
        if isinstance(found.x, Constant):
            return "both of its operands are constant"
        if found.constant.dtype.kind != "f":
            return "its constant is not floating point"
        if found.constant.nbytes > _MOST_BYTES and len(found.constant.outputs) > 1:
            return "others read its constant, which is large"
        if found.root.op == "Sub":
            return ""
        if _reciprocal(found.constant) is None:
            return "its reciprocal is not a number of its type"
        before_erf = any(reader.op == "Erf" and not reader.domain for reader in found.root.outputs[0].outputs)
        return "it is a part of Gelu" if before_erf and self.rounds(found) else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise, as quotients do unless the divisors are powers of two."""
        return found.root.op == "Div" and bool((np.abs(np.frexp(found.constant.values)[0]) != 0.5).any())

    def replacement(self, new: New, found: Match) -> Any:
        """Make the Add or Mul, or nothing."""
        if found.root.op == "Sub":
            return new.Add(found.x, -found.constant.values)
        if found.root.op == "Div":
            return new.Mul(found.x, _reciprocal(found.constant))
        return new.Add(found.x, found.z) if "z" in found.values else found.x


def _reciprocal(constant: Constant) -> npt.NDArray[Any] | None:
    with np.errstate(divide="ignore", over="ignore"):
        return stored(1.0 / constant.values.astype(np.float64), constant.dtype, 1.0)


# A share of the smaller shift, far above the rounding of two shifts of one size.
_MOST_LOST = 2.0**-8


class MergeScalars(RewriteRule):
    """Two factors or two shifts of one number are one; a factor of 1 and a shift of 0 go."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for two in a row, and for each alone."""
        x, first, second = op.any("x"), op.scalar("first"), op.scalar("second")
        return (
            op.Mul(op.Mul(x, first), second),
            op.Add(op.Add(x, first), second),
            op.Mul(x, 1.0),
            op.Add(x, 0.0),
        )

    def obstacle(self, found: Match) -> str:
        """Return why they stay."""
        if found.opset < 7:
            return "operands of this opset lie along an axis"
        if isinstance(found.x, Constant) or found.x.shape is None:
            return "its data is constant, or of unknown rank"
        if any(len(scalar.shape) > len(found.x.shape) for scalar in _scalars(found)):
            return "it may raise the rank"
        if len(found.nodes) == 1:
            return ""
        if is_gelu_before_halving(found.x):
            return "it is a part of Gelu"
        if found.second.dtype.kind != "f":
            return "whole numbers may overflow"
        first, second = map(float, _values(found))
        dtype, merged = found.second.dtype, _merged(found)
        if merged is None:
            return "the merged number is not one of its type"
        if found.root.op == "Mul" and 0 in (first, second):
            return "zero times what overflows is no number"
        if found.root.op == "Mul":
            return "" if stays_in_range([first, second], dtype) else "a factor is too far from 1"
        # What is added and taken away again rounds on purpose.
        if abs(float(merged)) < max(abs(first), abs(second)):
            return "they cancel"
        # Where data cancels the first shift, the second one alone is left, such as what keeps a logarithm from zero.
        lost = abs((float(merged) - max(first, second, key=abs)) - min(first, second, key=abs))
        return "the smaller one would lose digits" if lost > _MOST_LOST * min(abs(first), abs(second)) else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise, as two in a row do."""
        return len(found.nodes) > 1

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one operator, or none."""
        if len(found.nodes) == 1:
            return found.x
        return new.call("", found.root.op, found.x, _merged(found))


def _scalars(found: Match) -> list[Constant]:
    """Return the constant operands, the one in front first."""
    return [tensor for node in found.nodes[::-1] for tensor in node.inputs if isinstance(tensor, Constant)]


def _values(found: Match) -> list[Any]:
    return [scalar.values.reshape(()) for scalar in _scalars(found)]


@np.errstate(over="ignore", invalid="ignore")
def _merged(found: Match) -> Any:
    """Return the one number for both, or None if their type does not hold it."""
    first, second = (np.float64(value) for value in _values(found))
    if found.root.op == "Mul":
        return stored(first * second, found.second.dtype, first, second)
    return stored(first + second, found.second.dtype)
