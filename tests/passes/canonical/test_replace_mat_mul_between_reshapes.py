"""MatMul and Add between Reshapes to other shapes become Gemm."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import ReplaceGemmBetweenReshapes, ReplaceMatMulBetweenReshapes
from onnxq.rewrite import RewriteRules

BOTH = RewriteRules((ReplaceGemmBetweenReshapes(), ReplaceMatMulBetweenReshapes()))


def windows(
    to: tuple[int, ...] = (4, 2, 2, 2), *, bias: tuple[int, ...] = (4,), weight: tuple[int, ...] = (8, 4)
) -> ModelProto:
    return model(
        f"""g (float[2, 2, 2, 8] x) => (float[{", ".join("abcd"[: len(to)])}] y) {{
            r = Reshape(x, rows) p = MatMul(r, w) s = Add(b, p) y = Reshape(s, to) }}""",
        rows=np.array([2, 4, 8]), w=values(*weight), b=values(*bias), to=np.array(to),
    )  # fmt: skip


@pytest.mark.parametrize("made", [windows(), windows((-1, 4)), windows(bias=(1, 1, 4)), windows((2, 2, 4, 2))])
def test_a_gemm_has_the_bias(made: ModelProto) -> None:
    graph = named_graph(made)
    apply_once(BOTH, graph)
    assert ops(graph) == ["Reshape", "Gemm", "Reshape"]
    assert graph.nodes[1].inputs[2].shape == (4,)
    assert [node.name for node in graph.nodes[1:]] == ["MatMul_p", "Reshape_y"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (windows((2, 2, 2, 4)), "its result may have the shape of its data"),
        (windows((0, 2, 2, 4)), "copied from the data"),
        (windows((2, 4, 2, 2), bias=(4, 1)), "not one value for each channel"),
        (windows((2, 4, 2, 2), weight=(2, 8, 4)), "its weight is no matrix"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = ReplaceMatMulBetweenReshapes().apply(named_graph(made)).skipped
    assert reason in found
