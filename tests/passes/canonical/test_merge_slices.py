"""MergeSlices makes one Slice of two on different axes, and drops those that take everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample
from onnx import ModelProto

from onnxq.passes import MergeSlices, RemoveUnused

NUMBERS = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "minus": np.array([-1]),
    "far": np.array([2**63 - 1]), "eight": np.array([8]), "back": np.array([-8]),
}  # fmt: skip


def between(body: str, opset: int = 17) -> ModelProto:
    made = model(f"g (float[B, 8, 8] x) => (float y) {{ t = Neg(x) {body} y = Exp(z) }}", opset=opset, **NUMBERS)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Slice(t, one, far, one, two) z = Slice(a, zero, far, two, two)", ["Slice"]),
        ("a = Slice(t, one, far, one) z = Slice(a, zero, minus, minus)", ["Slice"]),
        ("a = Slice(t, one, far, one) z = Slice(a, zero, minus, one)", ["Slice", "Slice"]),
        ("z = Slice(t, zero, far, zero)", []),
        ("z = Slice(t, zero, eight, one)", []),
        ("z = Slice(t, back, far, minus)", []),
        ("z = Slice(t, zero, eight, zero)", ["Slice"]),
        ("z = Slice(t, zero, far, one, two)", ["Slice"]),
        ("z = Slice(t, minus, back, one, minus)", ["Slice"]),
        ("a = Slice(t, zero, far, one) z = Slice(a, zero, far, two)", []),
    ],
)
def test_slices(body: str, left: list[str]) -> None:
    made = between(body)
    graph = named_graph(made)
    apply_once(MergeSlices(), graph)
    assert ops(graph) == ["Neg", *left, "Exp"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_first_that_only_slices_read_goes() -> None:
    made = model(
        """g (float[B, 8, 8] x) => (float[B, 3, 4] y, float[B, 3, 3] w) {
        a = Slice(x, one, far, one, two) b = Slice(a, zero, far, two, two) c = Slice(a, one, far, two, two)
        y = Exp(b) w = Exp(c) }""",
        **NUMBERS,
    )
    for info in made.graph.output:
        info.type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    MergeSlices().apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == ["Slice", "Slice", "Exp", "Exp"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize(
    ("text", "opset", "reason"),
    [
        ("t = Neg(x) z = Slice<starts=[0], ends=[8]>(t)", 9, "its bounds are attributes at this opset"),
        ("k = Shape(x) t = Neg(x) z = Slice(t, zero, k)", 17, "its bounds are not constant"),
        ("t = local.F(x) a = Slice(t, one, far, one) z = Slice(a, one, far, minus)", 17, "it takes a part"),
        ("t = Neg(x) z = Slice(t, one, far)", 17, "it takes a part"),
    ],
)
def test_refusals_have_their_reasons(text: str, opset: int, reason: str) -> None:
    made: Any = model(f"g (float[B, 8, 8] x) => (float y) {{ {text} y = Exp(z) }}", opset=opset, **NUMBERS)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    changes = MergeSlices().apply(named_graph(made))
    assert not changes
    assert reason in dict(changes.skipped).popitem()[1]
