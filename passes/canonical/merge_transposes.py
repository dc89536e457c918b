"""Transposes that follow each other, that do nothing, and that only move dimensions of size 1."""

from __future__ import annotations

from typing import Any

from onnxq.ir import Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.shape_targets import reshape_target

_TARGET_IS_INPUT = 5


class MergeTransposes(RewriteRule):
    """Two Transposes become one, one that does nothing goes, one that moves dimensions of size 1 is a Reshape."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both forms."""
        return (
            op.Transpose(op.Transpose(op.any("x"), name="first", shared=True), name="last"),
            op.Transpose(op.any("x"), name="last"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why a Transpose stays."""
        order = _order(found)
        if order is None:
            return "its order of dimensions is not known"
        if "first" in found.values or order == sorted(order) or _target(found, order) is not None:
            return ""
        return "it moves dimensions of more than one entry"

    def replacement(self, new: New, found: Match) -> Any:
        """Make one operator or none."""
        order = _order(found) or []
        if order == sorted(order):
            return found.x
        if "first" in found.values:
            return new.like(found.last, found.x, perm=order)
        return new.Reshape(found.x, new.constant(_target(found, order) or []))


def _order(found: Match) -> list[int] | None:
    """Return which dimension of what is read each of the result is."""
    rank = None if found.x.shape is None else len(found.x.shape)
    last = _permutation(found.last, rank)
    if "first" not in found.values or last is None:
        return last
    first = _permutation(found.first, len(last))
    return None if first is None else [first[place] for place in last]


def _permutation(node: Node, rank: int | None) -> list[int] | None:
    given = node.attrs.get("perm")
    if given is None:
        return None if rank is None else list(range(rank))[::-1]
    order = [place for place in given if isinstance(place, int)] if isinstance(given, list) else []
    return order if sorted(order) == list(range(len(order))) and rank in (None, len(order)) and order else None


def _target(found: Match, order: list[int]) -> list[int] | None:
    """Return the target of the Reshape that does the same."""
    shape = found.x.shape
    if shape is None or found.opset < _TARGET_IS_INPUT or 0 in shape:
        return None
    named = [f"#{place}" if extent is None else extent for place, extent in enumerate(shape)]
    kept = [place for place in order if named[place] != 1]
    return reshape_target(named, [named[place] for place in order], empty=True) if kept == sorted(kept) else None
