"""Matrices of a batch are transposed at once."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample
from onnx import ModelProto

from onnxq.passes import MergeTransposeBetweenReshapes


def key(data: str, flat: tuple[int, ...], to: tuple[int, ...], result: str = "a, b, c, d") -> ModelProto:
    return model(
        f"""g (float[{data}] x) => (float[{result}] y) {{
            f = Reshape(x, flat) t = Transpose <perm = [0, 2, 1]> (f) y = Reshape(t, to) }}""",
        flat=np.array(flat), to=np.array(to),
    )  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        key("2, 3, 4, 5", (-1, 4, 5), (2, 3, 5, 4)),
        key("2, 3, 4, 5", (6, 4, 5), (-1, 3, 5, 4)),
        key("N, 3, 4, 5", (-1, 4, 5), (-1, 3, 5, 4), "N, 3, 5, 4"),
    ],
)
def test_becomes_one_transpose(made: ModelProto) -> None:
    graph = named_graph(made)
    # What follows symbolic dimensions through Reshape knows this.
    graph.outputs[0].shape = [*graph.inputs[0].shape[:2], 5, 4]
    apply_once(MergeTransposeBetweenReshapes(), graph)
    assert ops(graph) == ["Transpose"]
    assert graph.nodes[0].attrs == {"perm": [0, 1, 3, 2]}
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (key("2, 3, 4, 5", (8, 3, 5), (2, 4, 5, 3)), "do not keep the last two axes"),
        (key("2, 3, 4, 5", (-1, 4, 5), (3, 2, 5, 4)), "do not keep the last two axes"),
        (key("4, 5", (1, 4, 5), (1, 5, 4), "a, b, c"), "unknown"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = MergeTransposeBetweenReshapes().apply(named_graph(made)).skipped
    assert reason in found
