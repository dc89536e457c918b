"""What scales and shifts behind a normalization becomes its own."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values

from onnxq.passes import FoldAffineIntoNormalization


def norm(
    tail: str, *, given: str = "x, w, b", shape: str = "2, N, 8", axis: int = -1, **constants: np.ndarray
) -> object:
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ n = LayerNormalization <axis = {axis}> ({given}) {tail} }}"
    return model(text, w=values(8), b=values(8, seed=1), **constants)


@pytest.mark.parametrize("given", ["x, w, b", "x, w"])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8), (1,), (), (1, 1, 1)])
@pytest.mark.parametrize("tail", ["y = Mul(n, k)", "y = Add(k, n)", "m = Mul(k, n) a = Add(m, k) y = Mul(a, k)"])
def test_scale_and_bias_take_them(tail: str, shape: tuple[int, ...], given: str) -> None:
    made = norm(tail, given=given, k=values(*shape, seed=2))
    graph = named_graph(made)
    apply_once(FoldAffineIntoNormalization(), graph)
    assert ops(graph) == ["LayerNormalization"]
    assert graph.nodes[0].attrs["axis"] == -1
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


def test_rms_normalization_takes_a_scale() -> None:
    made = model(
        "g (float[2, 8] x) => (float[2, 8] y) { n = RMSNormalization(x, w) m = Mul(n, k) y = Add(m, k) }",
        opset=23, ir_version=11, w=values(8), k=values(8, seed=2),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(FoldAffineIntoNormalization(), graph)
    assert ops(graph) == ["RMSNormalization", "Add"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (norm("y = Mul(n, k)", shape="2, 3, 8", k=values(3, 1)), "varies along another axis"),
        (norm("y = Mul(n, k)", shape="2, 8", k=values(1, 2, 8)), "more dimensions than its data"),
        (norm("y = Mul(n, k)", shape="2, 8", given="x, v", axis=0, v=values(2, 8), k=values(8)), "several axes"),
    ],
)
def test_a_refusal_has_its_reason(made: object, reason: str) -> None:
    ((_, found),) = FoldAffineIntoNormalization().apply(named_graph(made)).skipped
    assert reason in found


def test_leaves_a_normalization_that_others_read() -> None:
    made = model(
        "g (float[2, 8] x) => (float[2, 8] y, float[2, 8] z) { n = LayerNormalization(x, w) y = Mul(n, w) z = Neg(n) }",
        w=values(8),
    )
    assert not FoldAffineIntoNormalization().apply(named_graph(made))
