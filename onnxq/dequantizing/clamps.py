"""Clamps that a range of codes took over from Relu and Clip, and the nodes that do the same for floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from onnxq.graph import Constant, Node, Tensor, Variable, constant
from onnxq.operators import Interval, operator_of

_SIX: Final = 6.0
"""Where the one clamp ends that networks have besides Relu."""
# The range's end went through a float32 scale.
_CLOSE: Final = 1e-5
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

    def clamp(self, value: Tensor, low: float, high: float, opset: int, fresh: Callable[[str], str]) -> Node | None:
        """Return the Relu or Clip behind a tensor that is given by its codes reaching from ``low`` to ``high``.

        Args:
            value: the tensor in front of QuantizeLinear.
            low: what the lowest code stands for.
            high: what the highest code stands for.
            opset: of the default domain.
            fresh: makes names new.

        Returns:
            None when the range is an ordinary one, or the values cannot leave it.
        """
        if low != 0 or not isinstance(value, Variable) or not value.inputs or value.inputs[0].op == "Cast":
            return None
        six = abs(high - _SIX) <= _CLOSE * _SIX
        found = self.of(value)
        if found.low >= 0 and (not six or found.high <= max(high, _SIX)):
            return None
        clamped = Variable(fresh(f"{value.name}.clamped"), value.dtype, value.shape)
        self.known[clamped] = Interval(0.0, _SIX if six else max(found.high, 0.0))
        if not six:
            return Node("Relu", fresh(f"{value.name}.relu"), {}, [value], [clamped])
        name = fresh(f"{value.name}.clip")
        if opset < _CLIP_HAS_INPUTS:
            return Node("Clip", name, {"min": 0.0, "max": _SIX}, [value], [clamped])
        ends = [
            constant(fresh(f"{value.name}.{end}"), np.asarray(number, value.dtype or np.float32))
            for end, number in (("minimum", 0.0), ("maximum", _SIX))
        ]
        return Node("Clip", name, {}, [value, *ends], [clamped])
