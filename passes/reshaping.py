"""Reshape, Expand, Concat, Split and Slice: several in a row become one or none."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import Node, constant_values, numbers_of, producer, sole_consumer
from onnxq.ir.symbolic_dims import product
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule
from onnxq.rewrite.shapes import broadcast, named_shape, reshape_target, reshaped
from onnxq.rewrite.soundness import rank

_OPERATORS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_AXES_ARE_INPUT = 13
_HIGHEST_RANK = 64


class MergeReshapes(RewriteRule):
    """``Reshape(Flatten(x), shape) -> Reshape(x, shape)``.

    Merge two of Reshape, Flatten, Squeeze and Unsqueeze; drop one that keeps the shape.

    Two Squeezes or Unsqueezes merge into one, anything else into a Reshape. Not if the resulting shape is not known
    well enough.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        inner = [getattr(op, name)(op.any("x"), ..., name="first", allow_other_consumers=True) for name in _OPERATORS]
        pairs = [getattr(op, name)(call, ..., name="last") for name in _OPERATORS for call in inner]
        return (*pairs, *(getattr(op, name)(op.any("x"), ..., name="last") for name in _OPERATORS))

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        shape = data = named_shape(match.x)
        for node in (match.first, match.last) if "first" in match.values else (match.last,):
            shape = _shape(node, shape)
        if shape is not None and shape == data and None not in shape:
            return match.x
        merged = _merged(match.first, match.last, data, shape) if "first" in match.values else None
        if merged is None:
            return "the shape that it makes is not known well enough"
        op_type, numbers = merged
        if op_type == "Reshape" or match.opset >= _AXES_ARE_INPUT:
            return new.call("", op_type, match.x, new.constant(numbers))
        return new.call("", op_type, match.x, axes=numbers)


def _merged(first: Node, last: Node, data: Any, shape: Any) -> tuple[str, list[int]] | None:
    """Return an operator and its target or axes. ``data`` is the shape of the input, ``shape`` that of the result."""
    if first.op == last.op and first.op in ("Squeeze", "Unsqueeze"):
        rank = None if data is None else len(data)
        if (axes := _merged_axes(first, last, rank)) is not None:
            return first.op, axes
    target = numbers_of(last, 1, "shape") if last.op == "Reshape" else None
    if data is not None and shape is not None and 0 not in (*data, *shape):
        # A target that infers one dimension and copies others already excludes empty data.
        empty = target is None or not {0, -1} <= set(target)
        if (numbers := reshape_target(data, shape, empty=empty)) is not None:
            return "Reshape", numbers
    if target is None or last.attrs.get("allowzero", 0):
        return None
    between = _shape(first, data) or []
    copied = [between[place] if entry == 0 and place < len(between) else entry for place, entry in enumerate(target)]
    whole = [entry for entry in copied if isinstance(entry, int) and entry]
    return ("Reshape", whole) if len(whole) == len(target) else None


def _merged_axes(first: Node, last: Node, rank: int | None) -> list[int] | None:
    """Return the axes of the merged node; axes below 0 need a known rank."""
    inner, outer = numbers_of(first, 1, "axes"), numbers_of(last, 1, "axes")
    if inner is None or outer is None or max(map(abs, (*inner, *outer)), default=0) > _HIGHEST_RANK:
        return None
    grows = 1 if first.op == "Unsqueeze" else -1
    if rank is not None:
        # Axes of an Unsqueeze refer to its output, axes of a Squeeze to its input.
        between = rank + grows * len(inner)
        read, written = (between, between + len(outer)) if grows > 0 else (rank, between)
        if min(read, written) < 1:
            return None
        inner, outer = [axis % read for axis in inner], [axis % written for axis in outer]
    if min((*inner, *outer), default=0) < 0 or len(set(inner)) < len(inner) or len(set(outer)) < len(outer):
        return None
    moved, fixed = (inner, outer) if grows > 0 else (outer, inner)
    return sorted([*fixed, *(_place(axis, set(fixed)) for axis in moved)])


def _place(number: int, taken: set[int]) -> int:
    """Return the ``number``-th index that is not taken."""
    place = -1
    for _ in range(number + 1):
        place += 1
        while place in taken:
            place += 1
    return place


def _shape(node: Node, data: list[Any] | None) -> list[Any] | None:
    if node.op == "Reshape":
        target = numbers_of(node, 1, "shape")
        return None if target is None else reshaped(data, target, literal=bool(node.attrs.get("allowzero", 0)))
    if data is None:
        return None
    rank = len(data)
    if node.op == "Flatten":
        axis = node.attrs.get("axis", 1)
        return [product(data[:axis]), product(data[axis:])] if -rank <= axis <= rank else None
    ones = [place for place, extent in enumerate(data) if extent == 1]
    axes = numbers_of(node, 1, "axes", ones if all(isinstance(extent, int) for extent in data) else None)
    if axes is None:
        return None
    if node.op == "Squeeze":
        gone = {axis % rank for axis in axes} if rank else set()
        sound = not any(isinstance(data[place], int) and data[place] != 1 for place in gone)
        return [extent for place, extent in enumerate(data) if place not in gone] if sound else None
    rank_after = rank + len(axes)
    new = {axis % rank_after for axis in axes}
    kept = iter(data)
    return [1 if place in new else next(kept) for place in range(rank_after)] if len(new) == len(axes) else None


# Expand ---------------------------------------------------------------------------------------------------------------

_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Pow", "Equal", "Less", "Greater", "And", "Or", "PRelu", "Where")
# PRelu broadcasts its slope alone.
_SLOPE = 1


class DropExpands(RewriteRule):
    """``Add(Expand(x, s), y) -> Add(x, y)``.

    Drop an Expand that keeps the shape, or that is in front of an operator that broadcasts.

    Not if the operator behind would make another shape.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        expand = op.Expand(op.any("x"), op.any("target"), allow_other_consumers=True)
        behind = []
        for op_type in _BROADCASTING:
            count = 3 if op_type == "Where" else 2
            for index in (_SLOPE,) if op_type == "PRelu" else range(count):
                operands = [expand if place == index else op.any(f"operand{place}") for place in range(count)]
                behind.append(getattr(op, op_type)(*operands, name="last"))
        return (*behind, op.Expand(op.any("x"), op.any("target")))

    def check(self, match: Match) -> str:
        data, target = named_shape(match.x), constant_values(match.target)
        wide = None if data is None or target is None else broadcast([data, target])
        if data is None or wide is None or None in wide:
            return "the shape that it makes is not known"
        if "last" not in match.values:
            return "" if wide == data else "it makes another shape"
        others: list[Any] = [named_shape(tensor) for tensor in _operands(match) if tensor is not None]
        if None in others:
            return "the shape of another operand is not known"
        before, after = broadcast([wide, *others]), broadcast([data, *others])
        return "" if before == after and None not in before else "the operator behind would make another shape"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if "last" not in match.values:
            return match.x
        return new.like(match.last, *(match.x if tensor is None else tensor for tensor in _operands(match)))


def _operands(match: Match) -> list[Any]:
    """Return the inputs of the operator, with None for the output of the Expand."""
    return [None if tensor.inputs and tensor.inputs[0] in match.nodes[1:] else tensor for tensor in match.last.inputs]


# Concat and Split -----------------------------------------------------------------------------------------------------


class MergeConcats(RewriteRule):
    """``Concat(Concat(a, b), c) -> Concat(a, b, c)``.

    Merge a Concat into the Concat on the same axis that alone reads it; drop one of a single tensor.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Concat(..., name="concat")

    def check(self, match: Match) -> str:
        parts = _parts(match.concat)
        unlike = len(parts) > 1 and parts == list(match.concat.inputs)
        return "it reads no other Concat that it could be one with" if unlike else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        parts = _parts(match.concat)
        return new.like(match.concat, *parts) if len(parts) > 1 else parts[0]


def _parts(concat: Node) -> list[Any]:
    return [
        part
        for tensor in concat.inputs
        for part in (tensor.inputs[0].inputs if _is_inner(tensor, concat) else (tensor,))
    ]


def _is_inner(tensor: Any, concat: Node) -> bool:
    inner = producer(tensor)
    if inner is None or sole_consumer(tensor) is None:
        return False
    if inner.op != "Concat" or inner.domain or len(inner.inputs) < 2:
        return False
    inner_axis, axis = inner.attrs.get("axis"), concat.attrs.get("axis")
    if inner_axis is None or axis is None or inner_axis == axis or tensor.shape is None:
        return inner_axis is not None and inner_axis == axis
    rank = max(1, len(tensor.shape))
    return bool(inner_axis % rank == axis % rank)


_BOUNDS_ARE_INPUTS = 10


class SimplifySplits(RewriteRule):
    """``Split(x)[1] -> Slice(x)``.

    Drop a Split into one part; replace one with a single used output by Slice.

    Not if several parts are read, or their sizes are unknown.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Split(op.any("x"), ..., name="split")

    def check(self, match: Match) -> str:
        outputs = match.split.outputs
        if any(not tensor.name for tensor in outputs) or not outputs:
            return "a part of it is left out"
        if len(outputs) == 1:
            return ""
        read = [tensor for tensor in outputs if tensor.outputs or tensor.graph_output_of]
        if len(read) != 1:
            return "several of its parts are read"
        return "" if match.opset >= _BOUNDS_ARE_INPUTS else "the bounds of a Slice are attributes at this opset"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        outputs = match.split.outputs
        if len(outputs) == 1:
            return match.x
        place = next(place for place, tensor in enumerate(outputs) if tensor.outputs or tensor.graph_output_of)
        sizes = _sizes(match)
        if sizes is None:
            return "the sizes of its parts are not known"
        start = sum(sizes[:place])
        axis = match.split.attrs.get("axis", 0)
        bounds = (new.constant([number]) for number in (start, start + sizes[place], axis))
        part = new.Slice(match.x, *bounds)
        return [part if index == place else match.x for index in range(len(outputs))]


def _sizes(match: Match) -> list[int] | None:
    split, count = match.split, len(match.split.outputs)
    sizes = numbers_of(split, 1, "split", [])
    if sizes != []:
        return sizes if sizes is not None and len(sizes) == count else None
    shape, axis = match.x.shape, split.attrs.get("axis", 0)
    if shape is None or not -len(shape) <= axis < len(shape) or not isinstance(shape[axis], int):
        return None
    # The last part is smaller if the axis does not divide evenly.
    size = -(-shape[axis] // count)
    return [max(0, min(size, shape[axis] - place * size)) for place in range(count)]


# Slice ----------------------------------------------------------------------------------------------------------------

_UNBOUNDED = np.iinfo(np.int32).max
_Bounds = list[tuple[int, int, int, int]]


class MergeSlices(RewriteRule):
    """``Slice(Slice(x, axis=0), axis=1) -> Slice(x, axes=[0, 1])``.

    Merge two Slices of different axes; drop the bounds that take all entries.

    Not if both cut the same axis, or bounds are computed.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return (
            op.Slice(op.Slice(op.any("x"), ..., name="first", allow_other_consumers=True), ..., name="last"),
            op.Slice(op.any("x"), ..., name="last"),
        )

    def check(self, match: Match) -> str:
        return "" if match.opset >= _BOUNDS_ARE_INPUTS else "its bounds are attributes at this opset"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        bounds: _Bounds = []
        for node in (match.first, match.last) if "first" in match.values else (match.last,):
            cut = _bounds(node, rank(match.x))
            if cut is None:
                return "its bounds are not constant"
            bounds += cut
        axes = [axis for _, _, axis, _ in bounds]
        bounds = [bound for bound in bounds if not _takes_all(bound, match.x.shape)]
        if "first" not in match.values:
            return "it takes a part" if bounds else match.x
        if min(axes, default=0) < 0:
            return "the rank is not known, and axes count from its end"
        if len(set(axes)) < len(axes):
            return "both take parts of the same axis"
        if not bounds:
            return match.x
        return new.like(match.last, match.x, *(new.constant(list(numbers)) for numbers in zip(*bounds, strict=True)))


def _bounds(node: Node, rank: int | None) -> _Bounds | None:
    read = [constant_values(tensor) if tensor.name else [] for tensor in node.inputs[1:]]
    if len(read) < 2 or None in read:
        return None
    starts, ends, axes, steps = [*(numbers or [] for numbers in read), [], []][:4]
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        return None
    places = [axis + rank if axis < 0 and rank is not None else axis for axis in axes]
    return list(zip(starts, ends, places, steps, strict=True))


def _takes_all(bound: tuple[int, int, int, int], shape: Any) -> bool:
    start, end, axis, step = bound
    extent = shape[axis] if shape is not None and 0 <= axis < len(shape) else None
    if step != 1:
        return False
    if not isinstance(extent, int):
        return start == 0 and end >= _UNBOUNDED
    return (start == 0 or start <= -extent) and end >= extent
