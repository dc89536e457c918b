"""The operator table: contrib operators of onnxruntime, and operators of ONNX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from onnxq.ops.channel_maps import aligned, alike, concatenated, picked, reshaped, scaled, split, transposed
from onnxq.ops.operator import IntegerOperator, Operator, Role, Rounding, axes, gathered, turned

if TYPE_CHECKING:
    from onnxq.ir import Node
    from onnxq.ir.queries import OperatorKey


# Contrib operators. Their outputs have the type of the first input, and some also its shape.
_TYPED = Operator(Role.FLOAT, types=(0,))
_SHAPED = Operator(Role.FLOAT, types=(0,), shapes=(0,))
_ACTIVATION = replace(_SHAPED, rounding=Rounding.PASSED)
_MOVED = replace(_TYPED, rounding=Rounding.PASSED)
# The output has the type of the activations.
_WEIGHED = Operator(Role.WEIGHTED, bias=2, types=(0,))
_PRODUCT_WEIGHTS = {0: turned("transA", -2, -1), 1: turned("transB", -1, -2)}
_PRODUCT = Operator(Role.WEIGHTED, (0, 1), _PRODUCT_WEIGHTS, standard=("MatMul", (0, 1)), types=(0,))
_CONTRIB_CONV = replace(_WEIGHED, weights={1: axes(0, 1)}, standard=("Conv", (0, 1, 2)))
# The filters of these have the channels last.
_CONV_LAST = replace(_WEIGHED, weights={1: axes(0, -1)})
_ATTENTION = replace(_WEIGHED, weights={1: axes(-1, 0)}, types=(0, 0))
# These look up cosines and sines of rotary embeddings, which must not be rounded.
_CACHED = Operator(Role.FLOAT, precision_sensitive=True, types=(0, 3, 4))

_MICROSOFT: Mapping[str, Operator] = {
    "Attention": replace(_ATTENTION, integer=(IntegerOperator("QAttention", ((0, 3, 6), (1, 4, 7)), last=(2, 5, 8)),)),
    "BiasAdd": _SHAPED,
    "BiasDropout": _ACTIVATION,
    "BiasGelu": _ACTIVATION,
    "BiasSoftmax": _SHAPED,
    "BiasSplitGelu": _TYPED,
    "CausalConvWithState": Operator(Role.WEIGHTED, weights={1: axes(0, -1)}, types=(0, 0)),
    "ComplexMul": _SHAPED,
    "DecoderAttention": replace(_WEIGHED, weights={2: axes(-1, 0), 3: axes(-1, 0)}, bias=4, types=(0, 0, 0)),
    "DecoderMaskedMultiHeadAttention": replace(_TYPED, types=(0, 0, 0)),
    "EmbedLayerNormalization": Operator(
        Role.WEIGHTED,
        data=(),
        weights={2: axes(0, -1), 3: axes(0, -1), 4: axes(0, -1)},
        standard=("Gather", (2, 0)),
        types=(2, 0, 2),
    ),
    "FastGelu": _ACTIVATION,
    "FusedConv": _CONTRIB_CONV,
    "FusedGemm": replace(_WEIGHED, weights={1: turned("transB", 1, 0)}, standard=("Gemm", (0, 1))),
    "FusedMatMul": _PRODUCT,
    "FusedMatMulActivation": _PRODUCT,
    "GatherBlockQuantized": Operator(Role.FLOAT, types=(2,)),
    "GatedRelativePositionBias": replace(_WEIGHED, weights={3: axes(-1, 0)}, bias=4),
    "Gelu": _ACTIVATION,
    "GridSample": replace(_MOVED, precision_sensitive=True),
    "GroupNorm": _SHAPED,
    "GroupQueryAttention": _CACHED,
    "Inverse": _SHAPED,
    "LinearAttention": _TYPED,
    "LongformerAttention": replace(_WEIGHED, weights={1: axes(-1, 0), 4: axes(-1, 0)}, shapes=(0,)),
    "MatMulBnb4": _TYPED,
    "MatMulNBits": _TYPED,
    "MoE": Operator(
        Role.WEIGHTED,
        weights={2: axes(1, 2), 4: axes(1, 2), 6: axes(1, 2)},
        # Its router is a TopK.
        rounding=Rounding.DECISIVE,
        types=(0,),
        shapes=(0,),
    ),
    "MultiHeadAttention": replace(_TYPED, types=(0, 0, 0)),
    "NhwcConv": _CONV_LAST,
    "NhwcFusedConv": _CONV_LAST,
    "NhwcMaxPool": _MOVED,
    "PackedAttention": replace(_WEIGHED, weights={1: axes(-1, 0)}),
    "QuickGelu": _ACTIVATION,
    "RemovePadding": _MOVED,
    "RestorePadding": _MOVED,
    "RotaryEmbedding": replace(_SHAPED, precision_sensitive=True),
    "SkipGroupNorm": replace(_SHAPED, types=(0, 0), shapes=(0, 0)),
    "SkipLayerNormalization": replace(_SHAPED, types=(0, None, None, 0), shapes=(0, None, None, 0)),
    "SkipSimplifiedLayerNormalization": replace(_SHAPED, types=(0, None, None, 0), shapes=(0, None, None, 0)),
    "SparseAttention": _CACHED,
    "TransposeMatMul": _PRODUCT,
    "Trilu": _ACTIVATION,
}

# Activations and filters are stored with blocked channels.
_BLOCKED: Mapping[str, Operator] = {
    "AveragePool": _MOVED,
    "Conv": replace(_CONTRIB_CONV, standard=None),
    "GlobalAveragePool": _MOVED,
    "GlobalMaxPool": _MOVED,
    "MaxPool": _MOVED,
    "ReorderInput": _MOVED,
    "ReorderOutput": _MOVED,
    "Upsample": _MOVED,
}

# onnxruntime has these in the domain of ONNX. ONNX has no SimplifiedLayerNormalization, and the others only since a
# later opset.
_UNDECLARED: Mapping[str, Operator] = {
    "SimplifiedLayerNormalization": _SHAPED,
    "Gelu": replace(_ACTIVATION, elementwise=True),
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


UNKNOWN: Final = Operator(Role.FLOAT, data=(), rounding=Rounding.DECISIVE)
"""The row of operators that the table does not list: any input may decide."""


def facts_of(node: Node) -> Operator:
    """Return the table row of the operator that a node calls, or `UNKNOWN`.

    >>> from onnxq.ir import Node
    >>> facts_of(Node("Relu")).elementwise, facts_of(Node("Relu", domain="my.own")).elementwise
    (True, False)
    """
    return operator_of(node) or UNKNOWN


_COMPUTE, _ARITHMETIC, _PASS_THROUGH, _CLAMP, _WEIGHTED, _FLOAT = Role
_ONE = ((0, 1, 2),)
_TWO = ((0, 1, 2), (3, 4, 5))
_CONV = Operator(_COMPUTE, weights={1: axes(0, 1)}, bias=2, channels=1)
_MATMUL = Operator(_COMPUTE, (0, 1), {0: axes(-2, -1), 1: axes(-1, -2)}, channels=-1, product=True)
_GEMM = replace(_MATMUL, data=(0,), weights={1: turned("transB", 1, 0)}, bias=2, transposed="transB")
_CELL = Operator(_WEIGHTED, weights={1: axes(1, 2), 2: axes(1, 2)}, recurrent=True)
_MOVING = Operator(_PASS_THROUGH, keeps_range=True, rounding=Rounding.PASSED)
_POOLED = Operator(_ARITHMETIC, channel_map=alike, keeps_range=True, rounding=Rounding.PASSED)
# Elementwise operators whose output needs its own scale.
_CALCULATED = Operator(_ARITHMETIC, rounding=Rounding.PASSED, elementwise=True)
# Sums and norms, whose own rounding hides a last bit, and operators that read no floats.
_PLAIN = Operator(_FLOAT)
_PASSING = Operator(_FLOAT, rounding=Rounding.PASSED)
_POSITIVE = replace(_PASSING, never_negative=True)
_WITHIN = replace(_PASSING, keeps_range=True)
# Elementwise and monotone in pieces.
_FUNCTION = replace(_PASSING, elementwise=True)
_POSITIVE_FUNCTION = replace(_POSITIVE, elementwise=True)
# Elementwise on truth values, or periodic.
_ELEMENTWISE = Operator(_FLOAT, elementwise=True)
_STEPS = Operator(_FLOAT, rounding=Rounding.DECISIVE)
_STEP = replace(_STEPS, elementwise=True)
_SET = Operator(_FLOAT, precision_sensitive=True)
_COMPARED = Operator(_FLOAT, precision_sensitive=True, rounding=Rounding.DECISIVE, elementwise=True)
_DECIDED = Operator(_FLOAT, precision_sensitive=True, data_dependent=True, rounding=Rounding.DECISIVE)
_LABELS = Operator(_FLOAT, labels=True, rounding=Rounding.DECISIVE)
_RANDOM = Operator(_FLOAT, precision_sensitive=True, random=True)
_DRAWN = replace(_RANDOM, rounding=Rounding.DECISIVE)


def _integer(op: str, operands: tuple[tuple[int, int, int], ...] = _ONE, **facts: Any) -> tuple[IntegerOperator, ...]:
    """Return the integer operator, with scale and zero point of its output at the usual indices."""
    result = (6, 7) if operands == _TWO else (3, 4)
    return (IntegerOperator(op, operands, **{"result": result, **facts}),)


_STANDARD: Mapping[str, Operator] = {
    "Conv": replace(_CONV, integer=_integer("QLinearConv", _TWO, bias=8)),
    "ConvTranspose": replace(_CONV, weights={1: axes(1, 0)}, integer=_integer("QLinearConvTranspose", _TWO, bias=8)),
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
    "Gather": replace(_MOVING, weights={0: gathered}, channel_map=picked),
    "Add": replace(_CALCULATED, data=None, channel_map=aligned, highest=sum, integer=_integer("QLinearAdd", _TWO)),
    "Mul": replace(
        _CALCULATED,
        data=None,
        channel_map=scaled,
        multiplies=True,
        highest=math.prod,
        integer=_integer("QLinearMul", _TWO),
    ),
    "AveragePool": replace(_POOLED, integer=_integer("QLinearAveragePool")),
    "GlobalAveragePool": replace(_POOLED, integer=_integer("QLinearGlobalAveragePool")),
    "LeakyRelu": replace(_CALCULATED, channel_map=alike, highest=max, integer=_integer("QLinearLeakyRelu")),
    "Sigmoid": replace(_CALCULATED, fixed_range=(0.0, 1.0), integer=_integer("QLinearSigmoid")),
    # Most gates use only a part of the range, and a quantized range may end there.
    "HardSigmoid": replace(_CALCULATED, never_negative=True),
    "Softmax": Operator(
        _ARITHMETIC,
        fixed_range=(0.0, 1.0),
        rounding=Rounding.PASSED,
        integer=_integer("QLinearSoftmax", dropped=frozenset({"opset"})),
    ),
    "Tanh": replace(_CALCULATED, fixed_range=(-1.0, 1.0)),
    "Concat": replace(
        _MOVING,
        data=None,
        channel_map=concatenated,
        integer=_integer("QLinearConcat", ((2, 3, 4),), result=(0, 1), repeats=True),
    ),
    "DepthToSpace": _MOVING,
    "Expand": replace(_MOVING, channel_map=aligned),
    "Flatten": replace(_MOVING, channel_map=reshaped),
    "MaxPool": replace(_MOVING, channel_map=alike),
    # Its fill value is another float input.
    "Pad": Operator(_PASS_THROUGH, precision_sensitive=True, rounding=Rounding.PASSED),
    "ReduceMax": _MOVING,
    "Reshape": replace(_MOVING, channel_map=reshaped),
    # Cubic interpolation can overshoot.
    "Resize": Operator(_PASS_THROUGH, precision_sensitive=True, channel_map=alike, rounding=Rounding.PASSED),
    "Slice": _MOVING,
    "SpaceToDepth": _MOVING,
    "Split": replace(_MOVING, channel_map=split),
    "Squeeze": replace(_MOVING, channel_map=reshaped),
    "Tile": replace(_MOVING, channel_map=alike),
    "Transpose": replace(_MOVING, channel_map=transposed),
    "Unsqueeze": replace(_MOVING, channel_map=reshaped),
    "Clip": Operator(_CLAMP, precision_sensitive=True, rounding=Rounding.PASSED, elementwise=True),
    "Relu": Operator(_CLAMP, channel_map=alike, never_negative=True, rounding=Rounding.PASSED, elementwise=True),
    "Abs": _POSITIVE_FUNCTION,
    "Acos": _FUNCTION,
    "Acosh": _FUNCTION,
    "AffineGrid": _PLAIN,
    "And": _ELEMENTWISE,
    "ArgMax": _LABELS,
    "ArgMin": _LABELS,
    "Asin": _FUNCTION,
    "Asinh": _FUNCTION,
    "Atan": _FUNCTION,
    "Atanh": _FUNCTION,
    "Attention": _PLAIN,
    "BatchNormalization": _PASSING,
    "Bernoulli": _DRAWN,
    "BitCast": _STEPS,
    "BitShift": _PLAIN,
    "BitwiseAnd": _PLAIN,
    "BitwiseNot": _PLAIN,
    "BitwiseOr": _PLAIN,
    "BitwiseXor": _PLAIN,
    "BlackmanWindow": _PLAIN,
    "Cast": _FUNCTION,
    "CastLike": _PASSING,
    "CausalConvWithState": _PLAIN,
    "Ceil": _STEP,
    "Celu": _FUNCTION,
    "CenterCropPad": _PASSING,
    "Col2Im": _PASSING,
    "Compress": Operator(_FLOAT, precision_sensitive=True, data_dependent=True, rounding=Rounding.PASSED),
    "ConcatFromSequence": _PASSING,
    "Constant": replace(_PLAIN, data=()),
    "ConstantOfShape": _PLAIN,
    "ConvInteger": _PLAIN,
    "Cos": _ELEMENTWISE,
    "Cosh": _FUNCTION,
    "CumProd": _PASSING,
    "CumSum": _PASSING,
    "DeformConv": _PLAIN,
    "DequantizeLinear": _PASSING,
    "Det": _PLAIN,
    "DFT": _SET,
    "Div": Operator(_FLOAT, data=None, rounding=Rounding.PASSED, elementwise=True),
    "Dropout": replace(_RANDOM, rounding=Rounding.PASSED),
    "DynamicQuantizeLinear": _STEPS,
    "Einsum": replace(_PLAIN, data=None),
    "Elu": _FUNCTION,
    "Equal": _COMPARED,
    "Erf": _FUNCTION,
    "Exp": _POSITIVE_FUNCTION,
    "EyeLike": _PLAIN,
    "Floor": _STEP,
    "GatherElements": _PASSING,
    "GatherND": _PASSING,
    "GlobalLpPool": _PASSING,
    "GlobalMaxPool": _WITHIN,
    "Greater": _COMPARED,
    "GreaterOrEqual": _COMPARED,
    "GridSample": replace(_SET, rounding=Rounding.PASSED),
    "GroupNormalization": _PLAIN,
    "HammingWindow": _PLAIN,
    "HannWindow": _PLAIN,
    "Hardmax": _STEPS,
    "HardSwish": _FUNCTION,
    "Identity": replace(_WITHIN, elementwise=True),
    "If": replace(_PLAIN, data=()),
    "ImageDecoder": _PLAIN,
    "InstanceNormalization": _PLAIN,
    "IsInf": _ELEMENTWISE,
    "IsNaN": _ELEMENTWISE,
    "Less": _COMPARED,
    "LessOrEqual": _COMPARED,
    "LinearAttention": _PLAIN,
    "Log": _FUNCTION,
    "LogSoftmax": _PASSING,
    # Its body or its inputs may decide when it ends.
    "Loop": replace(_DECIDED, data=(), rounding=Rounding.LOST),
    "LpNormalization": _PLAIN,
    "LpPool": _PASSING,
    "LRN": _PLAIN,
    "MatMulInteger": _PLAIN,
    "Max": replace(_FUNCTION, data=None),
    "MaxRoiPool": _STEPS,
    "MaxUnpool": _PASSING,
    "Mean": replace(_FUNCTION, data=None),
    "MeanVarianceNormalization": _PLAIN,
    "MelWeightMatrix": _STEPS,
    "Min": replace(_FUNCTION, data=None),
    "Mish": _FUNCTION,
    "Mod": _COMPARED,
    "Multinomial": _DRAWN,
    "Neg": _FUNCTION,
    "NegativeLogLikelihoodLoss": _PLAIN,
    "NonMaxSuppression": _DECIDED,
    "NonZero": _DECIDED,
    "Not": _ELEMENTWISE,
    "OneHot": replace(_SET, rounding=Rounding.DECISIVE),
    "Optional": _PASSING,
    "OptionalGetElement": _PASSING,
    "OptionalHasElement": _PLAIN,
    "Or": _ELEMENTWISE,
    "Pow": Operator(_FLOAT, data=(0, 1), precision_sensitive=True, rounding=Rounding.PASSED, elementwise=True),
    "PRelu": _FUNCTION,
    "QLinearConv": _PLAIN,
    "QLinearMatMul": _PLAIN,
    "QuantizeLinear": _STEPS,
    "RandomNormal": replace(_RANDOM, data=()),
    "RandomNormalLike": _RANDOM,
    "RandomUniform": replace(_RANDOM, data=()),
    "RandomUniformLike": _RANDOM,
    "Range": replace(_SET, rounding=Rounding.DECISIVE),
    "Reciprocal": _FUNCTION,
    "ReduceL1": _POSITIVE,
    "ReduceL2": _POSITIVE,
    "ReduceLogSum": _PASSING,
    "ReduceLogSumExp": _PASSING,
    "ReduceMean": Operator(_FLOAT, keeps_range=True, rounding=Rounding.PASSED, integer=_integer("QLinearReduceMean")),
    "ReduceMin": _PASSING,
    "ReduceProd": _PASSING,
    "ReduceSum": _PASSING,
    "ReduceSumSquare": _POSITIVE,
    "RegexFullMatch": _PLAIN,
    "ReverseSequence": _PASSING,
    "RMSNormalization": _PLAIN,
    "RoiAlign": replace(_SET, rounding=Rounding.PASSED),
    "RotaryEmbedding": _SET,
    "Round": _STEP,
    "Scan": replace(_PLAIN, data=None),
    "Scatter": _PASSING,
    "ScatterElements": _PASSING,
    "ScatterND": _PASSING,
    "Selu": _FUNCTION,
    "SequenceAt": _PASSING,
    "SequenceConstruct": replace(_PASSING, data=None),
    "SequenceEmpty": replace(_PLAIN, data=()),
    "SequenceErase": _PASSING,
    "SequenceInsert": _PASSING,
    "SequenceLength": _PLAIN,
    "SequenceMap": _PLAIN,
    "Shape": _PLAIN,
    "Shrink": _STEP,
    "Sign": _STEP,
    "Sin": _ELEMENTWISE,
    "Sinh": _FUNCTION,
    "Size": _PLAIN,
    "SoftmaxCrossEntropyLoss": _PLAIN,
    "Softplus": _POSITIVE_FUNCTION,
    "Softsign": _FUNCTION,
    "SplitToSequence": _PASSING,
    "Sqrt": _POSITIVE_FUNCTION,
    "STFT": _SET,
    "StringConcat": _PLAIN,
    "StringNormalizer": _PLAIN,
    "StringSplit": _PLAIN,
    "Sub": Operator(_FLOAT, data=None, rounding=Rounding.PASSED, elementwise=True),
    "Sum": replace(_FUNCTION, data=None, highest=sum),
    "SwiGLU": _PASSING,
    "Swish": _FUNCTION,
    "Tan": _FUNCTION,
    "TensorScatter": _PASSING,
    "TfIdfVectorizer": _STEPS,
    "ThresholdedRelu": _STEP,
    "TopK": _DECIDED,
    "Trilu": _PASSING,
    "Unique": _DECIDED,
    "Upsample": replace(_SET, rounding=Rounding.PASSED),
    "Where": Operator(
        _FLOAT,
        data=(1, 2),
        rounding=Rounding.PASSED,
        elementwise=True,
        integer=_integer("QLinearWhere", ((1, 2, 3), (4, 5, 6)), result=(7, 8), first=(0,)),
    ),
    "Xor": _ELEMENTWISE,
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

ALREADY_QUANTIZED = frozenset(
    {"ConvInteger", "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeLinear", *INTEGER_OPERATORS}
    | {"GatherBlockQuantized", "MatMulBnb4", "MatMulInteger", "MatMulNBits", "QMoE", "QuantizeLinear"}
)
"""Op types that only quantized models contain."""

QUANTIZERS: Final = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
"""Op types that make quantized values of floats."""
