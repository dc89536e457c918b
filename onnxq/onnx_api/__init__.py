"""onnx's own C++ tools, run on a model without its weights: opset conversion, inlining and shape inference."""

from __future__ import annotations

from onnxq.onnx_api.inlining import check_functions, inline_proto_functions
from onnxq.onnx_api.shape_inference import infer_proto, infer_shapes
from onnxq.onnx_api.version_conversion import inline_functions, upgrade_opset
from onnxq.onnx_api.weightless import weightless_model

__all__ = [
    "check_functions",
    "infer_proto",
    "infer_shapes",
    "inline_functions",
    "inline_proto_functions",
    "upgrade_opset",
    "weightless_model",
]
