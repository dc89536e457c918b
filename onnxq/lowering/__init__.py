"""Weights as nodes: what computes the values of a weight from its codes, in ONNX that a stock runtime executes."""

from __future__ import annotations

from onnxq.lowering.blobs import fits_blob, gather_block_quantized, is_kernel_block, matmul_nbits, takes_blob
from onnxq.lowering.decode import decode_folded, decode_linear, is_linear
from onnxq.lowering.decoder_opset import decoder_opset
from onnxq.lowering.emit import Emit, emit_named
from onnxq.lowering.layout import transposed
from onnxq.lowering.node_chain import Chain
from onnxq.lowering.rows import decode_rows
from onnxq.lowering.words import numbers_in_words

__all__ = [
    "Chain",
    "Emit",
    "decode_folded",
    "decode_linear",
    "decode_rows",
    "decoder_opset",
    "emit_named",
    "fits_blob",
    "gather_block_quantized",
    "is_kernel_block",
    "is_linear",
    "matmul_nbits",
    "numbers_in_words",
    "takes_blob",
    "transposed",
]
