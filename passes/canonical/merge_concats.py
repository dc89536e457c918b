"""Concats of one tensor, and Concats inside Concats."""

from __future__ import annotations

from typing import Any

from onnxq.ir import Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule


class MergeConcats(RewriteRule):
    """A Concat reads what a Concat on the same axis, which it alone reads, has put together; one of one tensor goes."""

    def pattern(self, op: Operators) -> Call:
        """Return any Concat."""
        return op.Concat(..., name="concat")

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        parts = _parts(found.concat)
        unlike = len(parts) > 1 and parts == list(found.concat.inputs)
        return "it reads no other Concat that it could be one with" if unlike else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Read the parts of the parts."""
        parts = _parts(found.concat)
        return new.like(found.concat, *parts) if len(parts) > 1 else parts[0]


def _parts(concat: Node) -> list[Any]:
    return [
        part
        for tensor in concat.inputs
        for part in (tensor.inputs[0].inputs if _is_inner(tensor, concat) else (tensor,))
    ]


def _is_inner(tensor: Any, concat: Node) -> bool:
    if not tensor.inputs or len(tensor.outputs) != 1 or tensor.returned_by:
        return False
    inner = tensor.inputs[0]
    if inner.op != "Concat" or inner.domain or len(inner.inputs) < 2:
        return False
    one, other = inner.attrs.get("axis"), concat.attrs.get("axis")
    if one is None or other is None or one == other or tensor.shape is None:
        return one is not None and one == other
    rank = max(1, len(tensor.shape))
    return bool(one % rank == other % rank)
