"""The lowest opset that can express a decoder."""

from __future__ import annotations

from onnxq.lowering.blobs import takes_blob
from onnxq.lowering.emit import Emit
from onnxq.lowering.native import stored_format
from onnxq.lowering.rows import is_packed
from onnxq.numerics.formats import Format, format_named
from onnxq.numerics.spec import Spec, Storage

# Mul broadcasts by itself since the first; Pad takes its extents as an input; words need BitwiseAnd.
_MUL, _PAD, _WORDS = 7, 11, 18
# What DequantizeLinear learned: scales of float16, blocks, and an output of another type than its scale.
_FLOAT16_SCALE, _BLOCKS, _OUTPUT_TYPE = 19, 21, 23
_SCALE = {"float32": _MUL, "float16": _MUL, "bfloat16": 13, "ue4m3": 19, "e8m0": _MUL}
_OWN_TYPE_OF_E8M0 = 24
_BYTE = 8


def decoder_opset(spec: Spec, op_type: str, emit: Emit, *, folded: bool) -> int:
    """Return the lowest default-domain opset that has the types and operators which decode a weight.

    Args:
        spec: of the weight.
        op_type: of the node that uses it.
        emit: which operators decode it.
        folded: whether it is decoded when the model is loaded, not multiplied or looked up as codes.
    """
    format, blocked = format_named(spec.format), isinstance(spec.per, tuple)
    if emit is Emit.STRICT:
        return _strict_opset(spec, format, blocked=blocked)
    if folded:
        return max(_codes_opset(spec, format), _SCALE[spec.scale], _PAD if blocked else 0)
    # Where a node stands is not known here, and outside bodies the later opset is needed.
    if takes_blob(spec, op_type, emit, in_body=False):
        return _SCALE[spec.scale]
    if op_type == "Gather":
        codes = _WORDS if is_packed(spec, format) else _MUL
        return max(codes, _SCALE[spec.scale], _PAD if blocked else 0)
    linear = max(format.opset, _BLOCKS if blocked else 0, _FLOAT16_SCALE if spec.scale == "float16" else 0)
    return max(linear, _SCALE[spec.scale], _WORDS if spec.storage is Storage.WORDS else 0)


def _codes_opset(spec: Spec, format: Format) -> int:
    """Return the first opset whose Cast reads the stored codes."""
    if spec.storage is Storage.WORDS:
        return _WORDS
    stored = stored_format(format)
    return _MUL if not stored.is_float and stored.bits >= _BYTE else stored.opset


def _strict_opset(spec: Spec, format: Format, *, blocked: bool) -> int:
    other_type = {"float16": _OUTPUT_TYPE, "bfloat16": _OUTPUT_TYPE, "e8m0": _OWN_TYPE_OF_E8M0}.get(spec.scale, 0)
    words = _WORDS if spec.storage is Storage.WORDS else 0
    return max(format.opset, _BLOCKS if blocked else 0, _SCALE[spec.scale], other_type, words)
