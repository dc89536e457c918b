"""Codes stored in words or bytes along the last axis, several in each; nodes take them out with shifts and masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import Constant, Tensor, Variable
from onnxq.lowering.native import look_up
from onnxq.lowering.node_chain import Chain
from onnxq.numerics.affine import Array
from onnxq.numerics.formats import Format
from onnxq.numerics.packing import pack_rows, pack_words

_WORD = np.dtype(np.uint32)
_BYTE = np.dtype(np.uint8)


def typed_codes(chain: Chain, codes: Array, format: Format) -> Variable:
    """Return integer codes in the format's own ONNX type, taken out of words."""
    assert not format.is_float, "a DequantizeLinear multiplies integers"
    # Casting a number that the type has is exact; what becomes of others is open.
    return chain.cast("typed", numbers(chain, codes, format), format.onnx_type)


def numbers(chain: Chain, codes: Array, format: Format) -> Variable:
    """Return the codes as float32 numbers, taken out of words."""
    return numbers_in(chain, store_words(chain, codes, format), codes.shape, format)


def numbers_in_words(chain: Chain, words: Constant, format: Format) -> Variable:
    """Return the float32 numbers that fill all words or bytes of a constant, row by row."""
    return numbers_in(
        chain, words, (*words.shape[:-1], words.shape[-1] * _held(words.dtype, format)), format, words.dtype
    )


def store_words(chain: Chain, codes: Array, format: Format) -> Constant:
    """Return a constant of words; where codes do not fill the last word of a row, zeros do."""
    return chain.store("codes", pack_words(codes, format))


def store_bytes(chain: Chain, codes: Array, format: Format) -> Constant:
    """Return a constant of bytes that hold codes of 4 or 2 bits; zeros fill the last byte of a row."""
    return chain.store("codes", pack_rows(codes.view(_BYTE), format.bits))


def numbers_in_bytes(chain: Chain, packed: Tensor, shape: tuple[int, ...], format: Format) -> Variable:
    """Return the float32 numbers in bytes; see `numbers_in`."""
    return numbers_in(chain, packed, shape, format, _BYTE)


def numbers_in(
    chain: Chain, words: Tensor, shape: tuple[int, ...], format: Format, word: np.dtype[Any] = _WORD
) -> Variable:
    """Return the float32 numbers in words.

    Args:
        chain: receives the nodes.
        words: the words.
        shape: the extents of the numbers; 0 copies that of the words.
        format: of 8, 4 or 2 bits.
        word: type of the words.
    """
    extent, held = shape[-1], _held(word, format)
    spread = chain.then("Unsqueeze", "spread", [words, chain.store("spread.axis", np.array([-1]))])
    shifts = np.arange(0, held * format.bits, format.bits, dtype=word)
    # OpenVINO shifts by dividing and rounds to the nearest: where the bits below are zero already, nothing is rounded.
    masks = chain.store("masks", (2**format.bits - 1 << shifts).astype(word))
    masked = chain.then("BitwiseAnd", "masked", [spread, masks])
    shifted = chain.then("BitShift", "shifted", [masked, chain.store("shifts", shifts)], direction="RIGHT")
    fields = chain.reshape("fields", shifted, (*shape[:-1], -(-extent // held) * held))
    if extent % held:
        fields = chain.cut("fields", fields, len(shape) - 1, extent)
    if format.is_float:
        return look_up(chain, fields, format)
    if not format.signed:
        return chain.cast("numbers", fields)
    # Turning over the sign bit of a two's complement adds half of the range to the number.
    half = 2 ** (format.bits - 1)
    turned = chain.then("BitwiseXor", "turned", [fields, chain.store("sign", np.array(half, word))])
    raised = chain.cast("raised", turned)
    return chain.then("Sub", "numbers", [raised, chain.store("half", np.array(half, np.float32))])


def _held(word: np.dtype[Any], format: Format) -> int:
    """Return how many codes a word holds."""
    return 8 * word.itemsize // format.bits
