"""Slices of everything, and Slices of different axes that follow each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import Constant, Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule

_BOUNDS_ARE_INPUTS = 10
_UNBOUNDED = np.iinfo(np.int32).max
_Bounds = list[tuple[int, int, int, int]]


class MergeSlices(RewriteRule):
    """Two Slices of different axes become one, and what takes all entries goes."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both forms."""
        return (
            op.Slice(op.Slice(op.any("x"), ..., name="first", shared=True), ..., name="last"),
            op.Slice(op.any("x"), ..., name="last"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why they stay."""
        if found.opset < _BOUNDS_ARE_INPUTS:
            return "its bounds are attributes at this opset"
        bounds = _all_bounds(found)
        if bounds is None:
            return "its bounds are not constant"
        if "first" not in found.values:
            return "" if _taken(found, bounds) == [] else "it takes a part"
        axes = [axis for _, _, axis, _ in bounds]
        if min(axes, default=0) < 0:
            return "the rank is not known, and axes count from its end"
        return "" if len(set(axes)) == len(axes) else "both take parts of the same axis"

    def replacement(self, new: New, found: Match) -> Any:
        """Make one Slice, or none."""
        bounds = _taken(found, _all_bounds(found) or [])
        if not bounds:
            return found.x
        return new.like(found.last, found.x, *(new.constant(list(numbers)) for numbers in zip(*bounds, strict=True)))


def _all_bounds(found: Match) -> _Bounds | None:
    """Return start, end, axis and step for each axis that the nodes name."""
    rank = None if found.x.shape is None else len(found.x.shape)
    made: _Bounds = []
    for node in (found.first, found.last) if "first" in found.values else (found.last,):
        bounds = _bounds(node, rank)
        if bounds is None:
            return None
        made.extend(bounds)
    return made


def _bounds(node: Node, rank: int | None) -> _Bounds | None:
    read = [_numbers(tensor) if tensor.name else [] for tensor in node.inputs[1:]]
    if len(read) < 2 or None in read:
        return None
    starts, ends, axes, steps = [*(numbers or [] for numbers in read), [], []][:4]
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        return None
    places = [axis + rank if axis < 0 and rank is not None else axis for axis in axes]
    return list(zip(starts, ends, places, steps, strict=True))


def _taken(found: Match, bounds: _Bounds) -> _Bounds:
    """Return the bounds that leave something out."""
    shape = found.x.shape
    return [bound for bound in bounds if not _takes_all(bound, shape)]


def _takes_all(bound: tuple[int, int, int, int], shape: Any) -> bool:
    start, end, axis, step = bound
    extent = shape[axis] if shape is not None and 0 <= axis < len(shape) else None
    if step != 1:
        return False
    if not isinstance(extent, int):
        return start == 0 and end >= _UNBOUNDED
    return (start == 0 or start <= -extent) and end >= extent


def _numbers(tensor: Any) -> list[int] | None:
    if not isinstance(tensor, Constant) or tensor.input_source is not None or len(tensor.shape) != 1:
        return None
    return [int(number) for number in tensor.values]
