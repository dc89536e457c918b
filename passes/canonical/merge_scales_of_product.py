"""Scale a product once."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import rank
from onnxq.rewrite.soundness import stays_in_range, stored


class MergeScalesOfProduct(RewriteRule):
    """Two factors of a MatMul that are each scaled by a number are scaled once: ``(a * s) (b * t) -> (a * st) b``.

    The product itself is not scaled instead: without its scales it may leave the range of its type.
    """

    def pattern(self, op: Operators) -> Call:
        """Return the product of two scaled tensors."""
        return op.MatMul(op.Mul(op.any("a"), op.scalar("first")), op.Mul(op.any("b"), op.scalar("second")))

    def obstacle(self, found: Match) -> str:
        """Refuse scales that widen, that are far from 1, or of which both are above 1."""
        if found.first.dtype.kind != "f":
            return "its scales are not floating point"
        if any(len(scale.shape) > (rank(data) or 0) for data, scale in _scaled(found)):
            return "a scale may have more dimensions than its data"
        if not stays_in_range(_scales(found), found.first.dtype) or _scale(found) is None:
            return "a scale is too far from 1"
        return "" if min(map(abs, _scales(found))) <= 1 else "neither of its scales makes its data smaller"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product of one scaled tensor, which both scales together make no larger than its own did."""
        scale = _scale(found)
        if abs(_scales(found)[1]) <= 1:
            return new.like(found.root, new.Mul(found.a, scale), found.b)
        return new.like(found.root, found.a, new.Mul(found.b, scale))


def _scaled(found: Match) -> tuple[tuple[Any, Any], ...]:
    return (found.a, found.first), (found.b, found.second)


def _scales(found: Match) -> tuple[float, float]:
    return float(found.first.values.item()), float(found.second.values.item())


@np.errstate(over="ignore", invalid="ignore")
def _scale(found: Match) -> Any:
    first, second = _scales(found)
    return stored(first * second, found.first.dtype, first, second)
