"""DropWheres takes the operand that a constant condition takes."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import DropWheres

CONDITIONS = {
    "yes": np.array(True), "no": np.zeros((1, 1), bool), "some": np.array([True, False, True, True]),
    "tall": np.ones((5, 1, 1), bool), "none": np.zeros(0, bool),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Where(yes, x, z) y = Exp(a)", ["Exp"]),
        ("a = Where(no, z, x) y = Exp(a)", ["Exp"]),
        ("a = Where(no, x, z) y = Exp(a)", ["Where", "Exp"]),
        ("a = Where(some, x, z) y = Exp(a)", ["Where", "Exp"]),
        ("a = Where(tall, x, z) y = Exp(a)", ["Where", "Exp"]),
    ],
)
def test_wheres(body: str, left: list[str]) -> None:
    made = model(f"g (float[B, 4] x, float[4] z) => (float y) {{ {body} }}", **CONDITIONS)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    apply_once(DropWheres(), graph)
    assert ops(graph) == left
    for free in (1, 3):
        assert difference(outputs(graph, sample(made, 0, free)), outputs(made, sample(made, 0, free))) == 0


def test_refusals_have_their_reasons() -> None:
    text = "a = local.F(x) b = Where(yes, a, x) c = Where(none, x, x) d = Where(yes, z, x) y = Where(some, x, z)"
    graph = named_graph(model(f"g (float[B, 4] x, float[4] z) => (float y) {{ {text} }}", **CONDITIONS))
    assert [reason for _, reason in DropWheres().apply(graph).skipped] == [
        "the shape of an operand is not known",
        "its condition differs from entry to entry",
        "what it takes has another shape than what it makes",
        "its condition differs from entry to entry",
    ]
