"""Operators that only onnxruntime has: what its optimizer and its exporters write into models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from onnxq.ops.axes import axes, turned
from onnxq.ops.integer import IntegerOperator
from onnxq.ops.row import Operator, Role

if TYPE_CHECKING:
    from onnxq.ir.reading import OperatorKey

# What they give has the type of their first input, and some also its shape.
_TYPED = Operator(Role.FLOAT, types=(0,))
_SHAPED = Operator(Role.FLOAT, types=(0,), shapes=(0,))
_PRODUCT = Operator(
    Role.WEIGHTED,
    (0, 1),
    weights={0: turned("transA", -2, -1), 1: turned("transB", -1, -2)},
    standard=("MatMul", (0, 1)),
    types=(0,),
)
_CONV = Operator(Role.WEIGHTED, weights={1: axes(0, 1)}, bias=2, standard=("Conv", (0, 1, 2)), types=(0,))
# Their filters lie with the channels last.
_CONV_LAST = replace(_CONV, weights={1: axes(0, -1)}, standard=None)
_ATTENTION = Operator(Role.WEIGHTED, weights={1: axes(-1, 0)}, bias=2, types=(0, 0))
# Angles that are looked up turn by what they are.
_CACHED = Operator(Role.FLOAT, settings=True, types=(0, 3, 4))

_MICROSOFT: Mapping[str, Operator] = {
    "Attention": replace(_ATTENTION, integer=(IntegerOperator("QAttention", ((0, 3, 6), (1, 4, 7)), last=(2, 5, 8)),)),
    "BiasAdd": _SHAPED,
    "BiasDropout": _SHAPED,
    "BiasGelu": _SHAPED,
    "BiasSoftmax": _SHAPED,
    "BiasSplitGelu": _TYPED,
    "CausalConvWithState": Operator(Role.WEIGHTED, weights={1: axes(0, -1)}, types=(0, 0)),
    "ComplexMul": _SHAPED,
    "DecoderAttention": Operator(
        Role.WEIGHTED,
        weights={2: axes(-1, 0), 3: axes(-1, 0)},
        bias=4,
        types=(0, 0, 0),
    ),
    "DecoderMaskedMultiHeadAttention": replace(_TYPED, types=(0, 0, 0)),
    "EmbedLayerNormalization": Operator(
        Role.WEIGHTED,
        data=(),
        weights={2: axes(0, -1), 3: axes(0, -1), 4: axes(0, -1)},
        standard=("Gather", (2, 0)),
        types=(2, 0, 2),
    ),
    "FastGelu": _SHAPED,
    "FusedConv": _CONV,
    "FusedGemm": Operator(
        Role.WEIGHTED,
        weights={1: turned("transB", 1, 0)},
        bias=2,
        standard=("Gemm", (0, 1)),
        types=(0,),
    ),
    "FusedMatMul": _PRODUCT,
    "FusedMatMulActivation": _PRODUCT,
    "GatedRelativePositionBias": Operator(Role.WEIGHTED, weights={3: axes(-1, 0)}, bias=4, types=(0,)),
    "Gelu": _SHAPED,
    "GridSample": replace(_TYPED, settings=True),
    "GroupNorm": _SHAPED,
    "GroupQueryAttention": _CACHED,
    "Inverse": _SHAPED,
    "LinearAttention": _TYPED,
    "LongformerAttention": Operator(
        Role.WEIGHTED,
        weights={1: axes(-1, 0), 4: axes(-1, 0)},
        bias=2,
        types=(0,),
        shapes=(0,),
    ),
    "MoE": Operator(
        Role.WEIGHTED,
        weights={2: axes(1, 2), 4: axes(1, 2), 6: axes(1, 2)},
        types=(0,),
        shapes=(0,),
    ),
    "MultiHeadAttention": replace(_TYPED, types=(0, 0, 0)),
    "NhwcConv": _CONV_LAST,
    "NhwcFusedConv": _CONV_LAST,
    "NhwcMaxPool": _TYPED,
    "PackedAttention": replace(_ATTENTION, types=(0,)),
    "QuickGelu": _SHAPED,
    "RemovePadding": _TYPED,
    "RestorePadding": _TYPED,
    "RotaryEmbedding": replace(_SHAPED, settings=True),
    "SkipGroupNorm": replace(_SHAPED, types=(0, 0), shapes=(0, 0)),
    "SkipLayerNormalization": replace(_SHAPED, types=(0, None, None, 0), shapes=(0, None, None, 0)),
    "SkipSimplifiedLayerNormalization": replace(_SHAPED, types=(0, None, None, 0), shapes=(0, None, None, 0)),
    "SparseAttention": _CACHED,
    "TransposeMatMul": _PRODUCT,
    "Trilu": _SHAPED,
}

# Its channels lie in blocks, and so do the filters.
_BLOCKED: Mapping[str, Operator] = {
    "AveragePool": _TYPED,
    "Conv": replace(_CONV, standard=None),
    "GlobalAveragePool": _TYPED,
    "GlobalMaxPool": _TYPED,
    "MaxPool": _TYPED,
    "ReorderInput": _TYPED,
    "ReorderOutput": _TYPED,
    "Upsample": _TYPED,
}

# They stand in the domain of ONNX, and for the last two in models of an earlier opset than ONNX has them in.
_UNDECLARED: Mapping[str, Operator] = {
    "SimplifiedLayerNormalization": _SHAPED,
    "Gelu": _SHAPED,
    "LayerNormalization": _SHAPED,
}

CONTRIB: Mapping[OperatorKey, Operator] = {
    **{("com.microsoft", op): row for op, row in _MICROSOFT.items()},
    **{("com.microsoft.nchwc", op): row for op, row in _BLOCKED.items()},
    **{("", op): row for op, row in _UNDECLARED.items()},
}
"""The rows of these operators, by domain and op type."""
