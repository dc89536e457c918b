"""MergeConcats reads the parts of parts, and drops the Concat of one tensor."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, outputs, sample

from onnxq.passes import MergeConcats, RemoveUnused


@pytest.mark.parametrize(
    ("body", "concats"),
    [
        ("a = Concat<axis=1>(x, z) y = Concat<axis=1>(z, a, x)", [["z", "x", "z", "x"]]),
        ("a = Concat<axis=-1>(x, z) y = Concat<axis=1>(z, a, x)", [["z", "x", "z", "x"]]),
        ("a = Concat<axis=1>(x, z) b = Concat<axis=1>(a, x) y = Concat<axis=1>(b, z)", [["x", "z", "x", "z"]]),
        (
            "a = Concat<axis=0>(x, z) b = Concat<axis=0>(z, x) y = Concat<axis=1>(a, b)",
            [["x", "z"], ["z", "x"], ["a", "b"]],
        ),
        ("a = Concat<axis=1>(x, z) y = Concat<axis=1>(a, a)", [["x", "z"], ["a", "a"]]),
        ("a = Concat<axis=1>(x) b = Neg(a) y = Exp(b)", []),
    ],
)
def test_concats(body: str, concats: list[list[str]]) -> None:
    made = model(f"g (float[2, 3] x, float[2, 3] z) => (float y) {{ {body} }}")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    MergeConcats().apply(graph)
    RemoveUnused().apply(graph)
    assert [[tensor.name for tensor in node.inputs] for node in nodes(graph, "Concat")] == concats
    assert not apply_once(MergeConcats(), graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_one_that_others_read_stays() -> None:
    text = "a = Concat<axis=0>(x, x) y = Concat<axis=0>(a, x) w = Neg(a)"
    graph = named_graph(model(f"g (float[2] x) => (float[6] y, float[4] w) {{ {text} }}"))
    assert not MergeConcats().apply(graph)
