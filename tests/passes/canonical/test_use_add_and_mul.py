"""UseAddAndMul writes differences, quotients and sums alike."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, nodes, ops, outputs, sample, values

from onnxq.ir import Graph
from onnxq.passes import UseAddAndMul
from onnxq.rewrite import Changes

CONSTANTS = {"c": values(8) + np.float32(3), "four": np.array(4, np.float32), "nil": np.zeros(8, np.float32)}


def use(body: str) -> tuple[Graph, Changes]:
    used = {name: array for name, array in CONSTANTS.items() if f", {name}" in body or f"({name}" in body}
    made = model(f"g (float[N, 8] x, float[8] z) => (float[N, 8] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = UseAddAndMul().apply(graph)
    if "nil" not in body:
        assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not UseAddAndMul().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Sub(x, c)", ["Add"]),
        ("y = Div(x, c)", ["Mul"]),
        ("d = Div(x, four) y = Floor(d)", ["Mul", "Floor"]),
        ("y = Sum(z, x)", ["Add"]),
        ("s = Sum(x) e = Exp(s) y = Max(e)", ["Exp"]),
    ],
)
def test_one_form(body: str, expected: list[str]) -> None:
    assert ops(use(body)[0]) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Sub(c, x)", ""),
        ("y = Div(x, z)", ""),
        ("y = Sum(x, z, c)", ""),
        ("y = Div(x, nil)", "its reciprocal is not a number of its type"),
        ("d = Div(x, c) y = Floor(d)", "its last bit may decide what reads it"),
        ("d = Div(x, c) y = Erf(d)", "it is a part of Gelu"),
    ],
)
def test_others_stay(body: str, reason: str) -> None:
    graph, changes = use(body)
    assert not changes.changed
    assert [why for _, why in changes.skipped] == ([reason] if reason else [])
    assert len(nodes(graph)) == body.count("=")


def test_whole_numbers_stay() -> None:
    made = model("g (int64[8] x) => (int64[8] y) { y = Div(x, two) }", two=np.array(2))
    assert UseAddAndMul().apply(named_graph(made)).skipped[0][1] == "its constant is not floating point"
