"""Codes mean the same floats where scale, zero point and layout are the same, however they are written."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.ir import Node, Tensor, Variable, constant
from onnxq.passes.dequantize.coded import Coded

VALUE = Variable("x", np.float32)


def decoder(*parameters: object, **attributes: int) -> Node:
    """A DequantizeLinear with these numbers as scale and zero point; tensors are taken as they are."""
    tensors = [one if isinstance(one, Variable) else constant(f"p{i}", one) for i, one in enumerate(parameters)]
    return Node("DequantizeLinear", "d", attributes, [Variable("codes"), *tensors], [Variable("values")])


def coded(*parameters: object, **attributes: int) -> Coded:
    return Coded.by(decoder(*parameters, **attributes), VALUE)


SCALE, ZERO = np.float32(0.5), np.uint8(3)


def test_a_node_says_what_codes_mean() -> None:
    found = coded(SCALE, ZERO)
    assert (found.value, found.layout) == (VALUE, ())
    assert coded(SCALE).zero_point is coded(SCALE, Variable("")).zero_point is None


@pytest.mark.parametrize(
    ("scale", "attributes", "layout"),
    [
        (np.float32([0.5]), {}, ()),
        (np.float32([[0.5]]), {"axis": 0, "block_size": 8}, ()),
        (np.float32([0.5, 1]), {}, (1, 0)),
        (np.float32([0.5, 1]), {"axis": 0}, (0, 0)),
        (np.float32([[0.5, 1]]), {"axis": 1, "block_size": 8}, (1, 8)),
        (Variable("computed"), {}, (1, 0)),
    ],
)
def test_one_scale_has_no_layout(scale: object, attributes: dict[str, int], layout: tuple[int, ...]) -> None:
    assert coded(scale, **attributes).layout == layout


def test_the_scale_of_a_dynamic_quantizer_is_one_number() -> None:
    scale = Variable("s")
    Node("DynamicQuantizeLinear", "q", {}, [VALUE], [Variable("codes"), scale, Variable("z")])
    assert coded(scale).layout == ()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (coded(SCALE, ZERO), coded(SCALE.reshape(1), ZERO.reshape(1)), True),
        (coded(SCALE, np.uint8(0)), coded(SCALE), True),
        (coded(SCALE, ZERO), coded(SCALE), False),
        (coded(SCALE, ZERO), coded(np.float32(0.25), ZERO), False),
        (coded(SCALE, ZERO), coded(SCALE, np.uint8(4)), False),
        (coded(np.float32([1, 2]), axis=0), coded(np.float32([1, 2]), axis=1), False),
        (coded(Variable("s")), coded(Variable("s")), False),
    ],
)
def test_codes_agree_only_where_they_mean_the_same(one: Coded, other: Coded, same: bool) -> None:
    assert one.agrees(other) == other.agrees(one) == same
    assert one.agrees(one)


@pytest.mark.parametrize(
    ("one", "other", "factor"),
    [
        (coded(SCALE, ZERO), coded(np.float32(0.25), ZERO), 0.5),
        (coded(SCALE, ZERO), coded(np.float32([1.5]), ZERO), 3.0),
        (coded(SCALE, ZERO), coded(np.float32(0.25), np.uint8(4)), None),
        (coded(SCALE, ZERO), coded(Variable("s"), ZERO), None),
        (coded(SCALE, ZERO), coded(np.float32([1, 2]), ZERO), None),
    ],
)
def test_a_factor_may_lie_in_the_scale(one: Coded, other: Coded, factor: float | None) -> None:
    assert one.factor(other) == factor


@pytest.mark.parametrize("axis", [1, -2])
def test_each_channel_may_have_a_factor_of_its_own(axis: int) -> None:
    value = Variable("x", np.dtype(np.float32), [None, 2, 5])
    one = Coded(value, constant("s", SCALE), constant("z", ZERO))
    scales, zeros = constant("t", np.float32([0.25, 1.5])), constant("y", np.array([3, 3], np.uint8))
    found = one.factor(Coded(value, scales, zeros, (axis, 0)))
    assert found is not None
    assert found.tolist() == [[[0.5], [3.0]]]
    assert one.factor(Coded(value, scales, constant("y", np.array([3, 4], np.uint8)), (axis, 0))) is None
    assert one.factor(Coded(value, scales, zeros, (axis, 2))) is None


def test_a_scale_that_is_computed_agrees_with_itself() -> None:
    scale: Tensor = Variable("s")
    assert coded(scale).agrees(coded(scale))
