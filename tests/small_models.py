"""Models of a few nodes in ONNX's text form, for several test files."""

from __future__ import annotations

from model_texts import model
from onnx import ModelProto

from onnxq.ir import Graph, read_model

__all__ = ["BRANCHING", "branching", "model", "small"]

BRANCHING = """g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {
  [scale] h = Mul(x, w)
  [branch] y = If (c) <then_branch = t () => (u) { u = Add(h, w) }, else_branch = e () => (h) { }>
}"""


def small() -> ModelProto:
    """One Add of a stored tensor."""
    return model("g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }")


def branching() -> Graph:
    """A Mul whose result both branches of an If capture."""
    return read_model(model(BRANCHING))
