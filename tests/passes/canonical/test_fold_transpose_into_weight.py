"""FoldTransposeIntoWeight reorders the rows of a weight instead of an image."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, ops, outputs, sample, values

from onnxq.ir import Graph
from onnxq.passes import FoldTransposeIntoWeight
from onnxq.rewrite import Changes

WEIGHTS = {
    "w": values(24, 5),
    "v": values(5, 24),
    "b": values(5),
    "rest": np.array([-1, 24]),
    "same": np.array([0, -1]),
    "mixed": np.array([-1, 12]),
    "narrow": values(12, 5),
}
TURN = "t = Transpose<perm = [0, 2, 3, 1]>(x)"


def fold(body: str, data: str = "N, 2, 3, 4", result: str = "N, 5") -> tuple[Graph, Changes]:
    used = {name: array for name, array in WEIGHTS.items() if f", {name}" in body}
    made = model(f"g (float[{data}] x) => (float[{result}] y) {{ {body} }}", **used)
    graph = named_graph(made)
    changes = FoldTransposeIntoWeight().apply(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6
    assert not FoldTransposeIntoWeight().apply(graph)
    return graph, changes


@pytest.mark.parametrize("order", ["0, 2, 3, 1", "0, 3, 1, 2", "0, 3, 2, 1", "0, 1, 3, 2"])
@pytest.mark.parametrize(
    "behind",
    [
        "f = Flatten(t) y = Gemm(f, w, b)",
        "f = Reshape(t, rest) y = MatMul(f, w)",
        "f = Reshape(t, same) y = Gemm<transB = 1>(f, v)",
    ],
)
def test_the_rows_are_reordered(order: str, behind: str) -> None:
    graph, _ = fold(f"t = Transpose<perm = [{order}]>(x) {behind}")
    assert ops(graph) == [behind.split()[2].split("(")[0], behind.split("y = ")[1].split("(")[0].split("<")[0]]


@pytest.mark.parametrize(
    ("body", "data", "reason"),
    [
        (f"{TURN} f = Flatten(t) y = MatMul(f, w)", "N, 2, H, 4", "the shape of its data is not known"),
        (f"{TURN} f = Reshape(t, mixed) y = MatMul(f, narrow)", "N, 2, 3, 4", "it is not known to flatten"),
        ("t = Transpose<perm = [1, 0, 2, 3]>(x) f = Flatten(t) y = MatMul(f, w)", "2, N, 3, 4", "it moves the batch"),
        (f"{TURN} f = Flatten(t) k = MatMul(f, w) l = Abs(w) y = Add(k, l)", "24, 2, 3, 4", "others read the weight"),
    ],
)
def test_others_stay(body: str, data: str, reason: str) -> None:
    used = {name: array for name, array in WEIGHTS.items() if f", {name}" in body}
    graph = named_graph(model(f"g (float[{data}] x) => (float[M, 5] y) {{ {body} }}", **used))
    changes = FoldTransposeIntoWeight().apply(graph)
    assert not changes.changed
    assert reason in changes.skipped[0][1]
