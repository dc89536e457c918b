"""Dequantize weights in a graph: nodes of standard ONNX, or kernels of onnxruntime, that read quantized values."""

from __future__ import annotations

from onnxq.lowering.decode import decode_folded, decode_linear, decode_rows, is_linear, numbers_in_words
from onnxq.lowering.kernels import (
    AllowedOps,
    allowed_ops_named,
    gather_block_quantized,
    is_kernel_block,
    kernel_supports,
    matmul_nbits,
    minimum_opset,
    qmoe,
    should_use_kernel,
    stored_experts,
)
from onnxq.lowering.layout import transposed

__all__ = [
    "AllowedOps",
    "allowed_ops_named",
    "decode_folded",
    "decode_linear",
    "decode_rows",
    "gather_block_quantized",
    "is_kernel_block",
    "is_linear",
    "kernel_supports",
    "matmul_nbits",
    "minimum_opset",
    "numbers_in_words",
    "qmoe",
    "should_use_kernel",
    "stored_experts",
    "transposed",
]
