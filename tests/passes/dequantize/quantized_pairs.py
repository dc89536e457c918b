"""Models with pairs of QuantizeLinear and DequantizeLinear, and their removal."""

from __future__ import annotations

import numpy as np
import onnx
from model_texts import Array, apply_once, model, named_graph
from onnx import ModelProto

from onnxq.ir import Graph, to_model
from onnxq.passes import RemoveQuantizeDequantize, RemoveUnused
from onnxq.rewrite import Changes

SCALE = np.array(0.05, np.float32)
MIDDLE = np.array(120, np.uint8)
"""Codes reach from -6 to 6.75."""


def remove(made: ModelProto) -> tuple[Graph, Changes]:
    graph = named_graph(made)
    changes = apply_once(RemoveQuantizeDequantize(), graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return graph, changes


def quantized(body: str, opset: int = 17, **weights: Array) -> ModelProto:
    return model(body, opset=opset, ir_version=10, s=SCALE, z=MIDDLE, **weights)
