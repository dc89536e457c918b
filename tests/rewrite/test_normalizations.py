"""A normalization keeps its form where its operator would change it, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from model_texts import model, named_graph

from onnxq.passes.norms import normalization_obstacle


@pytest.mark.parametrize(
    ("kind", "shape", "axes", "opset", "reason"),
    [
        ("float", "2, 8", [-1], 23, ""),
        ("float", "2, 8", [1], 23, ""),
        ("float", "2, 8", [0], 23, "it normalizes along another axis than the last"),
        ("float", "2, 8", [-1], 22, "ONNX has RMSNormalization from opset 23 on"),
        ("float", "2, K", [-1], 23, "type or length of what it normalizes is unknown"),
        ("double", "2, 8", [-1], 23, "float64 would be normalized with float32"),
    ],
)
def test_an_obstacle_has_its_reason(kind: str, shape: str, axes: Sequence[int], opset: int, reason: str) -> None:
    graph = named_graph(
        model(f"g ({kind}[{shape}] x) => ({kind}[2, 1] y) {{ y = ReduceMean(x, axes) }}", opset=18, axes=np.array(axes))
    )
    (mean,) = graph.nodes
    found = SimpleNamespace(opset=opset, values={}, nodes=[mean], x=graph.inputs[0])
    assert normalization_obstacle(found, "RMSNormalization", 23, mean) == reason
    assert normalization_obstacle(found, "RMSNormalization", 23) != "it normalizes along another axis than the last"
