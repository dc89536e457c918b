"""A weight whose codes serve only one of its readers is said to be stored a second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.config.scheme import Mode, QuantSpec, Rule, Scheme

BODIES = {
    "by Gemm": ("a = Gemm(x, w)  t = Tanh(a)  y = Gemm <transB = 1> (t, w)", 2),
    "in one order": ("a = MatMul(x, w)  t = Tanh(a)  y = MatMul(t, w)", 1),
    "turned twice": (
        "v = Transpose <perm = [1, 0]> (w)  a = MatMul(x, v)  t = Tanh(a)  y = Gemm <transB = 1> (t, w)",
        1,
    ),
    "in a body": (
        """a = MatMul(x, w)  t = Tanh(a)  y, z = Scan <num_scan_inputs = 1, body = b (float[3,256] h, float[256] u) =>
            (float[3,256] k, float[3,256] o) { m = MatMul(h, w)  k = Add(m, u)  o = Identity(k) }> (t, s)""",
        1,
    ),
}

# With one scale the codes differ only because they are fitted in pairs along the axis that each node sums over.
PER_TENSOR = Scheme(rules=(Rule(Mode.STATIC, weight=QuantSpec("int8")),))


@pytest.mark.parametrize(("body", "copies"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("scheme", ["int8", "int8 per tensor", "int8-storage"])
def test_a_weight_is_stored_once_or_the_plan_says_why(
    scheme: str,
    body: str,
    copies: int,
    build: Callable[..., ModelProto],
    quantize_to: Callable[..., Any],
    tmp_path: Path,
) -> None:
    more = {"s": np.zeros((2, 256), np.float32)} if "(t, s)" in body else {}
    weight = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32) / 16
    model = build(f"(float[3,256] x) => (float[3,256] y) {{ {body} }}", w=weight, **more)
    result = quantize_to(model, tmp_path / "small.onnx", scheme=PER_TENSOR if scheme == "int8 per tensor" else scheme)
    told = [one for one in result.report.plan.decisions if "its weight is stored a second time, as node" in one.reason]
    assert len(told) == copies - 1
    size = (tmp_path / "small.onnx").stat().st_size
    assert weight.size * copies < size < weight.size * copies + 5000
    onnx.checker.check_model(tmp_path / "small.onnx", full_check=True)
