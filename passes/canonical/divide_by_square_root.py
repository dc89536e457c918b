"""Divide by a square root at once."""

from __future__ import annotations

from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import may_widen


class DivideBySquareRoot(RewriteRule):
    """Mul by the reciprocal of a square root becomes Div by the root, as normalizations are looked for."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return the reciprocal, also spelled as Div."""
        root = op.Sqrt(op.any("square"))
        return op.Mul(op.Reciprocal(root), op.any("x")), op.Mul(op.Div(1.0, root), op.any("x"))

    def obstacle(self, found: Match) -> str:
        """Refuse a one of more dimensions than what it is divided by."""
        wide = may_widen(found, found.square) and found.nodes[1].op == "Div" and found.nodes[1].inputs[0].shape
        return "its constant may have more dimensions than its data" if wide else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the root and the division."""
        return new.Div(found.x, new.Sqrt(found.square))
