"""Small models of quantized values, as quantizers write them."""

from __future__ import annotations

import numpy as np
from model_texts import Array, model
from onnx import ModelProto


def quantized(*shape: int, seed: int = 0) -> Array:
    """Return quantized values of which two products with 8 bits fit 16, as processors without VNNI add them."""
    return np.random.default_rng([seed, *shape]).integers(-64, 65, shape).astype(np.int8)


def quantized_pairs() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 8] y) {
            q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
            w = DequantizeLinear <axis = 1> (wq, ws)  b = DequantizeLinear(bq, bs)
            [dot] c = Gemm(a, w, b)  t = Tanh(c)
            r = QuantizeLinear(t, u, v)  m = Reshape(r, to)  y = DequantizeLinear(m, u, v)
        }""",
        wq=quantized(16, 8), ws=np.linspace(0.002, 0.004, 8, dtype=np.float32), bq=quantized(8).astype(np.int32),
        bs=np.array(0.001, np.float32), s=np.array(0.03, np.float32), z=np.array(120, np.uint8),
        u=np.array(1 / 128, np.float32), v=np.array(0, np.int8), to=np.array([-1, 8]),
    )  # fmt: skip


def quantized_operators() -> ModelProto:
    return model(
        """g (float[N, 4, 6, 6] x) => (float[N, 8, 4, 4] y) {
            q = QuantizeLinear(x, s, z)
            [conv] r = QLinearConv(q, s, z, wq, ws, wz, t, z)
            y = DequantizeLinear(r, t, z)
        }""",
        wq=quantized(8, 4, 3, 3), ws=np.full(8, 0.004, np.float32), wz=np.zeros(8, np.int8),
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8), t=np.array(0.05, np.float32),
    )  # fmt: skip


def quantized_in_each_run() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 8] y) {
            q, s, z = DynamicQuantizeLinear(x)  f = Mul(s, ws)
            [dot] a = MatMulInteger(q, wq, z)  b = Cast <to = 1> (a)  y = Mul(b, f)
        }""",
        wq=quantized(16, 8), ws=np.linspace(0.002, 0.004, 8, dtype=np.float32),
    )  # fmt: skip


def quantized_weights_in_a_body() -> ModelProto:
    return model(
        """g (float[N, 16] x, bool c) => (float[N, 8] y) {
            d = Cast <to = 1> (wq)  w = Mul(d, ws)
            [branch] y = If (c) <
                then_branch = yes () => (float[N, 8] t) { [yes] t = MatMul(x, w) },
                else_branch = no () => (float[N, 8] e) { [no] k = MatMul(x, w) e = Neg(k) }>
        }""",
        wq=quantized(16, 8), ws=np.linspace(0.002, 0.004, 8, dtype=np.float32),
    )  # fmt: skip
