"""The operator table: contrib operators of onnxruntime, and operators of ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from onnxq.ops.channel_maps import aligned, alike, concatenated, picked, reshaped, scaled, split, transposed
from onnxq.ops.operator import IntegerOperator, Operator, Role, axes, gathered, turned

if TYPE_CHECKING:
    from onnxq.ir.queries import OperatorKey
if TYPE_CHECKING:
    from onnxq.ir import Node
    from onnxq.ir.queries import OperatorKey


# Contrib operators. Their outputs have the type of the first input, and some also its shape.
_TYPED = Operator(Role.FLOAT, types=(0,))
_SHAPED = Operator(Role.FLOAT, types=(0,), shapes=(0,))
_PRODUCT = Operator(
    Role.WEIGHTED,
    (0, 1),
    weights={0: turned("transA", -2, -1), 1: turned("transB", -1, -2)},
    standard=("MatMul", (0, 1)),
    types=(0,),
)
_CONTRIB_CONV = Operator(Role.WEIGHTED, weights={1: axes(0, 1)}, bias=2, standard=("Conv", (0, 1, 2)), types=(0,))
# The filters of these have the channels last.
_CONV_LAST = replace(_CONTRIB_CONV, weights={1: axes(0, -1)}, standard=None)
_ATTENTION = Operator(Role.WEIGHTED, weights={1: axes(-1, 0)}, bias=2, types=(0, 0))
# These look up cosines and sines of rotary embeddings, which must not be rounded.
_CACHED = Operator(Role.FLOAT, precision_sensitive=True, types=(0, 3, 4))

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
    "FusedConv": _CONTRIB_CONV,
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
    "GridSample": replace(_TYPED, precision_sensitive=True),
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
    "RotaryEmbedding": replace(_SHAPED, precision_sensitive=True),
    "SkipGroupNorm": replace(_SHAPED, types=(0, 0), shapes=(0, 0)),
    "SkipLayerNormalization": replace(_SHAPED, types=(0, None, None, 0), shapes=(0, None, None, 0)),
    "SkipSimplifiedLayerNormalization": replace(_SHAPED, types=(0, None, None, 0), shapes=(0, None, None, 0)),
    "SparseAttention": _CACHED,
    "TransposeMatMul": _PRODUCT,
    "Trilu": _SHAPED,
}

# Activations and filters are stored with blocked channels.
_BLOCKED: Mapping[str, Operator] = {
    "AveragePool": _TYPED,
    "Conv": replace(_CONTRIB_CONV, standard=None),
    "GlobalAveragePool": _TYPED,
    "GlobalMaxPool": _TYPED,
    "MaxPool": _TYPED,
    "ReorderInput": _TYPED,
    "ReorderOutput": _TYPED,
    "Upsample": _TYPED,
}

# onnxruntime has these in the domain of ONNX. ONNX has no SimplifiedLayerNormalization, and the others only since a
# later opset.
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
"""Rows of onnxruntime's contrib operators, by domain and op type."""


# Operators of ONNX


def operator_of(node: Node) -> Operator | None:
    """Return the table row of the operator that a node calls, or None.

    >>> from onnxq.ir import Node
    >>> operator_of(Node("Relu")).role, operator_of(Node("Relu", domain="my.own"))
    (<Role.CLAMP: 'clamp'>, None)
    """
    return OPERATORS.get((node.domain, node.op))


_COMPUTE, _ARITHMETIC, _PASS_THROUGH, _CLAMP, _WEIGHTED, _FLOAT = Role
_ONE = ((0, 1, 2),)
_TWO = ((0, 1, 2), (3, 4, 5))
_CONV = Operator(_COMPUTE, weights={1: axes(0, 1)}, bias=2, channels=1)
_MATMUL = Operator(_COMPUTE, (0, 1), {0: axes(-2, -1), 1: axes(-1, -2)}, channels=-1, product=True)
_GEMM = Operator(
    _COMPUTE,
    weights={1: turned("transB", 1, 0)},
    bias=2,
    channels=-1,
    product=True,
    transposed="transB",
)
_CELL = Operator(
    _WEIGHTED,
    weights={1: axes(1, 2), 2: axes(1, 2)},
    recurrent=True,
)
_MOVING = Operator(_PASS_THROUGH, keeps_range=True)
_PLAIN = Operator(_FLOAT)
_POSITIVE = Operator(_FLOAT, never_negative=True)
_WITHIN = Operator(_FLOAT, keeps_range=True)
_SET = Operator(_FLOAT, precision_sensitive=True)
_DECIDED = Operator(_FLOAT, precision_sensitive=True, data_dependent=True)
_LABELS = Operator(_FLOAT, labels=True)
_RANDOM = Operator(_FLOAT, precision_sensitive=True, random=True)


def _integer(op: str, operands: tuple[tuple[int, int, int], ...] = _ONE, **facts: Any) -> tuple[IntegerOperator, ...]:
    """Return the integer operator, with scale and zero point of its output at the usual indices."""
    result = (6, 7) if operands == _TWO else (3, 4)
    return (IntegerOperator(op, operands, **{"result": result, **facts}),)


def _bounded(low: float, high: float, twin: tuple[IntegerOperator, ...] = ()) -> Operator:
    return Operator(_ARITHMETIC, fixed_range=(low, high), integer=twin)


_STANDARD: Mapping[str, Operator] = {
    "Conv": replace(_CONV, integer=_integer("QLinearConv", _TWO, bias=8)),
    "ConvTranspose": Operator(
        _COMPUTE,
        weights={1: axes(1, 0)},
        bias=2,
        channels=1,
        integer=_integer("QLinearConvTranspose", _TWO, bias=8),
    ),
    "Gemm": replace(_GEMM, integer=_integer("QGemm", _TWO, result=(7, 8), bias=6)),
    "MatMul": replace(
        _MATMUL,
        integer=(
            *_integer("QLinearMatMul", _TWO),
            IntegerOperator("DynamicQuantizeMatMul", ((1, 2, 3),), bias=4, first=(0,)),
            IntegerOperator("MatMulIntegerToFloat", ((0, 2, 4), (1, 3, 5)), bias=6),
        ),
    ),
    "LSTM": _CELL,
    "GRU": _CELL,
    "RNN": _CELL,
    "Gather": Operator(_PASS_THROUGH, weights={0: gathered}, channel_map=picked, keeps_range=True),
    "Add": Operator(_ARITHMETIC, data=None, channel_map=aligned, integer=_integer("QLinearAdd", _TWO)),
    "Mul": Operator(
        _ARITHMETIC,
        data=None,
        channel_map=scaled,
        multiplies=True,
        integer=_integer("QLinearMul", _TWO),
    ),
    "AveragePool": Operator(_ARITHMETIC, channel_map=alike, keeps_range=True, integer=_integer("QLinearAveragePool")),
    "GlobalAveragePool": Operator(
        _ARITHMETIC, channel_map=alike, keeps_range=True, integer=_integer("QLinearGlobalAveragePool")
    ),
    "LeakyRelu": Operator(_ARITHMETIC, channel_map=alike, integer=_integer("QLinearLeakyRelu")),
    "Sigmoid": _bounded(0.0, 1.0, _integer("QLinearSigmoid")),
    # Most gates use only a part of the range, and a quantized range may end there.
    "HardSigmoid": Operator(_ARITHMETIC, never_negative=True),
    "Softmax": _bounded(0.0, 1.0, _integer("QLinearSoftmax", dropped=frozenset({"opset"}))),
    "Tanh": _bounded(-1.0, 1.0),
    "Concat": Operator(
        _PASS_THROUGH,
        data=None,
        channel_map=concatenated,
        integer=_integer("QLinearConcat", ((2, 3, 4),), result=(0, 1), repeats=True),
    ),
    "DepthToSpace": _MOVING,
    "Expand": replace(_MOVING, channel_map=aligned),
    "Flatten": replace(_MOVING, channel_map=reshaped),
    "MaxPool": replace(_MOVING, channel_map=alike),
    # It fills in a value of its own.
    "Pad": Operator(_PASS_THROUGH, precision_sensitive=True),
    "ReduceMax": _MOVING,
    "Reshape": replace(_MOVING, channel_map=reshaped),
    # Cubic interpolation can overshoot.
    "Resize": Operator(_PASS_THROUGH, precision_sensitive=True, channel_map=alike),
    "Slice": _MOVING,
    "SpaceToDepth": _MOVING,
    "Split": replace(_MOVING, channel_map=split),
    "Squeeze": replace(_MOVING, channel_map=reshaped),
    "Tile": replace(_MOVING, channel_map=alike),
    "Transpose": replace(_MOVING, channel_map=transposed),
    "Unsqueeze": replace(_MOVING, channel_map=reshaped),
    "Clip": Operator(_CLAMP, precision_sensitive=True),
    "Relu": Operator(_CLAMP, channel_map=alike, never_negative=True),
    "Abs": _POSITIVE,
    "ArgMax": _LABELS,
    "ArgMin": _LABELS,
    "Bernoulli": _RANDOM,
    "Cast": _PLAIN,
    "Compress": _DECIDED,
    "Cos": _PLAIN,
    "DFT": _SET,
    "Div": Operator(_FLOAT, data=None),
    "Dropout": _RANDOM,
    "Equal": _SET,
    "Erf": _PLAIN,
    "Exp": _POSITIVE,
    "GlobalMaxPool": _WITHIN,
    "Greater": _SET,
    "GreaterOrEqual": _SET,
    "GridSample": _SET,
    "Identity": _WITHIN,
    "Less": _SET,
    "LessOrEqual": _SET,
    # Its body or its inputs may decide when it ends.
    "Loop": replace(_DECIDED, data=()),
    "Mod": _SET,
    "Multinomial": _RANDOM,
    "NonMaxSuppression": _DECIDED,
    "NonZero": _DECIDED,
    "OneHot": _SET,
    "Pow": Operator(_FLOAT, data=(0, 1), precision_sensitive=True),
    "RandomNormal": replace(_RANDOM, data=()),
    "RandomNormalLike": _RANDOM,
    "RandomUniform": replace(_RANDOM, data=()),
    "RandomUniformLike": _RANDOM,
    "Range": _SET,
    "RotaryEmbedding": _SET,
    "Reciprocal": _PLAIN,
    "ReduceL1": _POSITIVE,
    "ReduceL2": _POSITIVE,
    "ReduceMean": Operator(_FLOAT, keeps_range=True, integer=_integer("QLinearReduceMean")),
    "ReduceSum": _PLAIN,
    "ReduceSumSquare": _POSITIVE,
    "RoiAlign": _SET,
    "Shape": _PLAIN,
    "Sin": _PLAIN,
    "Size": _PLAIN,
    "STFT": _SET,
    "Softplus": _POSITIVE,
    "Softsign": _PLAIN,
    "Sqrt": _POSITIVE,
    "Sub": Operator(_FLOAT, data=None),
    "TopK": _DECIDED,
    "Unique": _DECIDED,
    "Upsample": _SET,
    "Where": Operator(
        _FLOAT, data=(1, 2), integer=_integer("QLinearWhere", ((1, 2, 3), (4, 5, 6)), result=(7, 8), first=(0,))
    ),
}

OPERATORS: Mapping[OperatorKey, Operator] = MappingProxyType(
    {
        **{("", op): row for op, row in _STANDARD.items()},
        **CONTRIB,
    }
)
"""Every known operator, by domain and op type. To support a new operator, add a line."""

INTEGER_OPERATORS: Mapping[str, IntegerOperator] = MappingProxyType(
    {
        twin.op: replace(twin, float_op=op, domain=domain)
        for (domain, op), row in OPERATORS.items()
        for twin in row.integer
    }
)
"""Every operator that computes on quantized values and corresponds to a float operator, by op type."""

ALREADY_QUANTIZED = frozenset(INTEGER_OPERATORS) | frozenset(
    {
        "ConvInteger",
        "DequantizeLinear",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeLinear",
        "GatherBlockQuantized",
        "MatMulBnb4",
        "MatMulInteger",
        "MatMulNBits",
        "QMoE",
        "QuantizeLinear",
    }
)
"""Op types that only quantized models contain."""
