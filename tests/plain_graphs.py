"""A small model as plain GraphSurgeon reads it, and what it computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from onnx import parser

MODEL = """<ir_version: 8, opset_import: ["" : 17], producer_name: "p">
g (float[N,4] x, bool c) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
  [scale] h = Mul(x, w)
  [branch] y = If (c) <then_branch = t () => (u) { u = Add(h, w) }, else_branch = e () => (v) { v = Neg(h) }>
}"""


def plain() -> gs.Graph:
    return gs.import_onnx(parser.parse_model(MODEL))  # noqa: TID251 - what users hand over


def run(model: onnx.ModelProto, flag: bool) -> np.ndarray:
    feeds = {"x": np.ones((1, 4), np.float32), "c": np.array(flag)}
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
