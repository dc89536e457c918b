"""Pack quantized values into bytes and back: ONNX sub-byte tensors, Burn's uint32 words, and byte-aligned rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.errors import SchemeError
from onnxq.numerics.blocks import PIECE
from onnxq.numerics.formats import QuantDType

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_WORD_BITS = 32
# By bits: the number of values that fill whole bytes, of these bytes, and a type that holds them.
_GROUPS = {2: (4, 1, "<u1"), 4: (2, 1, "<u1"), 6: (4, 3, "<u4")}


def pack(quantized: Array, format: QuantDType) -> Bytes:
    """Pack values as the raw data of an ONNX tensor: row-major, low bits first, the last byte padded with zeros.

    Args:
        quantized: quantized values of any shape.
        format: their format.

    Returns:
        `ceil(quantized.size * bits / 8)` bytes, one-dimensional. Values of 8 bits or more are little-endian.

    >>> from onnxq.numerics.formats import FORMATS
    >>> pack(np.array([-8, -1, 0, 7, 3], np.int8), FORMATS["int4"]).tobytes().hex()
    'f87003'
    """
    flat = np.ascontiguousarray(quantized).reshape(-1)
    if format.bits >= 8:
        return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    return _squeezed(flat.view(np.uint8), format.bits)


def unpack(packed: Bytes, format: QuantDType, shape: tuple[int, ...]) -> Array:
    """Unpack the raw data of a tensor of this shape; the inverse of `pack`.

    >>> from onnxq.numerics.formats import FORMATS
    >>> unpack(np.array([0xF8, 0x70, 0x03], np.uint8), FORMATS["int4"], (5,))
    array([-8, -1,  0,  7,  3], dtype=int8)
    """
    size = int(np.prod(shape, dtype=np.int64))
    if format.bits >= 8:
        return packed.view(format.dtype.newbyteorder("<")).astype(format.dtype, copy=False).reshape(shape)
    return _as_values(_spread(packed, format.bits, size), format).reshape(shape)


def pack_rows(quantized: Array, bits: int) -> Bytes:
    """Pack the low bits of one-byte values along the last axis; each row is padded to a whole byte.

    Args:
        quantized: array of one-byte values, at least one-dimensional.
        bits: 2, 4 or 8.

    Returns:
        Bytes of shape `[..., ceil(extent * bits / 8)]`.

    >>> pack_rows(np.array([[1, 2, 3]], np.uint8), 4)
    array([[33,  3]], dtype=uint8)
    """
    padded = _padded(quantized.view(np.uint8), -1, 8 // bits)
    row = padded.shape[-1] * bits // 8
    flat = np.ascontiguousarray(padded).reshape(-1)
    return (flat if bits == 8 else _squeezed(flat, bits)).reshape(*padded.shape[:-1], row)


def unpack_rows(packed: Bytes, bits: int, extent: int) -> Bytes:
    """Return the first `extent` unsigned values of each row; the inverse of `pack_rows`."""
    fields = packed.shape[-1] * 8 // bits
    quantized = packed if bits == 8 else _spread(packed.reshape(-1), bits, packed.size * 8 // bits)
    return quantized.reshape(*packed.shape[:-1], fields)[..., :extent]


def pack_words(quantized: Array, format: QuantDType, axis: int = -1) -> Words:
    """Pack values into uint32 words along an axis, first value in the low bits, as Burn's `PackedU32` does.

    Burn counts its dimension from the innermost: `PackedU32(0)` is axis -1.

    Args:
        quantized: values of 2, 4 or 8 bits, at least one-dimensional.
        format: their format.
        axis: axis along which values share a word. The last word is padded with zeros.

    Returns:
        uint32 array with the extent `ceil(extent * bits / 32)` along the axis.

    Raises:
        SchemeError: the format does not have 2, 4 or 8 bits.

    >>> from onnxq.numerics.formats import FORMATS
    >>> pack_words(np.array([-128, 2, -3, 127], np.int8), FORMATS["int8"])
    array([2147287680], dtype=uint32)
    """
    fields = _fields(format)
    axis %= quantized.ndim
    padded = _padded(quantized.view(np.uint8), axis, fields)
    if axis == quantized.ndim - 1:
        packed = pack_rows(padded, format.bits)
        return packed.view("<u4").astype(np.uint32, copy=False)
    shape = tuple(extent // fields if i == axis else extent for i, extent in enumerate(padded.shape))
    words = np.zeros(shape, np.uint32)
    lane = np.empty(shape, np.uint32)
    for field in range(fields):
        np.bitwise_and(padded[_every(axis, field, fields)], 2**format.bits - 1, out=lane, dtype=np.uint32)
        lane <<= np.uint32(format.bits * field)
        words |= lane
    return words


def unpack_words(words: Words, format: QuantDType, extent: int, axis: int = -1) -> Array:
    """Unpack `extent` values along the axis; the inverse of `pack_words`.

    Raises:
        SchemeError: the format does not have 2, 4 or 8 bits.
    """
    fields = _fields(format)
    axis %= words.ndim
    shape = tuple(length * fields if i == axis else length for i, length in enumerate(words.shape))
    quantized = np.empty(shape, np.uint8)
    for field in range(fields):
        lane = (words >> np.uint32(format.bits * field)) & np.uint32(2**format.bits - 1)
        np.copyto(quantized[_every(axis, field, fields)], lane, casting="unsafe")
    wanted = tuple(slice(extent) if i == axis else slice(None) for i in range(words.ndim))
    return _as_values(np.ascontiguousarray(quantized[wanted]), format)


def _fields(format: QuantDType) -> int:
    if format.bits not in (2, 4, 8):
        raise SchemeError(
            f"words hold values of 2, 4 or 8 bits and {format.name} has {format.bits}; use another storage"
        )
    return _WORD_BITS // format.bits


def _every(axis: int, start: int, step: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, None, step))


def _padded(quantized: Bytes, axis: int, multiple: int) -> Bytes:
    missing = -quantized.shape[axis] % multiple
    if not missing:
        return quantized
    margins = [(0, missing if i == axis % quantized.ndim else 0) for i in range(quantized.ndim)]
    return np.pad(quantized, margins)


def _as_values(patterns: Bytes, format: QuantDType) -> Array:
    """Reinterpret bit patterns as values of the format, with sign extension. Changes `patterns` in place."""
    if format.bits < 8 and format.signed and not format.is_float:
        half = np.uint8(2 ** (format.bits - 1))
        patterns ^= half
        patterns -= half
    return patterns.view(format.dtype)


def _squeezed(quantized: Bytes, bits: int) -> Bytes:
    """Move the low `bits` of each byte together."""
    packed = np.empty(-(-quantized.size * bits // 8), np.uint8)
    count, size, word = _GROUPS[bits]
    for start in range(0, quantized.size, PIECE):
        fields = _padded(quantized[start : start + PIECE] & np.uint8(2**bits - 1), 0, count).reshape(-1, count)
        words = fields[:, 0].astype(word)
        for field in range(1, count):
            words |= fields[:, field].astype(word, copy=False) << words.dtype.type(bits * field)
        part = packed[start * bits // 8 : (start + PIECE) * bits // 8]
        part[:] = words.view(np.uint8).reshape(len(fields), -1)[:, :size].reshape(-1)[: part.size]
    return packed


def _spread(packed: Bytes, bits: int, size: int) -> Bytes:
    """Give each of `size` fields a byte of its own; the inverse of `_squeezed`."""
    count, length, word = _GROUPS[bits]
    quantized = np.empty((-(-size // count), count), np.uint8)
    for start in range(0, len(quantized), PIECE):
        part = quantized[start : start + PIECE]
        filled = np.zeros((len(part), np.dtype(word).itemsize), np.uint8)
        filled[:, :length] = _padded(packed[start * length :][: len(part) * length], 0, length).reshape(-1, length)
        words = filled.view(word)[:, 0]
        for field in range(count):
            shifted = words >> words.dtype.type(bits * field)
            np.bitwise_and(shifted, words.dtype.type(2**bits - 1), out=part[:, field], casting="unsafe")
    return quantized.reshape(-1)[:size]
