"""Sums, differences, products and quotients with constants."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, nodes, ops, outputs, sample, values

from onnxq.ir import Graph
from onnxq.passes import MergeScalars, UseAddAndMul
from onnxq.rewrite import Changes

# UseAddAndMul ---------------------------------------------------------------------------------------------------------

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
def test_use_add_and_mul_others_stay(body: str, reason: str) -> None:
    graph, changes = use(body)
    assert not changes.changed
    assert [why for _, why in changes.skipped] == ([reason] if reason else [])
    assert len(nodes(graph)) == body.count("=")


def test_whole_numbers_stay() -> None:
    made = model("g (int64[8] x) => (int64[8] y) { y = Div(x, two) }", two=np.array(2))
    assert UseAddAndMul().apply(named_graph(made)).skipped[0][1] == "its constant is not floating point"


# MergeScalars ---------------------------------------------------------------------------------------------------------

NUMBERS = {"one": 1.0, "near": 1 + 1e-6, "nil": 0.0, "half": 0.5, "third": 1 / 3, "down": -0.25}
EXTREMES = {"huge": 1e30, "small": 1e-30}


def merge(body: str, dtype: type = np.float32) -> tuple[Graph, Changes]:
    scalars = {name: np.array(value, dtype) for name, value in (NUMBERS | EXTREMES).items()}
    used = {name: scalar for name, scalar in scalars.items() if f"{name})" in body or f"({name}" in body}
    made = model(f"g (float[N, 8] x) => (float[N, 8] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = MergeScalars().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not MergeScalars().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Mul(x, half) y = Mul(third, a)", ["Mul"]),
        ("a = Mul(x, half) b = Mul(a, third) y = Mul(b, down)", ["Mul"]),
        ("a = Add(x, half) y = Add(a, third)", ["Add"]),
        ("a = Mul(x, half) y = Mul(a, one)", ["Mul"]),
        ("e = Exp(x) a = Mul(e, one) b = Add(a, nil) y = Neg(b)", ["Exp", "Neg"]),
    ],
)
def test_scalars_become_one(body: str, expected: list[str]) -> None:
    assert ops(merge(body)[0]) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a = Add(x, half) y = Add(a, down)", "they cancel"),
        ("a = Add(x, half) y = Add(a, small)", "the smaller one would lose digits"),
        ("e = Erf(x) p = Add(e, one) q = Mul(x, p) r = Mul(q, half) y = Mul(r, third)", "it is a part of Gelu"),
        ("a = Mul(x, huge) y = Mul(a, huge)", "the merged number is not one of its type"),
        ("a = Mul(x, small) y = Mul(a, small)", "the merged number is not one of its type"),
        ("a = Mul(x, small) y = Mul(a, huge)", "a factor is too far from 1"),
    ],
)
def test_merge_scalars_others_stay(body: str, reason: str) -> None:
    if "huge" in body and "small" not in body:
        body = body.replace("y = ", "b = ") + " y = Tanh(b)"
    graph, changes = merge(body)
    assert not changes.changed
    assert reason in [why for _, why in changes.skipped]
    assert len(nodes(graph)) == body.count("=")


def test_what_is_only_nearly_1_stays() -> None:
    assert ops(merge("y = Mul(x, near)")[0]) == ["Mul"]


def test_a_scalar_that_raises_the_rank_stays() -> None:
    made = model("g (float[8] x) => (float[1, 8] y) { y = Mul(x, one) }", one=np.ones((1, 1), np.float32))
    assert MergeScalars().apply(named_graph(made)).skipped[0][1] == "it may raise the rank"


def test_values_that_others_read_stay() -> None:
    graph, _ = merge("a = Mul(x, half) b = Mul(a, third) y = Add(a, b)")
    assert ops(graph) == ["Mul", "Mul", "Add"]


def test_whole_numbers_stay_unless_they_do_nothing() -> None:
    text = "g (int64[8] x) => (int64[8] y) { a = Add(x, two) b = Add(a, two) c = Mul(b, one) y = Neg(c) }"
    graph = named_graph(model(text, two=np.array(2), one=np.array(1)))
    MergeScalars().apply(graph)
    assert ops(graph) == ["Add", "Add", "Neg"]
