"""Splits of which one part is read."""

from __future__ import annotations

from typing import Any

from onnxq.ir import Constant
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule

_BOUNDS_ARE_INPUTS = 10


class SimplifySplits(RewriteRule):
    """A Split into one part is nothing, and one of whose parts only one is read is a Slice."""

    def pattern(self, op: Operators) -> Call:
        """Return any Split."""
        return op.Split(op.any("x"), ..., name="split")

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        outputs = found.split.outputs
        if any(not tensor.name for tensor in outputs) or not outputs:
            return "a part of it is left out"
        if len(outputs) == 1:
            return ""
        read = [tensor for tensor in outputs if tensor.outputs or tensor.returned_by]
        if len(read) != 1:
            return "several of its parts are read"
        if found.opset < _BOUNDS_ARE_INPUTS:
            return "the bounds of a Slice are attributes at this opset"
        return "" if _sizes(found) is not None else "the sizes of its parts are not known"

    def replacement(self, new: New, found: Match) -> Any:
        """Take the one part; what nobody reads may be anything."""
        outputs = found.split.outputs
        if len(outputs) == 1:
            return found.x
        place = next(place for place, tensor in enumerate(outputs) if tensor.outputs or tensor.returned_by)
        sizes = _sizes(found) or []
        start = sum(sizes[:place])
        axis = found.split.attrs.get("axis", 0)
        bounds = (new.constant([number]) for number in (start, start + sizes[place], axis))
        part = new.Slice(found.x, *bounds)
        return [part if index == place else found.x for index in range(len(outputs))]


def _sizes(found: Match) -> list[int] | None:
    """Return how much of the axis each part takes."""
    split, count = found.split, len(found.split.outputs)
    if "split" in split.attrs:
        sizes = [int(size) for size in split.attrs["split"]]
        return sizes if len(sizes) == count else None
    if len(split.inputs) > 1 and split.inputs[1].name:
        tensor = split.inputs[1]
        fixed = isinstance(tensor, Constant) and tensor.input_source is None and len(tensor.shape) == 1
        return [int(size) for size in tensor.values] if fixed and tensor.shape[0] == count else None
    shape, axis = found.x.shape, split.attrs.get("axis", 0)
    if shape is None or not -len(shape) <= axis < len(shape) or not isinstance(shape[axis], int):
        return None
    # The last part is what is left where they cannot all be equal.
    size = -(-shape[axis] // count)
    return [max(0, min(size, shape[axis] - place * size)) for place in range(count)]
