"""Nodes that dequantize a stored weight, from native types or packed words, completely or row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxq.ir import Constant, NodeBuilder, PackedTensor, Tensor, Variable, onnx_dtype
from onnxq.lowering.layout import Layout
from onnxq.numerics.affine import Array, QTensor
from onnxq.numerics.formats import FORMATS, QuantDType, scale_format_named
from onnxq.numerics.packing import pack_rows, pack_words
from onnxq.numerics.spec import QuantSpec, Storage

# onnxruntime has no kernel that reads these. 4-bit floats are looked up; every 6-bit float is also an 8-bit float.
_STORED_AS: Final = {
    "float4e2m1": FORMATS["uint4"],
    "float6e2m3": FORMATS["float8e4m3fn"],
    "float6e3m2": FORMATS["float8e4m3fn"],
}


def stored_format(format: QuantDType) -> QuantDType:
    """Return a format that onnxruntime can read and that stores the values of another format without loss."""
    if format.codebook is not None:
        return FORMATS[f"uint{format.bits}"]
    return _STORED_AS.get(format.name, format)


def native_values(build: NodeBuilder, quantized: QTensor) -> Constant:
    """Return quantized values as a constant of the format's own ONNX type."""
    return build.store("codes", PackedTensor(quantized.format.onnx_type, quantized.shape, quantized.packed))


def native_numbers(build: NodeBuilder, quantized: QTensor, *, widened: bool = False) -> Variable:
    """Return quantized values as float32 numbers.

    With ``widened`` they are cast to a wider type first, for a runtime that does not fold quantized constants.
    """
    format, stored = quantized.format, stored_format(quantized.format)
    if format.is_float and not stored.is_float:
        return look_up(build, build.store_quantized("codes", quantized.values.view(stored.dtype), stored), format)
    if stored != format:
        quantized = QTensor(quantized.values.astype(stored.dtype), quantized.parameters, stored)
    typed: Tensor = native_values(build, quantized)
    if widened:
        typed = build.cast("widened", typed, TensorProto.FLOAT16 if stored.is_float else TensorProto.INT32)
    return build.cast("numbers", typed)


def look_up(build: NodeBuilder, patterns: Tensor, format: QuantDType) -> Variable:
    """Return the float32 numbers that unsigned bit patterns stand for."""
    indices = build.cast("patterns", patterns, TensorProto.INT32)
    return build.then("Gather", "numbers", [build.store("table", format.values), indices], axis=0)


# Values packed into words or bytes along the last axis, unpacked by shifts and masks

_WORD = np.dtype(np.uint32)
_BYTE = np.dtype(np.uint8)


def numbers_from_words(build: NodeBuilder, values: Array, format: QuantDType) -> Variable:
    """Return quantized values as float32 numbers, unpacked from words."""
    return numbers_in(build, store_words(build, values, format), values.shape, format)


def numbers_in_words(build: NodeBuilder, words: Constant, format: QuantDType) -> Variable:
    """Return the float32 numbers that fill all words or bytes of a constant, row by row."""
    return numbers_in(
        build, words, (*words.shape[:-1], words.shape[-1] * _held(words.dtype, format)), format, words.dtype
    )


def store_words(build: NodeBuilder, values: Array, format: QuantDType) -> Constant:
    """Return quantized values as a constant of uint32 words; zeros fill the last word of a row."""
    return build.store("codes", pack_words(values, format))


def store_bytes(build: NodeBuilder, quantized: QTensor) -> Constant:
    """Return values of 4 or 2 bits as a constant of bytes; zeros fill the last byte of a row."""
    bits, (*rows, extent) = quantized.format.bits, quantized.shape
    if extent * bits % 8:
        return build.store("codes", pack_rows(quantized.values, bits))
    return build.store("codes", quantized.packed.reshape(*rows, extent * bits // 8))


def numbers_in(
    build: NodeBuilder, words: Tensor, shape: tuple[int, ...], format: QuantDType, word: np.dtype[Any] = _WORD
) -> Variable:
    """Return the float32 numbers of a format of 8, 4 or 2 bits, packed in words of type ``word``.

    An extent of 0 in the shape of the numbers copies that of the words.
    """
    extent, held = shape[-1], _held(word, format)
    spread = build.then("Unsqueeze", "spread", [words, build.store("spread.axis", np.array([-1]))])
    shifts = np.arange(0, held * format.bits, format.bits, dtype=word)
    # OpenVINO shifts by a division that rounds to the nearest. Masking first leaves nothing to round.
    masks = build.store("masks", (2**format.bits - 1 << shifts).astype(word))
    masked = build.then("BitwiseAnd", "masked", [spread, masks])
    shifted = build.then("BitShift", "shifted", [masked, build.store("shifts", shifts)], direction="RIGHT")
    fields = build.reshape("fields", shifted, (*shape[:-1], -(-extent // held) * held))
    if extent % held:
        fields = build.cut("fields", fields, len(shape) - 1, extent)
    if format.is_float:
        return look_up(build, fields, format)
    if not format.signed:
        return build.cast("numbers", fields)
    # Flipping the sign bit of a two's complement adds half of the range to the number.
    half = 2 ** (format.bits - 1)
    turned = build.then("BitwiseXor", "turned", [fields, build.store("sign", np.array(half, word))])
    raised = build.cast("raised", turned)
    return build.then("Sub", "numbers", [raised, build.store("half", np.array(half, np.float32))])


def _held(word: np.dtype[Any], format: QuantDType) -> int:
    # Values in a word.
    return 8 * word.itemsize // format.bits


# Scales and zero points as tensors


def scale_tensor(build: NodeBuilder, quantized: QTensor, spec: QuantSpec, shape: Sequence[int], dtype: int) -> Tensor:
    """Return the scale in a shape and float type, as a constant or as nodes that a runtime folds."""
    scale = np.reshape(quantized.parameters.scale, tuple(shape))
    if quantized.parameters.tensor_scale is None:
        return stored_scale(build, scale, spec.scale, dtype)
    number = stored_scale(build, scale, spec.scale, TensorProto.FLOAT)
    tensor_scale = build.store("tensor_scale", np.asarray(quantized.parameters.tensor_scale, np.float32))
    product = build.then("Mul", "scale.product", [number, tensor_scale])
    return product if dtype == TensorProto.FLOAT else build.cast("scale.rounded", product, dtype)


def stored_scale(build: NodeBuilder, scale: Array, name: str, dtype: int) -> Tensor:
    """Return scales, stored in the scale format ``name``, as a tensor of a float type.

    Powers of two (e8m0) are stored as bytes and looked up: their own ONNX type needs a later opset than all other types
    of a weight.
    """
    stored = scale.astype(scale_format_named(name).dtype, copy=False)
    if name != "e8m0":
        held = build.store("scale", stored)
        return held if onnx_dtype(held) == dtype else build.cast("scale.number", held, dtype)
    table = build.store("scale.table", np.arange(256, dtype=np.uint8).view(stored.dtype).astype(np.float32))
    exponents = build.cast("scale.exponents", build.store("scale", stored.view(np.uint8)), TensorProto.INT32)
    powers = build.then("Gather", "scale.number", [table, exponents], axis=0)
    return powers if dtype == TensorProto.FLOAT else build.cast("scale.rounded", powers, dtype)


def zero_point_values(build: NodeBuilder, quantized: QTensor, shape: Sequence[int]) -> Tensor | None:
    """Return the zero point in a shape and in the format's ONNX type; None if the weight has none."""
    zero_point = quantized.parameters.zero_point
    if zero_point is None:
        return None
    return build.store_quantized("zero_point", np.reshape(zero_point, tuple(shape)), quantized.format)


def zero_point_numbers(
    build: NodeBuilder, quantized: QTensor, shape: Sequence[int], *, in_bytes: bool
) -> Tensor | None:
    """Return the zero point in a shape as float32 numbers; None if the weight has none.

    With ``in_bytes`` it is stored as bytes, because the format's own ONNX type needs a later opset.
    """
    zero_point = quantized.parameters.zero_point
    if zero_point is None:
        return None
    values = np.reshape(zero_point, tuple(shape))
    stored = (
        build.store("zero_point", values) if in_bytes else build.store_quantized("zero_point", values, quantized.format)
    )
    return build.cast("zero_point.number", stored)


# Whole weights


def decode_folded(
    build: NodeBuilder, quantized: QTensor, spec: QuantSpec, dtype: int, *, widened: bool = False
) -> Variable:
    """Append ``Cast -> [Pad] -> [Reshape] -> [Sub] -> Mul -> [Reshape] -> [Slice] -> [Cast]`` and return the weight.

    The computation is float32 in the order of ``QTensor.dequantize``, so its values are equal bit for bit. A weight of
    another ONNX type ``dtype`` is rounded last. A runtime folds these nodes of constants at load. For ``widened``
    see `native_numbers`.
    """
    layout = Layout.of(quantized)
    if spec.storage is Storage.WORDS:
        numbers = numbers_from_words(build, quantized.values, quantized.format)
    else:
        numbers = native_numbers(build, quantized, widened=widened)
    if layout.padded != layout.shape:
        missing = [whole - extent for whole, extent in zip(layout.padded, layout.shape, strict=True)]
        numbers = build.pad("padded", numbers, missing)
    if layout.blocked:
        numbers = build.reshape("split", numbers, layout.split)
    shift = zero_point_numbers(build, quantized, layout.split_scale, in_bytes=spec.storage is Storage.WORDS)
    if shift is not None:
        numbers = build.then("Sub", "shifted", [numbers, shift])
    scale = scale_tensor(build, quantized, spec, layout.split_scale, TensorProto.FLOAT)
    values = build.then("Mul", "decoded", [numbers, scale])
    if layout.blocked:
        values = build.reshape("whole", values, layout.padded)
    for axis in layout.blocked:
        if layout.padded[axis] != layout.shape[axis]:
            values = build.cut("cut", values, axis, layout.shape[axis])
    return values if dtype == TensorProto.FLOAT else build.cast("rounded", values, dtype)


def is_linear(quantized: QTensor, spec: QuantSpec) -> bool:
    """Return whether one DequantizeLinear can express a weight."""
    # Codebooks, and small floats in words, can only be decoded by a lookup.
    looked_up = quantized.format.is_float and (spec.storage is Storage.WORDS or quantized.format.codebook is not None)
    return Layout.of(quantized).linear is not None and not looked_up


def decode_linear(build: NodeBuilder, quantized: QTensor, spec: QuantSpec, dtype: int) -> Variable:
    """Append a DequantizeLinear and return the weight, which `is_linear` must accept; its ONNX type is ``dtype``."""
    linear = Layout.of(quantized).linear
    assert linear is not None, "the layout is checked first"
    if spec.storage is Storage.WORDS:
        numbers = numbers_from_words(build, quantized.values, quantized.format)
        # The cast is exact because every number is an integer in the range of the type.
        values: Tensor = build.cast("typed", numbers, quantized.format.onnx_type)
    else:
        values = native_values(build, quantized)
    scale = scale_tensor(build, quantized, spec, linear.shape, dtype)
    zero_point = zero_point_values(build, quantized, linear.shape)
    inputs = [values, scale] if zero_point is None else [values, scale, zero_point]
    sizes = {"axis": linear.axis, "block_size": linear.block_size}
    attributes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return build.then("DequantizeLinear", "decoded", inputs, **attributes)


# Rows of an embedding: look up quantized rows, then dequantize only these


def decode_rows(
    build: NodeBuilder, quantized: QTensor, spec: QuantSpec, indices: Tensor, rank: int, dtype: int
) -> Variable:
    """Append a Gather of quantized rows and the nodes that dequantize them, and return the rows.

    The weight has rank 2, and a scale may span several rows only if it spans all. ``rank`` is that of the indices.

    onnxruntime gathers neither elements smaller than a byte nor 8-bit floats. Small elements are gathered as bytes that
    hold several, which all runtimes shift and mask alike. 8-bit floats are gathered as bit patterns.
    """
    layout = Layout.of(quantized)
    rows, extent = layout.shape
    leading = (0,) * rank
    per_row = layout.grid[0] == rows
    blocked = 1 in layout.blocked

    def parameter_of(table: Tensor) -> Tensor:
        return build.then("Gather", "rows.parameter", [table, indices], axis=0) if per_row else table

    numbers = _numbers(build, quantized, spec, indices, (*leading, extent))
    if layout.padded[1] != extent:
        numbers = build.pad("padded", numbers, (*leading, layout.padded[1] - extent))
    if blocked:
        numbers = build.reshape("split", numbers, (*leading, layout.grid[1], layout.block[1]))
    shape = (*layout.grid[0 if per_row else 1 :], *((1,) if blocked else ()))
    shift = zero_point_numbers(build, quantized, shape, in_bytes=is_packed(spec, quantized.format))
    if shift is not None:
        numbers = build.then("Sub", "shifted", [numbers, parameter_of(shift)])
    scale = parameter_of(scale_tensor(build, quantized, spec, shape, TensorProto.FLOAT))
    values = build.then("Mul", "decoded", [numbers, scale])
    if blocked:
        values = build.reshape("whole", values, (*leading, layout.padded[1]))
    if layout.padded[1] != extent:
        values = build.cut("cut", values, rank, extent)
    return values if dtype == TensorProto.FLOAT else build.cast("rounded", values, dtype)


def _numbers(
    build: NodeBuilder, quantized: QTensor, spec: QuantSpec, indices: Tensor, shape: tuple[int, ...]
) -> Variable:
    format = quantized.format
    if spec.storage is Storage.WORDS:
        words_of_rows = build.then("Gather", "rows", [store_words(build, quantized.values, format), indices], axis=0)
        return numbers_in(build, words_of_rows, shape, format)
    if is_packed(spec, format):
        bytes_of_rows = build.then("Gather", "rows", [store_bytes(build, quantized), indices], axis=0)
        return numbers_in(build, bytes_of_rows, shape, format, _BYTE)
    stored = (
        build.store("codes", quantized.values.view(np.uint8)) if format.is_float else native_values(build, quantized)
    )
    selected = build.then("Gather", "rows", [stored, indices], axis=0)
    return look_up(build, selected, format) if format.is_float else build.cast("numbers", selected)


def is_packed(spec: QuantSpec, format: QuantDType) -> bool:
    """Whether values are unpacked from words, as the spec demands, or from bytes that hold several."""
    return spec.storage is Storage.WORDS or format.bits in (2, 4)
