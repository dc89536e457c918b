"""MergeClamps writes limits of values as one Clip or Relu."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, ops, outputs, sample

from onnxq.ir import Graph
from onnxq.passes import MergeClamps
from onnxq.rewrite import Changes

LIMITS = {
    "zero": np.array(0, np.float32),
    "small": np.array(-0.5, np.float32),
    "large": np.array(0.75, np.float32),
    "wide": np.array([[0.75]], np.float32),
    "most": np.finfo(np.float32).max,
    "infinite": np.array(np.inf, np.float32),
    "below": np.array(-np.inf, np.float32),
}


def merge(body: str, opset: int = 17, inputs: str = "float[N, 8] x") -> tuple[Graph, Changes]:
    used = {name: np.asarray(array) for name, array in LIMITS.items() if name in body and "<" not in body}
    made = model(f"g ({inputs}) => (float[N, 8] y) {{ {body} }}", opset=opset, **used)
    graph = named_graph(made)
    changes = MergeClamps().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    assert not MergeClamps().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Max(x, small) y = Min(wide, a)", ["Clip"]),
        ("y = Max(zero, x)", ["Relu"]),
        ("y = Min(x, wide)", ["Clip"]),
        ("y = Clip(x, zero, infinite)", ["Relu"]),
        ("a = Exp(x) b = Max(a, below) y = Neg(b)", ["Exp", "Neg"]),
        ("a = Relu(x) y = Relu(a)", ["Relu"]),
        ("a = Relu(x) y = Clip(a, small, large)", ["Clip"]),
        ("a = Clip(x, , zero) y = Clip(a, small)", ["Clip"]),
        ("a = Clip(x, small, large) b = Relu(a) y = Min(b, zero)", ["Clip"]),
        ("a = Min(x, small) y = Relu(a)", ["Clip"]),
        ("a = Clip(x, zero, large) y = Clip(a, zero, most)", ["Clip"]),
    ],
)
def test_limits_become_one(body: str, expected: list[str]) -> None:
    assert ops(merge(body)[0]) == expected


def test_limits_are_attributes_in_old_models() -> None:
    graph, _ = merge("a = Relu(x) y = Clip<min = -1.0, max = 0.5>(a)", opset=9)
    assert ops(graph) == ["Clip"]
    assert graph.nodes[0].attrs == {"min": 0.0, "max": 0.5}
    graph, _ = merge("a = Relu(x) y = Min(a, large)", opset=9)
    assert graph.nodes[0].attrs == {"min": 0.0, "max": 0.75}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Clip(x, small, large)", "it is a Clip already"),
        ("y = Clip(x, zero)", "it is a Clip already"),
        ("y = Clip(x, zero, most)", "it is a Clip already"),
        ("y = Clip(x)", "it is a Clip already"),
        ("r = ReduceMax<keepdims = 0>(x) y = Clip(x, r)", "its limits are computed, or cross"),
        ("y = Clip(x, large, small)", "its limits are computed, or cross"),
    ],
)
def test_others_stay(body: str, reason: str) -> None:
    _, changes = merge(body.replace("large, small", "zero, small"))
    assert not changes.changed
    assert changes.skipped[0][1] == reason


@pytest.mark.parametrize("opset", [10, 17])
@pytest.mark.parametrize(
    "body", ["y = Max(x, zero)", "y = Min(x, zero)", "y = Max(x, small)", "y = Max(x, infinite)", "y = Max(x, least)",
             "y = Min(x, most)", "a = Relu(x) y = Min(a, most)", "a = Min(x, large) y = Max(a, small)"],
)  # fmt: skip
def test_infinite_values_and_limits(body: str, opset: int) -> None:
    limits = LIMITS | {"least": np.finfo(np.float32).min}
    used = {name: np.asarray(array) for name, array in limits.items() if f" {name})" in body}
    made = model(f"g (float[5] x) => (float[5] y) {{ {body} }}", opset=opset, **used)
    graph = named_graph(made)
    MergeClamps().apply(graph)
    x = np.array([-np.inf, -3, np.nan, 3, np.inf], np.float32)
    np.testing.assert_array_equal(outputs(graph, {"x": x})["y"], outputs(made, {"x": x})["y"])


def test_a_limit_that_raises_the_rank_stays() -> None:
    made = model("g (float[8] x) => (float[1, 8] y) { y = Max(x, wide) }", wide=LIMITS["wide"])
    assert MergeClamps().apply(named_graph(made)).skipped[0][1] == "its limit may raise the rank"


def test_whole_numbers_stay() -> None:
    made = model("g (int64[8] x) => (int64[8] y) { y = Max(x, zero) }", zero=np.array(0))
    assert MergeClamps().apply(named_graph(made)).skipped[0][1] == "its data is not known to be floating point"


def test_values_that_others_read_stay() -> None:
    graph, _ = merge("a = Relu(x) b = Clip(a, small, large) c = Neg(a) y = Add(b, c)")
    assert ops(graph) == ["Relu", "Clip", "Neg", "Add"]
