"""Codes stored in the ONNX type of their format, or where onnxruntime has no kernel for it, in one that it has."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from onnxq.ir import Constant, Tensor, Variable
from onnxq.lowering.node_chain import Chain
from onnxq.numerics.affine import Array
from onnxq.numerics.formats import FORMATS, Format

# onnxruntime has no kernel that reads these: a 4-bit pattern is looked up, and each 6-bit float is an 8-bit one.
_INSTEAD: Final = {
    "float4e2m1": FORMATS["uint4"],
    "float6e2m3": FORMATS["float8e4m3fn"],
    "float6e3m2": FORMATS["float8e4m3fn"],
}


def stored_format(format: Format) -> Format:
    """Return the format that onnxruntime can read in which codes of another are stored without loss."""
    if format.codebook is not None:
        return FORMATS[f"uint{format.bits}"]
    return _INSTEAD.get(format.name, format)


def typed_codes(chain: Chain, codes: Array, format: Format) -> Constant:
    """Return the codes as a constant of the format's own ONNX type."""
    return chain.store_codes("codes", codes, format)


def numbers(chain: Chain, codes: Array, format: Format, *, strict: bool = False, widened: bool = False) -> Variable:
    """Return the codes as float32 numbers.

    Args:
        chain: receives the nodes.
        codes: the codes.
        format: theirs.
        strict: whether they are stored in the type of their format even where onnxruntime cannot read it.
        widened: whether they pass through a wider type, for a runtime that keeps codes it knows from being folded.
    """
    stored = format if strict and format.codebook is None else stored_format(format)
    if format.is_float and not stored.is_float:
        return look_up(chain, chain.store_codes("codes", codes.view(stored.dtype), stored), format)
    typed: Tensor = typed_codes(chain, codes.astype(stored.dtype, copy=False), stored)
    if widened:
        typed = chain.cast("widened", typed, TensorProto.FLOAT16 if stored.is_float else TensorProto.INT32)
    return chain.cast("numbers", typed)


def look_up(chain: Chain, patterns: Tensor, format: Format) -> Variable:
    """Return the float32 numbers that unsigned bit patterns stand for."""
    indices = chain.cast("patterns", patterns, TensorProto.INT32)
    return chain.then("Gather", "numbers", [chain.store("table", format.values), indices], axis=0)
