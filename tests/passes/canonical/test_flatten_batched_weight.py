"""Weights of products become matrices where the result keeps its shape."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import FlattenBatchedWeight


def product(data: str, result: str, *weight: int, tail: str = "") -> ModelProto:
    return model(f"g (float[{data}] x) => (float[{result}] y) {{ {tail} y = MatMul(x, w) }}", w=values(*weight))


@pytest.mark.parametrize(
    "made",
    [product("2, N, 8", "2, N, 4", 1, 8, 4), product("2, 3, N, 8", "2, 3, N, 4", 1, 1, 8, 4),
     product("2, 3, N, 8", "2, 3, N, 4", 1, 8, 4)],
)  # fmt: skip
def test_leading_ones_go(made: ModelProto) -> None:
    graph = named_graph(made)
    apply_once(FlattenBatchedWeight(), graph)
    assert graph.nodes[0].inputs[1].shape == (8, 4)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (product("N, 8", "1, N, 4", 1, 8, 4), "fewer dimensions"),
        (product("2, N, 8", "2, N, 4", 2, 8, 4), "not 1"),
        (product("2, N, 8", "2, N, 4", 8, 4), "no leading dimensions"),
        (product("2, N, 8", "2, N, 4", 1, 8, 4, tail="other = Neg(w)"), "others than products"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = FlattenBatchedWeight().apply(named_graph(made)).skipped
    assert reason in found
