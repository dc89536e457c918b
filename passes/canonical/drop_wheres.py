"""Where with a condition that is always the same."""

from __future__ import annotations

from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.shape_targets import broadcast


class DropWheres(RewriteRule):
    """A Where whose condition is constant, and the same everywhere, is the operand that it takes."""

    def pattern(self, op: Operators) -> Call:
        """Return a Where of a constant condition."""
        return op.Where(op.constant("condition"), op.any("x"), op.any("y"))

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        values = found.condition.values
        if not values.size or (values.any() and not values.all()):
            return "its condition differs from entry to entry"
        shapes = [_named(tensor) for tensor in (found.condition, found.x, found.y)]
        if None in shapes:
            return "the shape of an operand is not known"
        made, taken = broadcast(shapes), _named(_taken(found))
        return "" if made == taken and None not in made else "what it takes has another shape than what it makes"

    def replacement(self, new: New, found: Match) -> Any:
        """Take the operand."""
        return _taken(found)


def _taken(found: Match) -> Any:
    return found.x if found.condition.values.all() else found.y


def _named(tensor: Any) -> Any:
    """Return the shape of a tensor; what is unknown of it has a name of its own."""
    if tensor.shape is None:
        return None
    return [f"{tensor.name}#{place}" if extent is None else extent for place, extent in enumerate(tensor.shape)]
