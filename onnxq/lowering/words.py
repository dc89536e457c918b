"""Codes stored in 32-bit words along the last axis, several in each; the graph takes them out with shifts and masks."""

from __future__ import annotations

import numpy as np

from onnxq.graph import Constant, Tensor, Variable
from onnxq.lowering.native import look_up
from onnxq.lowering.node_chain import Chain
from onnxq.numbers.formats import Format
from onnxq.numbers.numerics import Array
from onnxq.numbers.packing import pack_words

_WORD_BITS = 32


def typed_codes(chain: Chain, codes: Array, format: Format) -> Variable:
    """Return integer codes in the format's own ONNX type, taken out of words."""
    assert not format.is_float, "a DequantizeLinear multiplies integers"
    # Casting a number that the type has is exact; what becomes of others is open.
    return chain.cast("typed", numbers(chain, codes, format), format.onnx_type)


def numbers(chain: Chain, codes: Array, format: Format) -> Variable:
    """Return the codes as float32 numbers, taken out of words."""
    return numbers_in(chain, store_words(chain, codes, format), codes.shape, format)


def numbers_in_words(chain: Chain, words: Constant, format: Format) -> Variable:
    """Return the float32 numbers that fill all words of a constant, row by row."""
    return numbers_in(chain, words, (*words.shape[:-1], words.shape[-1] * (_WORD_BITS // format.bits)), format)


def store_words(chain: Chain, codes: Array, format: Format) -> Constant:
    """Return a constant of words; where codes do not fill the last word of a row, zeros do."""
    return chain.store("codes", pack_words(codes, format))


def numbers_in(chain: Chain, words: Tensor, shape: tuple[int, ...], format: Format) -> Variable:
    """Return the float32 numbers in words.

    Args:
        chain: receives the nodes.
        words: uint32.
        shape: the extents of the numbers; 0 copies that of the words.
        format: of 8, 4 or 2 bits.
    """
    extent, held = shape[-1], _WORD_BITS // format.bits
    spread = chain.then("Unsqueeze", "spread", [words, chain.store("spread.axis", np.array([-1]))])
    shifts = chain.store("shifts", np.arange(0, _WORD_BITS, format.bits, dtype=np.uint32))
    shifted = chain.then("BitShift", "shifted", [spread, shifts], direction="RIGHT")
    mask = chain.store("mask", np.array(2**format.bits - 1, np.uint32))
    masked = chain.then("BitwiseAnd", "masked", [shifted, mask])
    fields = chain.reshape("fields", masked, (*shape[:-1], -(-extent // held) * held))
    if extent % held:
        fields = chain.cut("fields", fields, len(shape) - 1, extent)
    if format.is_float:
        return look_up(chain, fields, format)
    if not format.signed:
        return chain.cast("numbers", fields)
    # Turning over the sign bit of a two's complement adds half of the range to the number.
    half = 2 ** (format.bits - 1)
    turned = chain.then("BitwiseXor", "turned", [fields, chain.store("sign", np.array(half, np.uint32))])
    raised = chain.cast("raised", turned)
    return chain.then("Sub", "numbers", [raised, chain.store("half", np.array(half, np.float32))])
