"""Rectifiers with slopes are what PRelu says, from the opset on that can say it."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import model, named_graph, outputs

from onnxq.passes.activations import FIRST_OPSET, rectified
from onnxq.rewrite import RewriteRule


class Rectify(RewriteRule):
    def pattern(self, op):
        return op.PRelu(op.any("x"), op.constant("slope"))

    def rewrite(self, new, match):
        return rectified(new, match.x, match.slope.values)


@pytest.mark.parametrize(
    "slope", [[-2, 0, 1], [-2, -1, 1], [1, 1, 1], [1, 2, 3], [-1, 1, 2], [0, 0.5, 1.5], [0, 0, 0], [-0.5, 2, 1]]
)
@pytest.mark.parametrize("large", [1.0, 1e38, np.inf])
def test_each_sign_gets_its_slope(slope: list[float], large: float) -> None:
    slopes = np.array(slope, np.float32)
    made = model("g (float[4, 3] x) => (float[4, 3] y) { y = PRelu(x, k) }", opset=FIRST_OPSET, ir_version=5, k=slopes)
    graph = named_graph(made)
    assert Rectify().apply(graph)
    x = np.array([[-3, -0.25, -1], [2, 1, 3], [-1, -1, -1], [1, np.nan, 0.5]], np.float32) * np.float32(large)
    np.testing.assert_allclose(outputs(graph, {"x": x})["y"], outputs(made, {"x": x})["y"], rtol=1e-6)
