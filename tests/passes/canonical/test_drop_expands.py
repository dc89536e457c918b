"""DropExpands drops those that do nothing, and those before an operator that broadcasts as far."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import DropExpands, RemoveUnused


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("e = Expand(x, ones) y = Exp(e)", ["Exp"]),
        ("e = Expand(x, wide) y = Exp(e)", ["Expand", "Exp"]),
        ("e = Expand(x, wide) y = Add(e, z)", ["Add"]),
        ("e = Expand(x, wide) y = Sub(z, e)", ["Sub"]),
        ("e = Expand(x, wide) y = Mul(e, w)", ["Expand", "Mul"]),
        ("e = Expand(x, wide) c = Greater(e, z) y = Where(c, z, e)", ["Greater", "Where"]),
        ("s = Shape(z) e = Expand(x, s) y = Add(e, z)", ["Shape", "Expand", "Add"]),
        ("e = Expand(x, wide) f = Expand(z, wide) y = Mul(e, f)", ["Mul"]),
        ("e = Expand(x, deep) y = Add(e, z)", ["Expand", "Add"]),
    ],
)
def test_expands(body: str, left: list[str]) -> None:
    made = model(
        f"g (float[B, 1] x, float[B, 4] z, float[B, 1] w) => (float y) {{ {body} }}",
        ones=np.array([1, 1]), wide=np.array([1, 4]), deep=np.array([2, 1, 1]),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    DropExpands().apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == left
    assert not apply_once(DropExpands(), graph)
    for free in (1, 3):
        assert difference(outputs(graph, sample(made, 0, free)), outputs(made, sample(made, 0, free))) == 0


def test_unknown_ranks_stay() -> None:
    graph = named_graph(
        model("g (float[4] x) => (float y) { a = local.F(x) e = Expand(a, k) y = Exp(e) }", k=np.array([1]))
    )
    assert DropExpands().apply(graph).skipped == ((graph.nodes[1].name, "the shape that it makes is not known"),)
