"""Clamps that a range of codes took over from Relu and Clip, and the nodes that do the same for floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from onnxq.ir import Constant, Node, Tensor, Variable, constant
from onnxq.ops import Interval, operator_of

# Clamps end at numbers of one digit, above zero also at halves below this; measured ranges hardly ever do.
_MOST_HALVES: Final = 100.0
# The range's end went through a float32 scale.
_CLOSE: Final = 1e-6
_CLIP_HAS_INPUTS: Final = 11
# Larger constants are not looked at.
_MOST_ELEMENTS: Final = 1 << 16


@dataclass(eq=False)
class Intervals:
    """What is known about the values of tensors, whatever the model is fed.

    Attributes:
        known: by tensor; one that is missing can have any value.
    """

    known: dict[Tensor, Interval] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Interval:
        """Return the interval of a tensor."""
        if tensor not in self.known and isinstance(tensor, Constant) and math.prod(tensor.shape) <= _MOST_ELEMENTS:
            values = tensor.values
            if values.size and values.dtype.kind in "fiu" and np.isfinite(values.astype(np.float32)).all():
                self.known[tensor] = Interval(float(values.min()), float(values.max()))
        return self.known.get(tensor, Interval())

    def see(self, node: Node) -> None:
        """Take note of what a node makes; nodes are seen in an order of execution."""
        operator = operator_of(node)
        if operator is None or operator.interval is None or not node.outputs:
            return
        found = operator.interval(node, [self.of(tensor) for tensor in node.inputs])
        self.known[node.outputs[0]] = found
        if node.op == "Split":
            self.known.update(dict.fromkeys(node.outputs, found))

    def clamp(
        self, value: Tensor, low: float, high: float, step: float, opset: int, fresh: Callable[[str], str]
    ) -> Node | None:
        """Return the Relu or Clip behind a tensor that is given by its codes reaching from ``low`` to ``high``.

        The quantized model clamps there as well, half a step aside at most, so that the node adds no error.

        Args:
            value: the tensor in front of QuantizeLinear.
            low: what the lowest code stands for.
            high: what the highest code stands for.
            step: from a code to the next one.
            opset: of the default domain.
            fresh: makes names new.

        Returns:
            None when the range is an ordinary one, or the values cannot leave it.
        """
        if not isinstance(value, Variable) or not value.inputs or value.inputs[0].op == "Cast":
            return None
        ends, found = _ends(low, high, step), self.of(value)
        if ends is None or (found.low >= ends.low and found.high <= max(high, ends.high)):
            return None
        clamped = Variable(fresh(f"{value.name}.clamped"), value.dtype, value.shape)
        self.known[clamped] = Interval(ends.low, min(ends.high, max(found.high, ends.low)))
        if ends == Interval(0.0):
            return Node("Relu", fresh(f"{value.name}.relu"), {}, [value], [clamped])
        name = fresh(f"{value.name}.clip")
        if opset < _CLIP_HAS_INPUTS:
            return Node("Clip", name, {"min": ends.low, "max": ends.high}, [value], [clamped])
        limits = [
            constant(fresh(f"{value.name}.{end}"), np.asarray(number, value.dtype or np.float32))
            for end, number in zip(("minimum", "maximum"), ends, strict=True)
        ]
        return Node("Clip", name, {}, [value, *limits], [clamped])


def _ends(low: float, high: float, step: float) -> Interval | None:
    """Return where the clamp ends that a range of codes took over; infinity behind a Relu, None where there was none.

    >>> _ends(0.0, 6.0, 6 / 255), _ends(0.0, 4.7312, 4.7312 / 255), _ends(-128 * 2 / 255, 127 * 2 / 255, 2 / 255)
    (Interval(low=0.0, high=6.0), Interval(low=0.0, high=inf), Interval(low=-1.0, high=1.0))
    """
    if low == 0:
        halves = round(2 * high) / 2 if high < _MOST_HALVES else 0.0
        return Interval(0.0, next((one for one in (_rounded(high), halves) if _is_close(one, high, high)), math.inf))
    # The zero point was rounded, and both ends with it.
    start, width = _rounded(low), high - low
    end = 0.0 if _is_close(start + width, 0.0, width) else _rounded(start + width)
    moved = abs(start - low) > step / 2 + _CLOSE * width
    return Interval(start, end) if not moved and _is_close(end, start + width, width) else None


def _rounded(number: float) -> float:
    return float(f"{number:.1g}")


def _is_close(one: float, other: float, size: float) -> bool:
    return abs(one - other) <= _CLOSE * size
