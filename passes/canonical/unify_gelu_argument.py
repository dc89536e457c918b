"""Spell the argument of GELU's Erf or Tanh in one way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import may_widen

_CUBIC = 0.044715
_SLOPE = math.sqrt(2 / math.pi)


class UnifyGeluArgument(RewriteRule):
    """What Erf and Tanh of GELU read is spelled ``x / sqrt(2)`` and ``sqrt(2 / pi) * (x + 0.044715 * x**3)``.

    With Div and Pow, as `FuseGelu` and runtimes look for them.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return the other spellings."""
        erf = op.Erf(op.Mul(op.any("x"), math.sqrt(0.5)))
        return (erf, *(op.Tanh(argument) for argument in _arguments(op)))

    def obstacle(self, found: Match) -> str:
        """Refuse constants that widen the data."""
        return "its constants may have more dimensions than its data" if may_widen(found, found.x) else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the argument and the function."""
        x = found.x
        if found.root.op == "Erf":
            return new.like(found.root, new.Div(x, math.sqrt(2)))
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.like(found.root, new.Mul(cubic, _SLOPE))


def _arguments(op: Operators) -> Iterator[Call]:
    """Yield the spellings with the cube or the square multiplied out, and with x or the slope factored out."""
    x = op.any("x")
    squares = (op.Mul(op.Mul(x, _CUBIC), x), op.Mul(op.Mul(x, x), _CUBIC), op.Mul(op.Pow(x, 2.0), _CUBIC))
    cubes = (
        op.Mul(op.Mul(op.Mul(x, x), x), _CUBIC),
        op.Mul(op.Mul(op.Pow(x, 2.0), x), _CUBIC),
        op.Mul(op.Mul(x, x), op.Mul(x, _CUBIC)),
        *(op.Mul(square, x) for square in squares),
    )
    for cube in cubes:
        yield op.Mul(op.Add(x, cube), _SLOPE)
    for square in squares:
        one_and = op.Add(square, 1.0)
        yield op.Mul(op.Mul(x, _SLOPE), one_and)
        yield op.Mul(x, op.Mul(one_and, _SLOPE))
        yield op.Mul(op.Mul(x, one_and), _SLOPE)
