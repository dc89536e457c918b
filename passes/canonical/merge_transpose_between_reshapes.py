"""Transpose matrices in a batch of any rank at once."""

from __future__ import annotations

from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import same_extents


class MergeTransposeBetweenReshapes(RewriteRule):
    """Reshape to a batch of matrices, Transpose of each and Reshape back become one Transpose of the last two axes."""

    def pattern(self, op: Operators) -> Call:
        """Return the three, as exporters write the key of an attention."""
        batch = op.Reshape(op.any("x"), op.any("batch"), name="flat")
        return op.Reshape(op.Transpose(batch, perm=[0, 2, 1]), op.any("target"))

    def obstacle(self, found: Match) -> str:
        """Refuse shapes that are not proven to keep the matrices and to lead back to their batch."""
        x, flat, result = found.x.shape, found.flat.outputs[0].shape, found.root.outputs[0].shape
        if x is None or flat is None or result is None or len(x) < 3:
            return "shapes around it are unknown"
        if not (same_extents(flat[1:], x[-2:]) and same_extents(result, [*x[:-2], x[-1], x[-2]])):
            return "its Reshapes do not keep the last two axes"
        return ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one Transpose."""
        last = len(found.x.shape) - 1
        return new.Transpose(found.x, perm=[*range(last - 1), last, last - 1])
