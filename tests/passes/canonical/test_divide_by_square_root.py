"""Reciprocals of square roots."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs

from onnxq.passes import DivideBySquareRoot

INPUTS = {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4), "v": np.array([[0.5], [2], [3]], np.float32)}


@pytest.mark.parametrize("body", ["r = Reciprocal(s) y = Mul(x, r)", "r = Div(one, s) y = Mul(r, x)"])
def test_becomes_a_division(body: str) -> None:
    made = model(
        f"g (float[3, 4] x, float[3, 1] v) => (float[3, 4] y) {{ s = Sqrt(v) {body} }}", one=np.ones(1, np.float32)
    )
    graph = named_graph(made)
    apply_once(DivideBySquareRoot(), graph)
    assert ops(graph) == ["Sqrt", "Div"]
    assert difference(outputs(graph, INPUTS), outputs(made, INPUTS)) < 1e-6


def test_a_one_that_widens_stays() -> None:
    made = model(
        "g (float[4] x, float[4] v) => (float[1, 4] y) { s = Sqrt(v) r = Div(one, s) y = Mul(r, x) }",
        one=np.ones((1, 1), np.float32),
    )
    ((_, reason),) = DivideBySquareRoot().apply(named_graph(made)).skipped
    assert reason == "its constant may have more dimensions than its data"


def test_a_reciprocal_that_others_read_stays() -> None:
    made = model(
        """g (float[4] x, float[4] v) => (float[4] y, float[4] z) {
            s = Sqrt(v) r = Reciprocal(s) y = Mul(r, x) z = Neg(r) }"""
    )
    assert not DivideBySquareRoot().apply(named_graph(made))
