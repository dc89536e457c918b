"""Factors of Gemm go into its constants."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import FoldGemmFactors


def gemm(attributes: str, *, data: str = "N, 8", weight: tuple[int, ...] = (8, 4), bias: str = "b") -> ModelProto:
    return model(
        f"g (float[{data}] x, float[4] k) => (float[N, 4] y) {{ y = Gemm <{attributes}> (x, w, {bias}) }}",
        w=values(*weight), b=values(4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (gemm("alpha = 0.5"), ["Gemm"]),
        (gemm("beta = 0.25"), ["Gemm"]),
        (gemm("beta = 0.0"), ["Gemm"]),
        (gemm("beta = 0.0", bias="k"), ["Gemm"]),
        (gemm("alpha = 2.0, beta = 1.0", bias="k"), ["Gemm"]),
        (gemm("alpha = 2.0, beta = 3.0, transB = 1", weight=(4, 8)), ["Gemm"]),
        (gemm("alpha = 0.5, transA = 1", data="8, N"), ["Transpose", "Gemm"]),
        (gemm("transA = 1, transB = 1", data="8, N", weight=(4, 8)), ["Transpose", "Gemm"]),
    ],
)
def test_factors_go(made: ModelProto, expected: list[str]) -> None:
    graph = named_graph(made)
    apply_once(FoldGemmFactors(), graph)
    assert ops(graph) == expected
    assert set(graph.nodes[-1].attrs) <= {"transB"}
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (gemm("beta = 0.5", bias="k"), "its beta scales a bias that is computed at run time"),
        (gemm("transB = 0"), "it has no alpha, beta or transA"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    assert [found for _, found in FoldGemmFactors().apply(named_graph(made)).skipped] == [reason]


def test_a_table_that_is_looked_up_is_not_copied() -> None:
    made = model(
        """g (int64[N] i, float[8, 4] x) => (float[8, 6] y) {
            r = Gather(w, i) y = Gemm <alpha = 2.0, transB = 1> (x, w) }""",
        w=values(6, 4),
    )
    ((_, reason),) = FoldGemmFactors().apply(named_graph(made)).skipped
    assert reason == "its weight is a table that is looked up too"
