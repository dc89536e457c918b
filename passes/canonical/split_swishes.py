"""Swish, which older exporters write as Sigmoid times its data."""

from __future__ import annotations

from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule


class SplitSwishes(RewriteRule):
    """Swish is x times the Sigmoid of x, or of x times its slope.

    Runtimes know the two by heart: they fuse them in float, and have integer kernels for each.
    """

    def pattern(self, op: Operators) -> Call:
        """Look for the operator of opset 24."""
        return op.Swish(op.any("x"))

    def obstacle(self, found: Match) -> str:
        """Refuse a slope whose type is not known."""
        return "the type of its data is not known" if _slope(found) != 1 and found.x.dtype is None else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the gate and the product."""
        slope = _slope(found)
        steep = found.x if slope == 1 else new.Mul(found.x, slope)
        return new.Mul(found.x, new.Sigmoid(steep))


def _slope(found: Match) -> float:
    return float(found.root.attrs.get("alpha", 1.0))
