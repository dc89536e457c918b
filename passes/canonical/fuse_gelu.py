"""Recognise GELU, written with Erf or Tanh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import may_widen

_FIRST_OPSET = 20
_CUBIC = 0.044715
_SLOPE = math.sqrt(2 / math.pi)


class FuseGelu(RewriteRule):
    """GELU in any of its spellings becomes Gelu, or before opset 20 the spelling that runtimes know.

    Those are ``(x * 0.5) * (1 + erf(x / sqrt(2)))`` and
    ``(x * 0.5) * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``
    with Div and Pow, of which `UnifyGeluArgument` takes care; other rules leave them as they are.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return every order of the factors, the rarest operator first."""
        return tuple(_forms(op))

    def obstacle(self, found: Match) -> str:
        """Refuse what is in its best form already, and constants that widen the data."""
        if found.opset < _FIRST_OPSET and "odd" not in found.values:
            return f"ONNX has Gelu from opset {_FIRST_OPSET} on"
        return "its constants may have more dimensions than its data" if may_widen(found, found.x) else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one Gelu, or the known spelling of it."""
        x = found.x
        exact = any(node.op == "Erf" for node in found.nodes)
        if found.opset >= _FIRST_OPSET:
            return new.Gelu(x, approximate=None if exact else "tanh")
        if exact:
            # Halved first, for twice x may leave the range.
            return new.Mul(new.Mul(x, 0.5), new.Add(new.Erf(new.Div(x, math.sqrt(2))), 1.0))
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.Mul(new.Mul(x, 0.5), new.Add(new.Tanh(new.Mul(cubic, _SLOPE)), 1.0))


def _forms(op: Operators) -> Iterator[Call]:
    """Yield every order of the factors; runtimes know two with Erf and one with Tanh."""
    x = op.any("x")
    cubic = op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBIC))
    for inner, last in (
        (op.Erf(op.Div(x, math.sqrt(2))), ""),
        (op.Tanh(op.Mul(cubic, _SLOPE)), "odd"),
    ):
        one_and = op.Add(inner, 1.0)
        yield op.Mul(one_and, op.Mul(x, 0.5))
        yield op.Mul(op.Mul(one_and, x, name=last), 0.5)
        yield op.Mul(op.Mul(one_and, 0.5, name="odd"), x)
