"""Give products weights of two dimensions."""

from __future__ import annotations

from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import rank


class FlattenBatchedWeight(RewriteRule):
    """The weight of a MatMul loses leading dimensions of size 1 that its data has anyway."""

    def pattern(self, op: Operators) -> Call:
        """Return a MatMul with a constant weight behind its data."""
        return op.MatMul(op.any("x"), op.constant("weight"))

    def obstacle(self, found: Match) -> str:
        """Refuse real batches, data of fewer dimensions, and weights that others read as they are."""
        batch = found.weight.shape[:-2]
        if not batch or any(extent != 1 for extent in batch):
            return "its weight has no leading dimensions, or one that is not 1"
        if (rank(found.x) or 0) < len(found.weight.shape):
            return "its data has fewer dimensions than its weight, as far as these are known"
        if any(reader.op != "MatMul" for reader in found.weight.outputs):
            return "others than products read its weight"
        return ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product with the same values as a matrix."""
        return new.like(
            found.root, found.x, new.constant(found.weight.values.reshape(found.weight.shape[-2:]), "weight")
        )
