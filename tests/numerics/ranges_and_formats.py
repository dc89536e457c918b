"""Formats and numbers that quantized values are tried on."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxq.numerics.formats import FORMATS
from onnxq.runtime.sessions import Session, open_session

UINT8 = FORMATS["uint8"]
NARROW = FORMATS["int8-narrow"]
TINY = np.finfo(np.float32).tiny
LARGEST = float(np.finfo(np.float32).max)

# onnxruntime has no QuantizeLinear to int32, and numpy no arrays of the smaller quantized values that it gives.
QUANTIZED = [format for format in FORMATS.values() if not format.is_float and format.bits in (8, 16)]
INTEGERS = [format for format in FORMATS.values() if not format.is_float]
every_quantized = pytest.mark.parametrize("format", QUANTIZED, ids=lambda format: format.name)

finite = st.floats(-LARGEST, LARGEST, width=32)
formats = st.sampled_from(INTEGERS)


# --- onnxruntime, bit for bit ---------------------------------------------------------------------------------------


@cache
def session(op: str, onnx_type: int, axis: int | None) -> Session:
    scale_shape = [] if axis is None else [None]
    stored, real = helper.make_tensor_value_info, TensorProto.FLOAT
    source, result = (real, onnx_type) if op == "QuantizeLinear" else (onnx_type, real)
    node = helper.make_node(op, ["x", "scale", "zero"], ["y"], **({} if axis is None else {"axis": axis}))
    graph = helper.make_graph(
        [node],
        "one",
        [stored("x", source, None), stored("scale", real, scale_shape), stored("zero", onnx_type, scale_shape)],
        [stored("y", result, None)],
    )
    return open_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
