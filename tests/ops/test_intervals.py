"""The rules of intervals; what operators give of them is tested against the runtime with the clamps."""

from __future__ import annotations

import math

import pytest

from onnxq.ir import Node, Variable
from onnxq.ops import Interval
from onnxq.ops.intervals import IntervalRule, added, always, clipped, first, multiplied, power, together

X, Y = Variable("x"), Variable("y")


@pytest.mark.parametrize(
    ("rule", "node", "given", "expected"),
    [
        (always(0.0), Node("Exp"), [(-1, 1)], (0, math.inf)),
        (first, Node("Reshape"), [(-1, 1), (3, 4)], (-1, 1)),
        (together, Node("Concat"), [(-1, 1), (3, 4)], (-1, 4)),
        (added, Node("Add"), [(-1, 1), (3, math.inf)], (2, math.inf)),
        (multiplied, Node("Mul", inputs=[X, Y]), [(0, math.inf), (0, 2)], (0, math.inf)),
        (multiplied, Node("Mul", inputs=[X, X]), [(-2, 2), (-2, 2)], (0, math.inf)),
        (power, Node("Pow"), [(-2, 2), (3, 3)], (-math.inf, math.inf)),
        (power, Node("Pow"), [(-2, 2), (2, 2)], (0, math.inf)),
        (clipped, Node("Clip", inputs=[X, Y]), [(-2, 2), (1, 1)], (1, 2)),
        (clipped, Node("Clip", attrs={"max": 1.0}, inputs=[X]), [(-2, 2)], (-2, 1)),
    ],
)
def test_rules(rule: IntervalRule, node: Node, given: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    assert rule(node, [Interval(*one) for one in given]) == expected
