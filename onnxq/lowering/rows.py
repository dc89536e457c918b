"""Looking up rows of a weight by index and decoding only those."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxq.ir import Tensor, Variable
from onnxq.lowering import native, words
from onnxq.lowering.layout import Layout
from onnxq.lowering.node_chain import Chain
from onnxq.lowering.scale_tensors import scale_tensor, zero_point_numbers
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import Format
from onnxq.numerics.spec import Spec, Storage


def decode_rows(chain: Chain, quantized: QTensor, spec: Spec, indices: Tensor, rank: int, dtype: int) -> Variable:
    """Append a Gather of codes and the nodes that decode the rows it takes, and return them.

    onnxruntime gathers no elements smaller than a byte, nor 8-bit floats, so the former are gathered as bytes that hold
    several, of which all runtimes shift and mask the same, and the latter as bit patterns.

    Args:
        chain: receives the nodes.
        quantized: a weight of rank 2, whose scales do not span rows unless they span all.
        spec: its spec.
        indices: of the rows.
        rank: of the indices.
        dtype: ``TensorProto.DataType`` of the weight.
    """
    layout = Layout.of(quantized)
    rows, extent = layout.shape
    leading = (0,) * rank
    per_row = layout.grid[0] == rows
    blocked = 1 in layout.blocked

    def parameter_of(table: Tensor) -> Tensor:
        return chain.then("Gather", "rows.parameter", [table, indices], axis=0) if per_row else table

    numbers = _numbers(chain, quantized, spec, indices, (*leading, extent))
    if layout.padded[1] != extent:
        numbers = chain.pad("padded", numbers, (*leading, layout.padded[1] - extent))
    if blocked:
        numbers = chain.reshape("split", numbers, (*leading, layout.grid[1], layout.block[1]))
    shape = (*layout.grid[0 if per_row else 1 :], *((1,) if blocked else ()))
    shift = zero_point_numbers(chain, quantized, shape, in_bytes=is_packed(spec, quantized.format))
    if shift is not None:
        numbers = chain.then("Sub", "shifted", [numbers, parameter_of(shift)])
    scale = parameter_of(scale_tensor(chain, quantized, spec, shape, TensorProto.FLOAT))
    values = chain.then("Mul", "decoded", [numbers, scale])
    if blocked:
        values = chain.reshape("whole", values, (*leading, layout.padded[1]))
    if layout.padded[1] != extent:
        values = chain.cut("cut", values, rank, extent)
    return values if dtype == TensorProto.FLOAT else chain.cast("rounded", values, dtype)


def _numbers(chain: Chain, quantized: QTensor, spec: Spec, indices: Tensor, shape: tuple[int, ...]) -> Variable:
    """Return the float32 numbers of the rows."""
    codes, format = quantized.codes, quantized.format
    if spec.storage is Storage.WORDS:
        words_of_rows = chain.then("Gather", "rows", [words.store_words(chain, codes, format), indices], axis=0)
        return words.numbers_in(chain, words_of_rows, shape, format)
    if is_packed(spec, format):
        bytes_of_rows = chain.then("Gather", "rows", [words.store_bytes(chain, codes, format), indices], axis=0)
        return words.numbers_in_bytes(chain, bytes_of_rows, shape, format)
    stored = chain.store("codes", codes.view(np.uint8)) if format.is_float else native.typed_codes(chain, codes, format)
    found = chain.then("Gather", "rows", [stored, indices], axis=0)
    return native.look_up(chain, found, format) if format.is_float else chain.cast("numbers", found)


def is_packed(spec: Spec, format: Format) -> bool:
    """Whether nodes take codes out of words, because the spec says so, or of bytes that they are parts of."""
    return spec.storage is Storage.WORDS or format.bits in (2, 4)
