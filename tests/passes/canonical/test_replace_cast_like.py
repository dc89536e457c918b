"""ReplaceCastLike names the type that CastLike takes from a tensor."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample

from onnxq.passes import ReplaceCastLike


@pytest.mark.parametrize("opset", [15, 19, 21])
def test_a_known_type_is_named(opset: int) -> None:
    made = model("g (float[4] x, double[1] z) => (double[4] y) { [cast] y = CastLike(x, z) }", opset=opset)
    graph = named_graph(made)
    apply_once(ReplaceCastLike(), graph)
    assert ops(graph) == ["Cast"]
    assert graph.nodes[0].attrs["to"] == 11
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_an_unknown_type_stays() -> None:
    graph = named_graph(model("g (float[4] x) => (float[4] y) { a = local.F(x) [cast] y = CastLike(x, a) }"))
    assert ReplaceCastLike().apply(graph).skipped == (("cast", "the type to cast to is not known"),)
