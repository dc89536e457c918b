"""Scale a product once."""

from __future__ import annotations

from typing import Any

from onnxq.graph import Call, Match, New, Operators, RewriteRule
from onnxq.graph.ranks import rank


class MergeScalesOfProduct(RewriteRule):
    """Two factors of a MatMul that are each scaled by a number become their product scaled once."""

    def pattern(self, op: Operators) -> Call:
        """Return the product of two scaled tensors."""
        return op.MatMul(op.Mul(op.any("a"), op.scalar("first")), op.Mul(op.any("b"), op.scalar("second")))

    def obstacle(self, found: Match) -> str:
        """Refuse types whose range the unscaled product might leave, and scales that widen."""
        if found.first.dtype.kind != "f" or found.first.dtype.itemsize < 4:
            return "its type has a small range, which the unscaled product might leave"
        if any(len(scale.shape) > (rank(data) or 0) for data, scale in _scaled(found)):
            return "a scale may have more dimensions than its data"
        return ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product and scale it."""
        scale = found.first.values.item() * found.second.values.item()
        return new.Mul(new.like(found.root, found.a, found.b), scale)


def _scaled(found: Match) -> tuple[tuple[Any, Any], ...]:
    return (found.a, found.first), (found.b, found.second)
