"""Factors that products take in on all sides are told from those that need nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Build, PlanOf

from onnxq.algorithms.folding import costly, folded
from onnxq.algorithms.migration import Factors, Migration
from onnxq.ir import read_model
from onnxq.preparing.preparation import prepare

CONVS = {"w": (6, 4, 1, 1), "u": (6, 6, 1, 1), "k": (6, 6, 1, 1)}

CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "products on both sides": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y) {a = Conv(x, w) r = Relu(a) y = Conv(r, u)}",
        {"r"},
        {"r"},
    ),
    "a float reader": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y, float[1,6,8,8] z)\
 {a = Conv(x, w) r = Relu(a) y = Conv(r, u) z = Erf(r)}",
        {"r"},
        set(),
    ),
    "what an Add joins": (
        "(float[1,4,8,8] x) => (float[1,6,8,8] y, float[1,6,8,8] z)\
 {a = Conv(x, w) d = Conv(a, u) s = Add(a, d) y = Conv(s, k) z = Erf(s)}",
        {"a", "d", "s"},
        set(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_factors_without_nodes_stay(name: str, build: Build, plan_of: PlanOf) -> None:
    text, tensors, kept = CASES[name]
    weights: dict[str, Any] = {one: shape for one, shape in CONVS.items() if f", {one})" in text}
    model = build(text, **weights)
    factors = Factors(1, np.array([0.5, 1.0] * 3))
    migration = Migration(dict.fromkeys(sorted(tensors), factors))
    graph, plan = prepare(read_model(model)), plan_of(model)
    assert set(folded(graph, plan, migration).factors) == kept
    # What is left needs nodes, and stays together.
    assert costly(graph, plan, migration) == ([frozenset(tensors - kept)] if tensors - kept else [])
