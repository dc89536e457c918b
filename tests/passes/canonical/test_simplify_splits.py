"""SimplifySplits drops Splits into one part and makes Slices of those of which one part is read."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import SimplifySplits


@pytest.mark.parametrize(
    ("body", "opset", "left"),
    [
        ("a = Split<axis=1>(x) y = Exp(a)", 17, ["Exp"]),
        ("a, b, c = Split<axis=1>(x, sizes) y = Exp(b)", 17, ["Slice", "Exp"]),
        ("a, b, c = Split<axis=-1, split=[2, 3, 4]>(x) y = Exp(c)", 11, ["Slice", "Exp"]),
        ("a, b, c = Split<axis=1>(x) y = Exp(a)", 13, ["Slice", "Exp"]),
        ("a, b = Split<axis=1, num_outputs=2>(x) y = Exp(b)", 18, ["Slice", "Exp"]),
        ("a, b, c = Split<axis=1>(x) y = Add(a, b)", 17, ["Split", "Add"]),
        ("a, b, c = Split<axis=1>(x) y = Add(b, b)", 17, ["Slice", "Add"]),
    ],
)
def test_splits(body: str, opset: int, left: list[str]) -> None:
    made = model(f"g (float[B, 9] x) => (float y) {{ {body} }}", opset=opset, sizes=np.array([2, 3, 4]))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    apply_once(SimplifySplits(), graph)
    assert ops(graph) == left
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_part_that_is_an_output_keeps_its_name() -> None:
    made = model("g (float[B, 9] x) => (float[B, 3] b) { a, b, c = Split<axis=1>(x) }")
    graph = named_graph(made)
    apply_once(SimplifySplits(), graph)
    assert ops(graph) == ["Slice"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize(
    ("body", "opset", "reason"),
    [
        ("a, b = Split(x) y = Add(a, b)", 17, "several of its parts are read"),
        ("a, b = Split(x) y = Exp(a)", 17, "the sizes of its parts are not known"),
        ("a, b = Split<axis=1, split=[4, 5]>(x) y = Exp(a)", 9, "the bounds of a Slice are attributes at this opset"),
    ],
)
def test_refusals_have_their_reasons(body: str, opset: int, reason: str) -> None:
    graph = named_graph(model(f"g (float[B, 9] x) => (float y) {{ [split] {body} }}", opset=opset))
    assert SimplifySplits().apply(graph).skipped == (("split", reason),)
