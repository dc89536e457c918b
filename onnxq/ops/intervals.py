"""Interval arithmetic: the range of an operator's output from the ranges of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from onnxq.ir import Node


class Interval(NamedTuple):
    """The range of a tensor's values, both ends included."""

    low: float = -math.inf
    high: float = math.inf


IntervalRule: TypeAlias = "Callable[[Node, Sequence[Interval]], Interval]"
"""Maps a node and the intervals of its inputs to the interval of its first output."""


def always(low: float = -math.inf, high: float = math.inf) -> IntervalRule:
    """Return a rule for operators whose output always lies in ``[low, high]``."""
    return lambda node, given: Interval(low, high)


def first(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for operators that move or average the values of their first input."""
    return given[0]


def together(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for operators that move the values of all inputs."""
    return Interval(min(one.low for one in given), max(one.high for one in given))


def padded(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Pad, which fills in a constant (0 by default), or values of its input in other modes."""
    if node.attrs.get("mode", "constant") != "constant":
        return given[0]
    filled = len(node.inputs) > 2 and node.inputs[2].name
    number = float(node.attrs.get("value", 0.0))
    return together(node, [given[0], given[2] if filled else Interval(number, number)])


def added(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Add."""
    return Interval(sum(one.low for one in given), sum(one.high for one in given))


def difference(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Sub."""
    return Interval(given[0].low - given[1].high, given[0].high - given[1].low)


def multiplied(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Mul; a tensor times itself is a square."""
    if node.inputs[0] is node.inputs[1]:
        return Interval(0.0)
    # Zero times infinity is zero here, because no value is infinite.
    corners = [one * other if one and other else 0.0 for one in given[0] for other in given[1]]
    return Interval(min(corners), max(corners))


def rectified(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Relu."""
    return Interval(max(given[0].low, 0.0), max(given[0].high, 0.0))


def leaky(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for LeakyRelu, whose slope below zero may have any sign."""
    return given[0] if given[0].low >= 0 else Interval()


def clipped(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Clip, whose limits are inputs, or attributes below opset 11."""
    data, (low, high) = given[0], _limits(node, given)
    return Interval(max(data.low, low), max(min(data.high, high), low))


def power(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for Pow."""
    even = given[1].low == given[1].high and given[1].low % 2 == 0
    return Interval(0.0) if even or given[0].low >= 0 else Interval()


def of_one_sign(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for operators whose output is at least 0 if all inputs are."""
    return Interval(0.0) if all(one.low >= 0 for one in given) else Interval()


def summed(node: Node, given: Sequence[Interval]) -> Interval:
    """Rule for ReduceSum, whose second input names the axes."""
    return of_one_sign(node, given[:1])


def _limits(node: Node, given: Sequence[Interval]) -> tuple[float, float]:
    """Return the lowest lower limit and the highest upper limit of a Clip."""
    ends = []
    for index, (name, unknown) in enumerate((("min", -math.inf), ("max", math.inf)), start=1):
        if index < len(node.inputs) and node.inputs[index].name:
            ends.append(given[index][index - 1])
        else:
            ends.append(float(node.attrs.get(name, unknown)))
    return ends[0], ends[1]
