"""The search for what to leave in float, where stored weights of few bits are too coarse and become finer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from onnx import ModelProto

from onnxq.config.scheme import Granularity, Mode
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.search.fallback import greedy_fallback
from onnxq.search.search import FINEST
from onnxq.system.resources import silent

Demoted = Callable[[Mapping[str, Demotion]], Plan]


@pytest.fixture
def products(build: Callable[..., ModelProto], plan_of: Callable[..., Plan]) -> Demoted:
    """Plans three products of weights of 4 bits."""
    nodes = "[a] s = MatMul(x, u) [b] t = MatMul(s, v) [c] y = MatMul(t, w)"
    model = build(f"(float[4,256] x) => (float[4,256] y) {{ {nodes} }}", **dict.fromkeys("uvw", (256, 256)))
    return lambda demotions: plan_of(model, scheme="int4-block32", demotions=demotions)


def is_coarse(decision: Decision) -> bool:
    return any(weight.spec.format == "int4" for weight in decision.weights)


def is_of_blocks(decision: Decision) -> bool:
    return any(weight.spec.per != Granularity.CHANNEL for weight in decision.weights)


def test_codes_that_stay_too_coarse_as_finer_ones_get_16_bits_before_they_are_left_float(products: Demoted) -> None:
    def measure(plan: Plan) -> float:
        specs = {weight.spec for one in plan.decisions for weight in one.weights}
        return 40.0 if specs == {FINEST} else 30.0

    found = greedy_fallback(products, measure, 35.0, silent).plan
    assert {one.mode for one in found.decisions if one.weights} == {Mode.STORAGE}
    assert measure(found) == 40.0


def test_codes_that_are_decoded_before_are_tried_where_those_that_are_multiplied_are_too_coarse(
    products: Demoted,
) -> None:
    def measure(plan: Plan) -> float:
        return 30.0 if plan.count(Mode.WEIGHT_ONLY) or any(map(is_coarse, plan.decisions)) else 40.0

    found = greedy_fallback(products, measure, 35.0, silent).plan
    assert measure(found) == 40.0
    assert {weight.spec.format for one in found.decisions for weight in one.weights} == {"int8-narrow"}


def test_finer_codes_that_turn_out_not_to_be_needed_are_handed_back(products: Demoted) -> None:
    def measure(plan: Plan) -> float:
        return 10.0 + 20.0 * (not is_coarse(plan.by_node["b"]))

    found = greedy_fallback(products, measure, 20.0, silent).plan
    assert [one.node for one in found.decisions if one.weights and not is_coarse(one)] == ["b"]
    assert found.by_node["b"].weights[0].spec.per == (128,)


@pytest.mark.parametrize(("larger", "per"), [(True, Granularity.CHANNEL), (False, (128,))])
def test_codes_of_few_bits_end_no_larger_than_8_bit_storage(products: Demoted, larger: bool, per: object) -> None:
    def size(plan: Plan) -> float:
        return 8.125 if any(is_of_blocks(one) for one in plan.decisions) else 8.0 if larger else 9.0

    def measure(plan: Plan) -> float:
        return 10.0 if any(map(is_coarse, plan.decisions)) else 30.0

    found = greedy_fallback(products, measure, 20.0, silent, size=size).plan
    assert {weight.spec.per for one in found.decisions for weight in one.weights} == {per}
