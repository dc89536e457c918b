"""Products of matrices have their bias inside."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import ReplaceMatMulOfMatrices


def product(*bias: int, data: str = "N, 8", dtype: type = np.float32) -> ModelProto:
    kind = "float" if dtype is np.float32 else "double"
    return model(
        f"g ({kind}[{data}] x) => ({kind}[{data.replace('8', '4')}] y) {{ p = MatMul(x, w) y = Add(b, p) }}",
        w=values(8, 4, dtype=dtype), b=values(*bias, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("bias", [(4,), (1, 4), (1,), (), (1, 1)])
def test_becomes_a_gemm(bias: tuple[int, ...]) -> None:
    made = product(*bias)
    graph = named_graph(made)
    apply_once(ReplaceMatMulOfMatrices(), graph)
    assert ops(graph) == ["Gemm"]
    assert graph.nodes[0].inputs[2].shape == (4,)
    assert graph.nodes[0].name == "MatMul_p"
    assert graph.nodes[0].origins == (("MatMul_p", "MatMul"), ("Add_y", "Add"))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (product(4, data="2, N, 8"), "not known to be a matrix"),
        (product(2, 1, data="2, 8"), "not one value for each channel"),
        (product(4, dtype=np.float64), "it is of type float64"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = ReplaceMatMulOfMatrices().apply(named_graph(made)).skipped
    assert reason in found
