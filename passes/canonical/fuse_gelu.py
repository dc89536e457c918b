"""Recognise GELU, written with Erf or Tanh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnxq.graph import Call, Match, New, Operators, Rule
from onnxq.graph.ranks import may_widen

_FIRST_OPSET = 20
_CUBIC = 0.044715
_SLOPE = math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class FuseGelu(Rule):
    """GELU in any of its spellings becomes Gelu, or before opset 20 the spelling that runtimes know.

    Those are ``x * (1 + erf(x / sqrt(2))) * 0.5`` and ``(x * 0.5) * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``
    with Div and Pow; other rules leave them as they are.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return every order of the factors for every spelling of the argument."""
        return (*_erf_forms(op), *_tanh_forms(op))

    def obstacle(self, found: Match) -> str:
        """Refuse what is in its best form already, and constants that widen the data."""
        if found.opset < _FIRST_OPSET and "odd" not in found.values:
            return f"ONNX has Gelu from opset {_FIRST_OPSET} on"
        return "its constants may have more dimensions than its data" if may_widen(found, found.x) else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make one Gelu, or the known spelling of it."""
        x = found.x
        exact = any(node.op == "Erf" for node in found.nodes)
        if found.opset >= _FIRST_OPSET:
            return new.Gelu(x, approximate=None if exact else "tanh")
        if exact:
            return new.Mul(new.Mul(x, new.Add(new.Erf(new.Div(x, math.sqrt(2))), 1.0)), 0.5)
        cubic = new.Add(x, new.Mul(new.Pow(x, 3.0), _CUBIC))
        return new.Mul(new.Mul(x, 0.5), new.Add(new.Tanh(new.Mul(cubic, _SLOPE)), 1.0))


def _erf_forms(op: Operators) -> Iterator[Call]:
    """Yield the forms with Erf; runtimes know those that halve last or first, and divide."""
    x = op.any("x")
    for odd in (False, True):
        argument = op.Mul(x, math.sqrt(0.5), name="odd") if odd else op.Div(x, math.sqrt(2))
        one_and = op.Add(op.Erf(argument), 1.0)
        yield op.Mul(op.Mul(x, one_and), 0.5)
        yield op.Mul(op.Mul(x, 0.5), one_and)
        yield op.Mul(x, op.Mul(one_and, 0.5, name="" if odd else "odd"))


def _tanh_forms(op: Operators) -> Iterator[Call]:
    """Yield the forms with Tanh; runtimes know two arguments, where the input is halved first."""
    x = op.any("x")
    for odd, argument in _tanh_arguments(op):
        one_and = op.Add(op.Tanh(argument, name="odd" if odd else ""), 1.0)
        yield op.Mul(op.Mul(x, 0.5), one_and)
        yield op.Mul(op.Mul(x, one_and, name="" if odd else "odd"), 0.5)
        yield op.Mul(x, op.Mul(one_and, 0.5, name="" if odd else "odd"))


def _tanh_arguments(op: Operators) -> Iterator[tuple[bool, Call]]:
    """Yield the spellings of ``sqrt(2 / pi) * (x + 0.044715 * x**3)``, and whether each is an odd one."""
    x = op.any("x")
    yield False, op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBIC)), _SLOPE)
    for cube in (op.Mul(op.Mul(x, x), x), op.Mul(op.Pow(x, 2.0), x)):
        yield True, op.Mul(op.Add(x, op.Mul(cube, _CUBIC)), _SLOPE)
    for odd, square in (
        (False, op.Mul(op.Mul(x, _CUBIC), x)),
        (True, op.Mul(op.Mul(x, x), _CUBIC)),
        (True, op.Mul(op.Pow(x, 2.0), _CUBIC)),
    ):
        one_and = op.Add(square, 1.0)
        yield odd, op.Mul(op.Mul(x, _SLOPE), one_and)
        yield True, op.Mul(x, op.Mul(one_and, _SLOPE))
        yield True, op.Mul(op.Mul(x, one_and), _SLOPE)
