"""Which nodes have a bias that can make up for rounded weights."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.planning.plan import Mean, Plan

WEIGHT = np.linspace(-1, 1, 32 * 32, dtype=np.float32).reshape(32, 32)
BIAS = np.ones(32, np.float32)
KERNEL = WEIGHT[..., None, None]


def mean_of(plan: Plan) -> Mean | None:
    return next(one.mean for one in plan.decisions if one.weights)


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("(float[1,32,8,8] x) => (float[1,32,8,8] y) { y = Conv(x, k, b) }", Mean("x", 1)),
        ("(float[1,32,8,8] x) => (float[1,32,8,8] y) { y = Conv(x, k) }", Mean("x", 1)),
        ("(float[1,32,8,8] x, float[32] c) => (float[1,32,8,8] y) { y = Conv(x, k, c) }", None),
        ("(float[1,32,8,8] x) => (float[1,32,8,8] y) { y = ConvTranspose(x, k, b) }", Mean("x", 1)),
        ("(float[1,32,8,8] x) => (float[1,32,8,8] y) { y = ConvTranspose(x, k) }", Mean("x", 1)),
        ("(float[1,32,8,8] x) => (float[1,64,8,8] y) { y = ConvTranspose <group=2>(x, k) }", Mean("x", 1)),
        ("(float[1,32,8,8] x) => (float[1,64,8,8] y) { y = ConvTranspose <group=2>(x, k, twice) }", Mean("x", 1)),
        ("(float[1,32,8,8] x) => (float[1,64,8,8] y) { y = ConvTranspose <group=2>(x, k, b) }", None),
        ("(float[4,32] x) => (float[4,32] y) { y = Gemm(x, w) }", None),
        ("(float[4,32] x) => (float[4,32] y) { y = Gemm(x, w, b) }", Mean("x", -1)),
        ("(float[4,32] x) => (float[4,32] y) { y = Gemm <alpha=2.0>(x, w, b) }", Mean("x", -1)),
        ("(float[4,32] x) => (float[4,32] y) { y = Gemm(x, w, one) }", None),
        ("(float[4,32] x) => (float[4,32] y) { p = MatMul(x, w) y = Add(p, b) }", Mean("x", -1)),
        ("(float[4,32] x) => (float[4,32] y) { p = MatMul(x, w) y = Sub(p, b) }", Mean("x", -1)),
        ("(float[4,32] x) => (float[4,32] y) { p = MatMul(x, w) y = Add(p, x) }", None),
        ("(float[4,32] x) => (float[4,32] y, float[4,32] p) { p = MatMul(x, w) y = Add(p, b) }", Mean("x", -1)),
        ("(float[4,32] x) => (float[4,32] y) { p = MatMul(w, x) y = Add(p, b) }", None),
    ],
)
def test_a_constant_bias_of_each_channel_is_corrected(build, plan_of, text: str, mean: Mean | None) -> None:
    made = build(text, w=WEIGHT, k=KERNEL, b=BIAS, one=np.ones(1, np.float32), twice=np.ones(64, np.float32))
    assert mean_of(plan_of(made)) == mean
