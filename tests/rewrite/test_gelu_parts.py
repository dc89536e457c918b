"""Activation functions are known by their parts."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import model

from onnxq.ir import as_graph
from onnxq.passes.activations import is_gelu_before_halving


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("e = Erf(x) a = Add(e, one) y = Mul(x, a)", True),
        ("e = Tanh(x) a = Add(one, e) y = Mul(a, x)", True),
        ("e = Exp(x) a = Add(e, one) y = Mul(x, a)", False),
        ("e = Erf(x) y = Mul(x, e)", False),
        ("e = Erf(x) a = Add(e, one) y = Add(x, a)", False),
        ("y = Mul(x, one)", False),
    ],
)
def test_gelu_before_halving(body: str, expected: bool) -> None:
    graph = as_graph(model(f"g (float[4] x) => (float[4] y) {{ {body} }}", one=np.array(1, np.float32)))
    assert is_gelu_before_halving(graph.outputs[0]) == expected
    assert not is_gelu_before_halving(graph.inputs[0])
