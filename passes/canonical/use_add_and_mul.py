"""Differences, quotients and sums as the two operators that fold into products and have integer kernels."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.ir import Constant
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.soundness import stored

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
