"""Scores are scaled once."""

from __future__ import annotations

import numpy as np
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import MergeScalesOfProduct

TEXT = "g (TYPE[2, 3, 4] q, TYPE[2, 4, 3] k) => (TYPE[2, 3, 3] y) { a = Mul(q, s) b = Mul(s, k) y = MatMul(a, b) }"


def test_two_scales_become_one() -> None:
    made = model(TEXT.replace("TYPE", "float"), s=np.full(1, 0.35, np.float32))
    graph = named_graph(made)
    apply_once(MergeScalesOfProduct(), graph)
    assert ops(graph) == ["MatMul", "Mul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


def test_small_types_and_wide_scales_stay() -> None:
    made = model(TEXT.replace("TYPE", "float16"), s=np.full(1, 0.35, np.float16))
    ((_, reason),) = MergeScalesOfProduct().apply(named_graph(made)).left
    assert "small range" in reason
    made = model(TEXT.replace("TYPE", "float").replace("y)", "z)", 0), s=np.full((1, 1, 1, 1), 0.35, np.float32))
    ((_, reason),) = MergeScalesOfProduct().apply(named_graph(made)).left
    assert reason == "a scale may have more dimensions than its data"
