"""Chains of Reshape, Flatten, Squeeze and Unsqueeze become one of them."""

from __future__ import annotations

from typing import Any

from onnxq.ir import Constant, Node
from onnxq.ir.shape_entries import product
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.shape_targets import reshape_target, reshaped

_OPERATORS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_TARGET_IS_INPUT = 5
_AXES_ARE_INPUT = 13
_HIGHEST_RANK = 64


class MergeReshapes(RewriteRule):
    """Two operators that change the shape alone become one; one that leaves it as it is goes.

    Squeezes and Unsqueezes stay what they are where both are the same, anything else becomes a Reshape.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return all pairs, and the operators alone."""
        inner = [getattr(op, one)(op.any("x"), ..., name="first", shared=True) for one in _OPERATORS]
        pairs = [getattr(op, other)(call, ..., name="last") for other in _OPERATORS for call in inner]
        return (*pairs, *(getattr(op, one)(op.any("x"), ..., name="last") for one in _OPERATORS))

    def obstacle(self, found: Match) -> str:
        """Return why they cannot be one."""
        if found.opset < _TARGET_IS_INPUT:
            return "Reshape takes no input at this opset"
        if _is_nothing(found) or ("first" in found.values and _merged(found) is not None):
            return ""
        return "the shape that it makes is not known well enough"

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one operator."""
        if _is_nothing(found):
            return found.x
        op_type, numbers = _merged(found) or ("", [])
        if op_type == "Reshape" or found.opset >= _AXES_ARE_INPUT:
            return new.call("", op_type, found.x, new.constant(numbers))
        return new.call("", op_type, found.x, axes=numbers)


def _is_nothing(found: Match) -> bool:
    data = _data(found)
    made = _made(found, data)
    return made is not None and made == data and None not in made


def _data(found: Match) -> list[Any] | None:
    """Return the shape of what is read; what is unknown of it has a name of its own."""
    shape = found.x.shape
    if shape is None:
        return None
    return [f"#{place}" if extent is None else extent for place, extent in enumerate(shape)]


def _made(found: Match, data: list[Any] | None) -> list[Any] | None:
    for node in (found.first, found.last) if "first" in found.values else (found.last,):
        data = _shape(node, data)
    return data


def _merged(found: Match) -> tuple[str, list[int]] | None:
    """Return the operator that does what both do, and its axes or target."""
    first, last = found.first, found.last
    data = _data(found)
    if first.op == last.op and first.op in ("Squeeze", "Unsqueeze"):
        rank = None if data is None else len(data)
        if (axes := _merged_axes(first, last, rank)) is not None:
            return first.op, axes
    target = _target(last) if last.op == "Reshape" else None
    between, made = _shape(first, data), _made(found, data)
    if data is not None and made is not None and 0 not in (*data, *made):
        # What infers one dimension and copies others already cannot be empty.
        empty = target is None or not {0, -1} <= set(target)
        if (numbers := reshape_target(data, made, empty=empty)) is not None:
            return "Reshape", numbers
    if target is None or last.attrs.get("allowzero", 0):
        return None
    copied = [
        between[place] if entry == 0 and between is not None and place < len(between) else entry
        for place, entry in enumerate(target)
    ]
    whole = [entry for entry in copied if isinstance(entry, int) and entry]
    return ("Reshape", whole) if len(whole) == len(target) else None


def _merged_axes(first: Node, last: Node, rank: int | None) -> list[int] | None:
    """Return the axes of one Squeeze or Unsqueeze for two; those below 0 count from the end of a known rank."""
    one, other = _axes(first), _axes(last)
    if one is None or other is None or max(map(abs, (*one, *other)), default=0) > _HIGHEST_RANK:
        return None
    grows = 1 if first.op == "Unsqueeze" else -1
    if rank is not None:
        # An Unsqueeze counts axes of what it makes, a Squeeze of what it reads.
        between = rank + grows * len(one)
        read, written = (between, between + len(other)) if grows > 0 else (rank, between)
        if min(read, written) < 1:
            return None
        one, other = [axis % read for axis in one], [axis % written for axis in other]
    if min((*one, *other), default=0) < 0 or len(set(one)) < len(one) or len(set(other)) < len(other):
        return None
    moved, fixed = (one, other) if grows > 0 else (other, one)
    return sorted([*fixed, *(_place(axis, set(fixed)) for axis in moved)])


def _place(number: int, taken: set[int]) -> int:
    """Return the place of that number among those which are not taken."""
    place = -1
    for _ in range(number + 1):
        place += 1
        while place in taken:
            place += 1
    return place


def _shape(node: Node, data: list[Any] | None) -> list[Any] | None:
    """Return the shape that a node makes of another."""
    if node.op == "Reshape":
        target = _target(node)
        return None if target is None else reshaped(data, target, literal=bool(node.attrs.get("allowzero", 0)))
    if data is None:
        return None
    rank = len(data)
    if node.op == "Flatten":
        axis = node.attrs.get("axis", 1)
        return [product(data[:axis]), product(data[axis:])] if -rank <= axis <= rank else None
    if node.op == "Squeeze" and "axes" not in node.attrs and (len(node.inputs) < 2 or not node.inputs[1].name):
        return [extent for extent in data if extent != 1] if all(isinstance(extent, int) for extent in data) else None
    axes = _axes(node)
    if axes is None:
        return None
    if node.op == "Squeeze":
        gone = {axis % rank for axis in axes} if rank else set()
        sound = not any(isinstance(data[place], int) and data[place] != 1 for place in gone)
        return [extent for place, extent in enumerate(data) if place not in gone] if sound else None
    made = rank + len(axes)
    new = {axis % made for axis in axes}
    kept = iter(data)
    return [1 if place in new else next(kept) for place in range(made)] if len(new) == len(axes) else None


def _target(node: Node) -> list[int] | None:
    return _numbers(node.inputs[1]) if len(node.inputs) > 1 else None


def _axes(node: Node) -> list[int] | None:
    """Return the axes, None where they are left out or not known."""
    if "axes" in node.attrs:
        return [int(axis) for axis in node.attrs["axes"]]
    return _numbers(node.inputs[1]) if len(node.inputs) > 1 else None


def _numbers(tensor: Any) -> list[int] | None:
    if not isinstance(tensor, Constant) or tensor.input_source is not None or len(tensor.shape) != 1:
        return None
    return [int(number) for number in tensor.values]
