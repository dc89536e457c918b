"""Factors and shifts of one number that stand one behind the other, or do nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.graph import Call, Constant, Match, New, Operators, RewriteRule
from onnxq.graph.gelu_parts import is_gelu_before_halving


class MergeScalars(RewriteRule):
    """Two factors or two shifts of one number are one; a factor of 1 and a shift of 0 go."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for two in a row, and for each alone."""
        x, first, second = op.any("x"), op.scalar("first"), op.scalar("second")
        return (
            op.Mul(op.Mul(x, first), second),
            op.Add(op.Add(x, first), second),
            op.Mul(x, 1.0),
            op.Add(x, 0.0),
        )

    def obstacle(self, found: Match) -> str:
        """Return why they stay."""
        if found.opset < 7:
            return "operands of this opset lie along an axis"
        if isinstance(found.x, Constant) or found.x.shape is None:
            return "its data is constant, or of unknown rank"
        if any(len(scalar.shape) > len(found.x.shape) for scalar in _scalars(found)):
            return "it may raise the rank"
        if len(found.nodes) == 1:
            return "" if _does_nothing(found) else "it is only nearly 1"
        if is_gelu_before_halving(found.x):
            return "it is a part of Gelu"
        if found.second.dtype.kind != "f":
            return "whole numbers may overflow"
        first, second, merged = (abs(float(value)) for value in (*_values(found), _merged(found)))
        if not np.isfinite(merged) or (found.root.op == "Mul" and first and second and merged < _tiny(found)):
            return "their product is not a number of its type"
        # What is added and taken away again rounds on purpose.
        return "they cancel" if found.root.op == "Add" and merged < max(first, second) else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one operator, or none."""
        if len(found.nodes) == 1:
            return found.x
        return new.call("", found.root.op, found.x, _merged(found))


def _scalars(found: Match) -> list[Constant]:
    """Return the constant operands, the one in front first."""
    return [tensor for node in found.nodes[::-1] for tensor in node.inputs if isinstance(tensor, Constant)]


def _values(found: Match) -> list[Any]:
    return [scalar.values.reshape(()) for scalar in _scalars(found)]


def _does_nothing(found: Match) -> bool:
    return bool(_values(found)[0] == (1 if found.root.op == "Mul" else 0))


def _merged(found: Match) -> Any:
    first, second = (np.float64(value) for value in _values(found))
    with np.errstate(over="ignore"):
        return np.asarray(first * second if found.root.op == "Mul" else first + second).astype(found.second.dtype)


def _tiny(found: Match) -> float:
    return float(np.finfo(found.second.dtype).tiny)
