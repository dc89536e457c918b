"""Ranks as far as they are known."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import model

from onnxq.ir import Variable, as_graph, constant
from onnxq.rewrite import OpsetPatternBuilder
from onnxq.rewrite.patterns import find
from onnxq.rewrite.soundness import may_widen, rank, reduces_last_axis


def test_rank_is_that_of_the_shape_where_there_is_one() -> None:
    assert rank(Variable("x", np.float32, ["N", None])) == 2
    assert rank(Variable("x", np.float32, [])) == 0
    assert rank(Variable("x", np.float32)) is None
    assert rank(constant("c", np.zeros((1, 2)))) == 2


@pytest.mark.parametrize(
    ("shape", "factor", "wider"),
    [("[3]", (1,), False), ("[3]", (1, 1), True), ("[]", (), False), ("[]", (1,), True), ("[2, 3]", (1, 1), False)],
)
def test_constants_of_more_dimensions_widen(shape: str, factor: tuple[int, ...], wider: bool) -> None:
    graph = as_graph(model(f"g (float{shape} x) => (float[a, b] y) {{ y = Mul(x, f) }}", f=np.ones(factor, np.float32)))
    found = find(OpsetPatternBuilder("Example").Mul(OpsetPatternBuilder("Example").any("x"), 1.0), graph.nodes[0], 17)
    assert found is not None
    assert may_widen(found.nodes, found.x) == wider
    found.x.shape = None
    assert may_widen(found.nodes, found.x) == bool(factor)


@pytest.mark.parametrize(
    ("axes", "last"), [("<axes = [-1]>", True), ("<axes = [2]>", True), ("<axes = [1]>", False), ("", False)]
)
def test_the_last_axis_is_the_only_one_reduced(axes: str, last: bool) -> None:
    graph = as_graph(model(f"g (float[2, 3, N] x) => (float[a, b, c] y) {{ y = ReduceMean {axes} (x) }}"))
    assert reduces_last_axis(graph.nodes[0]) == last
    text = "g (float[2, 3, N] x, int64[1] k) => (float[a, b, c] y, float[a, b, c] z) {"
    graph = as_graph(model(f"{text} y = ReduceMean(x, w) z = ReduceMean(x, k) }}", opset=18, w=np.array([-1])))
    assert [reduces_last_axis(node) for node in graph.nodes] == [True, False]
    graph.nodes[0].inputs[0].shape = None
    assert reduces_last_axis(graph.nodes[0])
