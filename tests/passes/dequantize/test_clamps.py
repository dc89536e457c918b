"""The intervals of values, and the clamps in front of quantizers that follow from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.ir import Graph, Node, Tensor, Variable, constant, to_model
from onnxq.passes.dequantize.clamps import Interval, Intervals
from onnxq.runtime.sessions import open_session, run


def made_by(op: str, *inputs: Tensor, **attributes: Any) -> tuple[Node, Variable]:
    output = Variable("y", np.dtype(np.float32), [2])
    return Node(op, op, attributes, list(inputs), [output]), output


ANY = Interval()
INF = math.inf


def interval(op: str, *inputs: Interval | Tensor, **attributes: Any) -> Interval:
    """What a node gives whose inputs lie in these intervals."""
    known = Intervals()
    tensors = [Variable(f"x{index}") if isinstance(one, Interval) else one for index, one in enumerate(inputs)]
    known.known.update({t: one for t, one in zip(tensors, inputs, strict=True) if isinstance(one, Interval)})
    node, output = made_by(op, *tensors, **attributes)
    known.see(node)
    return known.of(output)


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("Relu", [ANY], (0, INF)),
        ("Relu", [(-3, 4)], (0, 4)),
        ("Relu", [(1, 4)], (1, 4)),
        ("Sigmoid", [ANY], (0, 1)),
        ("Softmax", [ANY], (0, 1)),
        ("Tanh", [ANY], (-1, 1)),
        ("Erf", [ANY], (-1, 1)),
        ("Exp", [ANY], (0, INF)),
        ("LeakyRelu", [(0, 3)], (0, 3)),
        ("LeakyRelu", [(-1, 3)], ANY),
        ("AveragePool", [(2, 3)], (2, 3)),
        ("ReduceMean", [(2, 3), (0, 0)], (2, 3)),
        ("Concat", [(0, 3), (-1, 2)], (-1, 3)),
        ("Concat", [(0, 3), ANY], ANY),
        ("Add", [(-1, 3), (1, INF)], (0, INF)),
        ("Add", [(-1, 3), ANY], ANY),
        ("Div", [(0, 3), (1, 2)], (0, INF)),
        ("Div", [(0, 3), ANY], ANY),
        ("ReduceSum", [(0, 3), ANY], (0, INF)),
        ("ReduceSum", [(-1, 3)], ANY),
        ("Shape", [ANY], (0, INF)),
        ("Sub", [(1, 1), (0, 1)], (0, 1)),
        ("Sub", [ANY, (0, 1)], ANY),
        ("Mul", [(0, 3), (0, INF)], (0, INF)),
        ("Mul", [(-2, 3), (-5, 1)], (-15, 10)),
        ("Mul", [(0, 3), ANY], ANY),
        ("Pow", [ANY, (2, 2)], (0, INF)),
        ("Pow", [ANY, (3, 3)], ANY),
        ("Pow", [(1, 2), (3, 3)], (0, INF)),
        ("Transpose", [(0, 3)], (0, 3)),
        ("Gather", [(0, 3), ANY], (0, 3)),
        ("Cast", [(0, 3)], (0, 3)),
        ("Pad", [(1, 3)], (0, 3)),
        ("Pad", [(1, 3), ANY, (4, 4)], (1, 4)),
        ("Resize", [(0, 3)], ANY),
        ("Conv", [(0, 3), (0, 3)], ANY),
        ("Neg", [(0, 3)], ANY),
    ],
)
def test_intervals_follow_from_those_of_the_inputs(
    op: str, inputs: list[tuple[float, float]], expected: tuple[float, float]
) -> None:
    assert interval(op, *(Interval(*one) for one in inputs)) == expected


def test_a_square_is_not_negative_whatever_is_squared() -> None:
    known, x = Intervals(), Variable("x")
    node, output = made_by("Mul", x, x)
    known.see(node)
    assert known.of(output) == (0, INF)


def test_constants_lie_between_their_ends_unless_they_are_large_or_not_finite() -> None:
    known = Intervals()
    assert known.of(constant("c", np.float32([3, -2, 1]))) == (-2, 3)
    assert known.of(constant("c", np.zeros((300, 300), np.float32))) == ANY
    assert known.of(constant("c", np.float32([math.nan]))) == ANY
    assert known.of(constant("c", np.zeros(0, np.float32))) == ANY
    assert interval("Add", Interval(-1, 1), constant("one", np.float32(1))) == (0, 2)


def test_a_clip_ends_where_its_bounds_are_wherever_they_stand() -> None:
    assert interval("Clip", ANY, min=0.0, max=6.0) == (0, 6)
    assert interval("Clip", Interval(2, 8), min=0.0, max=6.0) == (2, 6)
    assert interval("Clip", ANY, min=0.0) == (0, INF)
    low, high = constant("low", np.float32(0)), constant("high", np.float32(6))
    assert interval("Clip", ANY, low, high) == (0, 6)
    assert interval("Clip", ANY, Variable(""), high) == (-INF, 6)
    assert interval("Clip", ANY, Variable("fed"), high) == (-INF, 6)


def test_all_parts_of_a_split_are_known() -> None:
    known, x = Intervals(), Variable("x")
    known.known[x] = Interval(0, 3)
    node, output = made_by("Split", x)
    node.outputs.append(Variable("other"))
    known.see(node)
    assert [known.of(tensor) for tensor in (output, node.outputs[1])] == [(0, 3), (0, 3)]


def test_a_custom_operator_of_a_known_name_says_nothing() -> None:
    known = Intervals()
    node, output = made_by("Relu", Variable("x"))
    node.domain = "my.own"
    known.see(node)
    assert known.of(output) == ANY


RUN = (
    *("Abs", "Add", "AveragePool", "Cos", "Div", "Erf", "Exp", "LeakyRelu", "Mul", "Reciprocal", "ReduceL1"),
    *("ReduceMean", "ReduceSum", "Relu", "Sigmoid", "Softmax", "Softsign", "Sqrt", "Sub", "Tanh"),
)


@pytest.mark.parametrize("op", RUN)
@settings(max_examples=20)
@given(ends=st.lists(st.integers(-8, 8), min_size=4, max_size=4))
def test_what_onnxruntime_computes_lies_in_the_interval(op: str, ends: list[int]) -> None:
    pairs = [sorted(ends[:2]), sorted(ends[2:])][: 2 if op in ("Add", "Div", "Mul", "Sub") else 1]
    fed = [Variable(f"x{index}", np.float32, [1, 1, 5, 5]) for index in range(len(pairs))]
    attributes = {"kernel_shape": [2, 2]} if op == "AveragePool" else {}
    output = Variable("y", np.float32)
    node = Node(op, op, attributes, fed, [output])
    known = Intervals()
    known.known.update({tensor: Interval(*pair) for tensor, pair in zip(fed, pairs, strict=True)})
    known.see(node)
    session = open_session(to_model(Graph([node], fed, [output], "g", opset=17)), optimize=False)
    generator = np.random.default_rng(0)
    sample = {
        tensor.name: generator.uniform(*pair, (1, 1, 5, 5)).astype(np.float32)
        for tensor, pair in zip(fed, pairs, strict=True)
    }
    (found,) = run(session, sample)
    finite = found[np.isfinite(found)].astype(np.float64)
    low, high = known.of(output)
    assert np.all(finite >= low - 1e-4)
    assert np.all(finite <= high + 1e-4)


def clamp(high: float, low: float = 0.0, found: Interval = ANY, opset: int = 17) -> Node | None:
    known = Intervals()
    _, value = made_by("Conv", Variable("x"))
    known.known[value] = found
    return known.clamp(value, low, high, (high - low) / 255, opset, lambda name: name)


def test_a_range_from_zero_was_a_relu_and_one_to_a_short_number_a_clip() -> None:
    relu, clip = clamp(4.31), clamp(6.0)
    assert relu is not None
    assert clip is not None
    assert (relu.op, [tensor.name for tensor in relu.inputs]) == ("Relu", ["y"])
    assert (clip.op, [float(tensor.values) for tensor in clip.inputs[1:]]) == ("Clip", [0.0, 6.0])
    assert [clip.inputs[1].name, clip.outputs[0].name] == ["y.minimum", "y.clamped"]
    old = clamp(6.0, opset=10)
    assert old is not None
    assert (old.attrs, len(old.inputs)) == ({"min": 0.0, "max": 6.0}, 1)


@pytest.mark.parametrize("codes", [(0, 255), (-128, 127), (0, 65535)])
@pytest.mark.parametrize(
    "ends", [(0, 1), (0, 6), (0, 0.5), (0, 20), (0, 2.5), (0, 0.03), (-1, 1), (-0.5, 3), (-2, 0), (-0.03, 0.2)]
)
def test_a_clip_comes_back_between_the_ends_that_it_had(ends: tuple[float, float], codes: tuple[int, int]) -> None:
    scale = float(np.float32((ends[1] - ends[0]) / (codes[1] - codes[0])))
    zero_point = round(codes[0] - ends[0] / scale)
    low, high = ((code - zero_point) * scale for code in codes)
    known = Intervals()
    _, value = made_by("Conv", Variable("x"))
    node = known.clamp(value, low, high, scale, 17, lambda name: name)
    assert node is not None
    assert [float(tensor.values) for tensor in node.inputs[1:]] == pytest.approx(ends)
    # Values that lie between these ends anyway are not clamped.
    known.known[value] = Interval(*ends)
    assert known.clamp(value, low, high, scale, 17, lambda name: name) is None


@pytest.mark.parametrize(
    ("high", "low", "found"),
    [
        (4.31, -1.0, ANY),
        (3.0001, 0.0, Interval(0, INF)),
        (127 / 50, -128 / 50, ANY),
        (3.1, -2.0, ANY),
        (25.4, -25.6, ANY),
        (15.5, -10.0, ANY),
        (6.0, 0.0, Interval(0, 6)),
        (6.0, 0.0, Interval(0, 1)),
    ],
)
def test_what_cannot_leave_the_range_or_has_an_ordinary_one_is_not_clamped(
    high: float, low: float, found: Interval
) -> None:
    assert clamp(high, low, found) is None


def test_values_that_are_only_not_negative_are_cut_at_six() -> None:
    node = clamp(6.0, found=Interval(0, INF))
    assert node is not None
    assert node.op == "Clip"


def test_inputs_constants_and_what_was_cast_are_not_clamped() -> None:
    known = Intervals()
    for value in (Variable("x"), constant("c", np.float32([-1])), made_by("Cast", Variable("i"))[1]):
        assert known.clamp(value, 0.0, 4.0, 4 / 255, 17, str) is None
