"""Clamps that a range of codes took over from Relu and Clip, and the nodes that do the same for floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from onnxq.graph import Constant, Node, Tensor, Variable, constant
from onnxq.operators import OPERATORS, Role

_SIX: Final = 6.0
"""Where the one clamp ends that networks have besides Relu."""
# The range's end went through a float32 scale.
_CLOSE: Final = 1e-5
_CLIP_HAS_INPUTS: Final = 11
# Larger constants are not looked at.
_MOST_ELEMENTS: Final = 1 << 16


class Interval(NamedTuple):
    """The values that a tensor can have, both ends included."""

    low: float = -math.inf
    high: float = math.inf


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
        if node.domain or not node.outputs:
            return
        row = OPERATORS.get(node.op)
        if node.op == "Clip":
            found = _clipped(node, self.of(node.inputs[0]))
        elif node.op in _FIXED:
            found = _FIXED[node.op]
        elif node.op == "Mul" and node.inputs[0] is node.inputs[1]:
            found = Interval(0.0)
        elif node.op in _RULES:
            data = node.inputs if row is None or row.data is None else [node.inputs[index] for index in row.data]
            found = _RULES[node.op]([self.of(tensor) for tensor in data])
        else:
            return
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


def _clipped(node: Node, data: Interval) -> Interval:
    ends = []
    for index, (key, unknown) in enumerate((("min", -math.inf), ("max", math.inf)), start=1):
        tensor = node.inputs[index] if index < len(node.inputs) and node.inputs[index].name else None
        if isinstance(tensor, Constant) and math.prod(tensor.shape) == 1:
            ends.append(float(tensor.values.item()))
        else:
            ends.append(unknown if tensor is not None else float(node.attrs.get(key, unknown)))
    low, high = ends
    return Interval(max(data.low, low), max(min(data.high, high), low))


def _together(data: Sequence[Interval]) -> Interval:
    return Interval(min(one.low for one in data), max(one.high for one in data))


def _sum(data: Sequence[Interval]) -> Interval:
    return Interval(sum(one.low for one in data), sum(one.high for one in data))


def _difference(data: Sequence[Interval]) -> Interval:
    return Interval(data[0].low - data[1].high, data[0].high - data[1].low)


def _product(data: Sequence[Interval]) -> Interval:
    # Zero times infinity is zero here: the end is not reached.
    corners = [one * other if one and other else 0.0 for one in data[0] for other in data[1]]
    return Interval(min(corners), max(corners))


def _rectified(data: Sequence[Interval]) -> Interval:
    return Interval(max(data[0].low, 0.0), max(data[0].high, 0.0))


def _leaky(data: Sequence[Interval]) -> Interval:
    return data[0] if data[0].low >= 0 else Interval()


def _power(data: Sequence[Interval]) -> Interval:
    even = data[1].low == data[1].high and data[1].low % 2 == 0
    return Interval(0.0) if even or data[0].low >= 0 else Interval()


def _of_one_sign(data: Sequence[Interval]) -> Interval:
    return Interval(0.0) if all(one.low >= 0 for one in data) else Interval()


# Pad brings in a value of its own, and Resize can overshoot.
_MOVING: Final = frozenset({op for op, row in OPERATORS.items() if row.role is Role.CARRIER} - {"Pad", "Resize"})
_AVERAGING: Final = frozenset({"AveragePool", "Cast", "GlobalAveragePool", "GlobalMaxPool", "Identity"})
_FIXED: Final[Mapping[str, Interval]] = {
    **{op: Interval(*row.fixed_range) for op, row in OPERATORS.items() if row.fixed_range is not None},
    **dict.fromkeys(("Cos", "Erf", "Sin", "Softsign"), Interval(-1.0, 1.0)),
    **dict.fromkeys(("Abs", "Exp", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Shape", "Size", "Sqrt"), Interval(0.0)),
}
_RULES: Final[Mapping[str, Callable[[Sequence[Interval]], Interval]]] = {
    **dict.fromkeys(_MOVING | _AVERAGING, _together),
    "Add": _sum,
    "Div": _of_one_sign,
    "LeakyRelu": _leaky,
    "Mul": _product,
    "Pow": _power,
    "Reciprocal": _of_one_sign,
    "ReduceMean": lambda data: data[0],
    "ReduceSum": lambda data: _of_one_sign(data[:1]),
    "Relu": _rectified,
    "Sub": _difference,
}
"""What follows for the first output from the intervals of the data inputs."""
