"""The first node that an engine computes otherwise is found, whatever stands around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from evaluation.wrong_engine import Wrong
from onnxq.evaluation.first_difference import first_difference
from onnxq.runtime.engine import OnnxRuntime


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("[a] h = Tanh(x) [b] i = Sin(h) [c] j = Exp(i) [d] y = Neg(j)", "b (Sin)"),
        ("[a] y = Sin(x)", "a (Sin)"),
        ("[a] h = Tanh(x) [b] i = Exp(h) y = Neg(i)", ""),
        ("[a] h = Tanh(x) [b] i = Sin(x) [c] j = Exp(h) [d] y = Add(i, j)", "b (Sin)"),
        ("[a] h = Sin(x) [b] i = Tanh(x) [c] j = Exp(i) [d] k = Neg(j) [e] y = Add(h, k)", "a (Sin)"),
        ("h = Sin(x) [b] i = Shape(h) [c] j = Exp(h) [d] y = Neg(j)", "h (Sin)"),
        ("[a] h = Sin(x) [b] i = Greater(h, x) [c] j = Cast<to = 1>(i) [d] y = Neg(j)", "a (Sin)"),
    ],
)
def test_it_is_the_one_whose_inputs_agree(
    build: Callable[..., ModelProto], tmp_path: Path, nodes: str, expected: str
) -> None:
    model = build(f"(float[64] x) => (float[64] y) {{ {nodes} }}")
    sample = {"x": np.linspace(-9, 9, 64, dtype=np.float32)}
    assert first_difference(model, "y", sample, OnnxRuntime(), Wrong(), tmp_path) == expected
