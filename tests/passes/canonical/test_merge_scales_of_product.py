"""Scores are scaled once."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import MergeScalesOfProduct

TEXT = "g (TYPE[2, 3, 4] q, TYPE[2, 4, 3] k) => (TYPE[2, 3, 3] y) { a = Mul(q, s) b = Mul(s, k) y = MatMul(a, b) }"


def test_two_scales_become_one() -> None:
    made = model(TEXT.replace("TYPE", "float"), s=np.full(1, 0.35, np.float32))
    graph = named_graph(made)
    apply_once(MergeScalesOfProduct(), graph)
    assert ops(graph) == ["Mul", "MatMul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("scale", "dtype", "reason"),
    [
        (1e-3, np.float16, "a scale is too far from 1"),
        (1e-10, np.float32, "a scale is too far from 1"),
        (1.5, np.float32, "neither of its scales makes its data smaller"),
    ],
)
def test_scales_that_may_leave_the_range_stay(scale: float, dtype: type, reason: str) -> None:
    made = model(TEXT.replace("TYPE", np.dtype(dtype).name.replace("32", "")), s=np.full(1, scale, dtype))
    assert [why for _, why in MergeScalesOfProduct().apply(named_graph(made)).skipped] == [reason]


def test_the_product_stays_in_range_where_it_did() -> None:
    made = model(TEXT.replace("TYPE", "float"), s=np.full(1, 0.35, np.float32))
    graph = named_graph(made)
    MergeScalesOfProduct().apply(graph)
    feed = {name: array * np.float32(2e19) for name, array in sample(made).items()}
    assert np.isfinite(outputs(made, feed)["y"]).all()
    assert difference(outputs(graph, feed), outputs(made, feed)) < 2e-6


def test_wide_scales_stay() -> None:
    made = model(TEXT.replace("TYPE", "float").replace("y)", "z)", 0), s=np.full((1, 1, 1, 1), 0.35, np.float32))
    ((_, reason),) = MergeScalesOfProduct().apply(named_graph(made)).skipped
    assert reason == "a scale may have more dimensions than its data"
