"""Models of one operator on quantized values each, by the float operator that it stands for."""

from __future__ import annotations

import numpy as np
import onnx
from model_texts import Array, model, values
from onnx import ModelProto

from onnxq.ops import INTEGER_OPERATORS

"""Codes of 8 bits on inputs of about three times their standard deviation, and results on 8 bits once more."""


def encodings_of(weight: Array, scale: Array | float, zero_point: Array | int = 0) -> Array:
    return np.clip(np.rint(weight / scale) + zero_point, -128, 127).astype(np.int8)


def example(
    body: str, *, inputs: str = "x", opset: int = 17, shape: str = "2, 8, 6, 6", step: float = 0.05, **weights: Array
) -> ModelProto:
    """Inputs become quantized values ``qx``, the body makes quantized values ``qy``, and these become the output."""
    fed = ", ".join(f"float[{shape}] {name}" for name in inputs)
    encode = " ".join(f"q{name} = QuantizeLinear({name}, s, z)" for name in inputs)
    made = model(
        f"g ({fed}) => (float y) {{ {encode} [op] {body} y = DequantizeLinear(qy, t, v) }}",
        opset=opset, ir_version=10,
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8),
        t=np.array(step, np.float32), v=np.array(100, np.uint8), **weights,
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    contrib = {op for op in INTEGER_OPERATORS if not onnx.defs.has(op)}
    for node in made.graph.node:
        node.domain = "com.microsoft" if node.op_type in contrib else ""
    made.opset_import.add(domain="com.microsoft", version=1)
    return made


KERNEL, COLUMNS = values(4, 8, 3, 3), values(6, 5)
FILTERS = np.linspace(0.01, 0.02, 4, dtype=np.float32)
PER_COLUMN = np.linspace(0.01, 0.02, 5, dtype=np.float32)
BIAS = np.linspace(-1, 1, 4, dtype=np.float32)
CONV = {
    "w": encodings_of(KERNEL, FILTERS.reshape(-1, 1, 1, 1)), "ws": FILTERS, "wz": np.zeros(4, np.int8),
    "b": np.rint(BIAS / (np.float32(0.03) * FILTERS)).astype(np.int32),
}  # fmt: skip
DOT = {"w": encodings_of(COLUMNS, PER_COLUMN), "ws": PER_COLUMN, "wz": np.zeros(5, np.int8)}
GEMM = {
    "w": encodings_of(COLUMNS.T, 0.015, 3), "ws": np.array(0.015, np.float32), "wz": np.array(3, np.int8),
    "b": np.rint(np.linspace(-1, 1, 5) / (0.03 * 0.015)).astype(np.int32),
}  # fmt: skip

EXAMPLES: dict[str, tuple[ModelProto, list[str]]] = {
    "QLinearConv": (
        example("qy = QLinearConv <pads = [1, 1, 1, 1]> (qx, s, z, w, ws, wz, t, v, b)", step=0.15, **CONV),
        ["Conv"],
    ),
    "QLinearConv without a bias": (
        example("qy = QLinearConv(qx, s, z, w, ws, wz, t, v)", step=0.15, **CONV),
        ["Conv"],
    ),
    "QLinearMatMul": (example("qy = QLinearMatMul(qx, s, z, w, ws, wz, t, v)", **DOT), ["MatMul"]),
    "QLinearMatMul of two activations": (
        example("qy = QLinearMatMul(qx, s, z, qw, s, z, t, v)", inputs="xw", step=0.15),
        ["MatMul"],
    ),
    "QGemm": (
        example("qy = QGemm <transB = 1> (qx, s, z, w, ws, wz, b, t, v)", shape="7, 6", **GEMM),
        ["Gemm"],
    ),
    "QLinearAdd": (example("qy = QLinearAdd(qx, s, z, qw, s, z, t, v)", inputs="xw"), ["Add"]),
    "QLinearAdd of constant codes": (
        example("qy = QLinearAdd(qx, s, z, c, s, z, t, v)", c=np.arange(90, 126, dtype=np.uint8).reshape(6, 6)),
        ["Add"],
    ),
    "QLinearMul": (example("qy = QLinearMul(qx, s, z, qw, s, z, t, v)", inputs="xw", step=0.1), ["Mul"]),
    "QLinearAveragePool": (
        example("qy = QLinearAveragePool <kernel_shape = [2, 2], strides = [2, 2]> (qx, s, z, t, v)", step=0.02),
        ["AveragePool"],
    ),
    "QLinearGlobalAveragePool": (
        example("qy = QLinearGlobalAveragePool <channels_last = 0> (qx, s, z, t, v)", step=0.005),
        ["GlobalAveragePool"],
    ),
    "QLinearLeakyRelu": (example("qy = QLinearLeakyRelu <alpha = 0.25> (qx, s, z, t, v)", step=0.03), ["LeakyRelu"]),
    "QLinearReduceMean": (
        example("qy = QLinearReduceMean <axes = [1, 3], keepdims = 0> (qx, s, z, t, v)"),
        ["ReduceMean"],
    ),
    "QLinearReduceMean with axes as an input": (
        example("qy = QLinearReduceMean <axes = [1, 3], keepdims = 0> (qx, s, z, t, v)", opset=18),
        ["ReduceMean"],
    ),
    "QLinearSigmoid": (example("qy = QLinearSigmoid(qx, s, z, t, v)", step=0.008), ["Sigmoid"]),
    "QLinearSoftmax": (
        example("qy = QLinearSoftmax <axis = -1, opset = 17> (qx, s, z, t, v)", step=0.008),
        ["Softmax"],
    ),
    "QLinearConcat": (example("qy = QLinearConcat <axis = 1> (t, v, qx, s, z, qw, s, z, qx, s, z)", inputs="xw"),
                      ["Concat"]),
    "QLinearWhere": (
        example("qy = QLinearWhere(c, qx, s, z, qw, s, z, t, v)", inputs="xw", c=np.array([True, False] * 3)),
        ["Where"],
    ),
}  # fmt: skip
