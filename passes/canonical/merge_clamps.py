"""Limits of values, which Relu, Clip, Max and Min set."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import Constant, Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule

_Operand = Any


class MergeClamps(RewriteRule):
    """Max, Min, Clip and Relu by constants, and two of them in a row, are one Clip or Relu.

    A Clip that limits nothing goes. A Clip without a limit has the largest number of its type as one; Max, Min and Relu
    have none there, so that infinite values pass.
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
        if limits is None or not limits[0] <= limits[1]:
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
        most = float(np.finfo(found.x.dtype).max)
        lowest, highest = limits[0] if limits[0] != -most else None, limits[1] if limits[1] != most else None
        if found.opset < _LIMITS_ARE_INPUTS:
            return new.Clip(found.x, min=lowest, max=highest)
        return new.Clip(found.x, lowest, *([] if highest is None else [highest]))


_LIMITS_ARE_INPUTS = 11
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
    """Return between what the values lie behind all nodes of a match, or None if that is not known."""
    most = float(np.finfo(dtype).max)
    outer = _limits_of(found.outer, most)
    inner = _limits_of(found.inner, most) if "inner" in found.values else (-np.inf, np.inf)
    if outer is None or inner is None or not outer[0] <= outer[1]:
        return None
    low, high = (float(min(max(limit, outer[0]), outer[1])) for limit in inner)
    return low, high


def _limits_of(node: Node, most: float) -> tuple[float, float] | None:
    if node.op == "Relu":
        return 0.0, np.inf
    if node.op == "Clip":
        low, high = (_limit(node, 1, "min", -most), _limit(node, 2, "max", most))
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
