"""Expands that do nothing, or that the operator behind them does as well."""

from __future__ import annotations

from typing import Any

from onnxq.ir import Constant
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.shape_targets import broadcast, expanded

_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Pow", "Equal", "Less", "Greater", "And", "Or", "PRelu", "Where")
# PRelu broadcasts its slope alone.
_SLOPE = 1


class DropExpands(RewriteRule):
    """An Expand to the shape that its data has goes, and one in front of an operator that broadcasts anyway."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return an Expand, and one for each operand of each operator."""
        expand = op.Expand(op.any("x"), op.any("target"), shared=True)
        behind = []
        for op_type in _BROADCASTING:
            count = 3 if op_type == "Where" else 2
            for index in (_SLOPE,) if op_type == "PRelu" else range(count):
                operands = [expand if place == index else op.any(f"operand{place}") for place in range(count)]
                behind.append(getattr(op, op_type)(*operands, name="last"))
        return (*behind, op.Expand(op.any("x"), op.any("target")))

    def obstacle(self, found: Match) -> str:
        """Return why it is needed."""
        made = _made(found)
        if made is None or None in made:
            return "the shape that it makes is not known"
        if "last" not in found.values:
            return "" if made == _named(found.x) else "it makes another shape"
        operands = [tensor for tensor in _operands(found) if tensor is not None]
        others = [shape for tensor in operands if (shape := _named(tensor)) is not None]
        if len(others) < len(operands):
            return "the shape of another operand is not known"
        before, after = broadcast([made, *others]), broadcast([_named(found.x) or [], *others])
        return "" if before == after and None not in before else "the operator behind would make another shape"

    def replacement(self, new: New, found: Match) -> Any:
        """Read the data itself."""
        if "last" not in found.values:
            return found.x
        return new.like(found.last, *(found.x if tensor is None else tensor for tensor in _operands(found)))


def _operands(found: Match) -> list[Any]:
    """Return what the operator reads, with None in the place of what the Expand makes."""
    return [None if tensor.inputs and tensor.inputs[0] in found.nodes[1:] else tensor for tensor in found.last.inputs]


def _named(tensor: Any) -> list[Any] | None:
    """Return the shape of a tensor; what is unknown of it has a name of its own."""
    if tensor.shape is None:
        return None
    return [f"{tensor.name}#{place}" if extent is None else extent for place, extent in enumerate(tensor.shape)]


def _made(found: Match) -> list[Any] | None:
    """Return the shape that the Expand makes."""
    data = _named(found.x)
    fixed = isinstance(found.target, Constant) and found.target.input_source is None
    if data is None or not fixed or len(found.target.shape) != 1:
        return None
    return expanded(data, [int(extent) for extent in found.target.values])
