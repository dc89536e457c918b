"""Rectifiers with slopes are what PRelu says, from the opset on that can say it."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import model, named_graph, outputs

from onnxq.graph import RewriteRule
from onnxq.graph.rectifiers import first_opset, rectified


class Rectify(RewriteRule):
    def pattern(self, op):
        return op.PRelu(op.any("x"), op.constant("slope"))

    def replacement(self, new, found):
        return rectified(new, found.x, found.slope.values)


@pytest.mark.parametrize(
    ("slope", "opset"), [([-2, 0, 1], 8), ([1, 1, 1], 8), ([1, 2, 3], 8), ([-1, 1, 2], 11), ([0, 0.5, 1.5], 11)]
)
def test_each_sign_gets_its_slope(slope: list[float], opset: int) -> None:
    slopes = np.array(slope, np.float32)
    assert first_opset(slopes) == opset
    made = model("g (float[2, 3] x) => (float[2, 3] y) { y = PRelu(x, k) }", opset=max(opset, 9), k=slopes)
    graph = named_graph(made)
    assert Rectify().apply(graph)
    x = np.array([[-3, -0.25, -7], [2, 0, 5]], np.float32)
    np.testing.assert_allclose(outputs(graph, {"x": x})["y"], np.where(x < 0, x * slopes, x), rtol=1e-6)
