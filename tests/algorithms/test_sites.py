"""Which tensors share factors, and which have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Build, PlanOf

from onnxq.algorithms.sites import Sites, sites
from onnxq.ir import read_model
from onnxq.preparing.preparation import prepare


def found(build: Build, plan_of: PlanOf, text: str, **weights: Any) -> Sites:
    model = build(text, **weights)
    graph = prepare(read_model(model))
    return sites(graph, plan_of(model))


CONVS = {"w": (6, 4, 1, 1), "u": (6, 4, 1, 1), "g": (3, 6, 1, 1)}


def test_an_add_joins_what_it_adds(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) d = Conv(x, u) s = Add(a, d) y = Conv(s, g)}"
    joined = next(site for site in found(build, plan_of, text, **CONVS).found if "s" in site.tensors)
    assert set(joined.tensors) == {"a", "d", "s"}
    assert joined.dense
    assert joined.free.all()


def test_a_depthwise_reader_loses_nothing(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w) y = Conv<group=6>(a, k)}"
    result = found(build, plan_of, text, w=(6, 4, 1, 1), k=(6, 1, 1, 1))
    assert not next(site for site in result.found if "a" in site.tensors).dense


def test_channels_of_a_concat_are_those_of_its_inputs(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) d = Sigmoid(a) s = Concat<axis=1>(a, d)\
 y = Conv(s, g)}"
    result = found(build, plan_of, text, w=(6, 4, 1, 1), g=(3, 12, 1, 1))
    assert "a" in result.blocked


@pytest.mark.parametrize(
    ("text", "weights", "tensor"),
    [
        (
            "(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w) s = Sigmoid(a) y = Conv(s, g)}",
            {"w": (6, 4, 1, 1), "g": (6, 6, 1, 1)},
            "a",
        ),
        (
            "(float[1,4,8,8] x) => (float[1,4,8,8] y) {a = Conv(x, w) y = Conv(a, w)}",
            {"w": (4, 4, 1, 1)},
            "a",
        ),
        (
            "(float[1,4,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) s = Add(a, c) y = Conv(s, g)}",
            {"w": (6, 4, 1, 1), "c": (1, 1, 8, 8), "g": (3, 6, 1, 1)},
            "a",
        ),
    ],
    ids=["an operator that is not linear", "a weight that two read", "what is added to all channels alike"],
)
def test_what_takes_no_factors_blocks(
    build: Build, plan_of: PlanOf, text: str, weights: dict[str, Any], tensor: str
) -> None:
    result = found(build, plan_of, text, **weights)
    assert tensor in result.blocked
    assert not any(tensor in site.tensors for site in result.found)


def test_places_count_each_factor_once(build: Build, plan_of: PlanOf) -> None:
    text = "(float[1,4,8,8] x) => (float[1,3] y) {a = Conv(x, w) p = MaxPool<kernel_shape=[4,4], strides=[4,4]>(a)\
 f = Flatten(p) y = Gemm(f, g)}"
    result = found(build, plan_of, text, w=(6, 4, 1, 1), g=(24, 3))
    site = next(site for site in result.found if "a" in site.tensors)
    np.testing.assert_array_equal(site.tensors["f"].places, np.repeat(site.tensors["a"].places, 4))
