"""Limits of values, which Relu, Clip, Max and Min set."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.graph import Call, Constant, Match, New, Node, Operators, RewriteRule

_Operand = Any


class MergeClamps(RewriteRule):
    """Max, Min, Clip and Relu by constants, and two of them in a row, are one Clip or Relu.

    A Clip that limits nothing goes.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for two in a row, and for each alone but Relu."""
        x = op.any("x")
        pairs = [outer for inner in _clamps(op, x, "inner") for outer in _clamps(op, inner, "outer")]
        return (*pairs, *_clamps(op, x, "outer")[1:])

    def obstacle(self, found: Match) -> str:
        """Return why they stay."""
        if found.opset < 6:
            return "operators of this opset have no such limits"
        if isinstance(found.x, Constant):
            return "its data is constant"
        dtype = np.dtype(found.x.dtype or "O")
        if dtype.kind != "f":
            return "its data is not known to be floating point"
        limits = _limits(found, dtype)
        if limits is None or limits[0] > limits[1]:
            return "its limits are computed, or cross"
        rank = 0 if found.x.shape is None else len(found.x.shape)
        if any(len(tensor.shape) > rank for node in found.nodes for tensor in _operands(node)):
            return "its limit may raise the rank"
        if len(found.nodes) == 1 and found.outer.op == "Clip" and limits not in _NO_CLIP:
            return "it is a Clip already"
        return ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one operator, or none."""
        limits = _limits(found, np.dtype(found.x.dtype))
        assert limits is not None, "looked at before"
        if limits in _NO_CLIP:
            return found.x if limits[0] else new.Relu(found.x)
        lowest, highest = (None if np.isinf(limit) else limit for limit in limits)
        if found.opset < 11:
            return new.Clip(found.x, min=lowest, max=highest)
        return new.Clip(found.x, lowest, *([] if highest is None else [highest]))


_NO_CLIP = ((-np.inf, np.inf), (0.0, np.inf))


def _clamps(op: Operators, x: _Operand, name: str) -> list[Call]:
    limit = op.scalar(f"{name} limit")
    return [
        op.Relu(x, name=name),
        op.Clip(x, ..., name=name),
        op.Max(x, limit, name=name),
        op.Min(x, limit, name=name),
    ]


def _limits(found: Match, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """Return between what the values lie behind all nodes of a match; what the type cannot exceed is no limit."""
    outer = _limits_of(found.outer)
    inner = _limits_of(found.inner) if "inner" in found.values else (-np.inf, np.inf)
    if outer is None or inner is None or outer[0] > outer[1]:
        return None
    low, high = (float(min(max(limit, outer[0]), outer[1])) for limit in inner)
    most = float(np.finfo(dtype).max)
    return low if low > -most else -np.inf, high if high < most else np.inf


def _limits_of(node: Node) -> tuple[float, float] | None:
    if node.op == "Relu":
        return 0.0, np.inf
    if node.op == "Clip":
        low, high = (_limit(node, 1, "min", -np.inf), _limit(node, 2, "max", np.inf))
        return None if low is None or high is None else (low, high)
    value = float(_operands(node)[0].values.item())
    return (value, np.inf) if node.op == "Max" else (-np.inf, value)


def _limit(node: Node, index: int, name: str, default: float) -> float | None:
    tensor = node.inputs[index] if index < len(node.inputs) else None
    if tensor is None or not tensor.name:
        return float(node.attrs.get(name, default))
    fixed = isinstance(tensor, Constant) and tensor.input_source is None and all(size == 1 for size in tensor.shape)
    return float(tensor.values.item()) if fixed else None


def _operands(node: Node) -> list[Constant]:
    """Return the constant operand of a Max or Min."""
    return [tensor for tensor in node.inputs if isinstance(tensor, Constant)] if node.op in ("Max", "Min") else []
