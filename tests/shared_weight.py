"""Two products that share a weight, and plans for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.ir import Graph, as_graph
from onnxq.numerics.affine import QuantParams
from onnxq.planning.plan import Activation, Decision, Plan, Weight

Build = Callable[..., ModelProto]
CHANNELS = QuantSpec("int8-narrow", Granularity.CHANNEL)
SCALES = {"x": QuantParams(np.array(0.02, np.float32), np.array(128, np.uint8))}
TWO = """(float[3,4] x) => (float[3,4] y, float[3,4] z) { [a] y = Gemm(x, w, b)  [c] z = Gemm(x, w, d) }"""


def plan_of(*modes: Mode, weight: QuantSpec = CHANNELS) -> Plan:
    decisions = (
        Decision(name, "Gemm", mode, "", (Weight(1, "w", weight, 1, 16, 0),), 2 if mode is Mode.STATIC else None, "x")
        for name, mode in zip("ac", modes, strict=False)
    )
    return Plan(tuple(decisions), (Activation("x", QuantSpec("uint8", symmetric=False), "x"),), "s", "t")


def graph_of(build: Build, **stored: object) -> Graph:
    rows = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    return as_graph(build(TWO, **{"w": rows, "b": np.ones(4, np.float32), "d": np.ones(4, np.float32), **stored}))
