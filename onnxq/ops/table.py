"""Operators: every fact about an operator, in one row each.

What an operator *is* stands here; what a runtime does with it stands in targets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from onnxq.ops.axes import axes, gathered, turned
from onnxq.ops.channels import aligned, alike, concatenated, picked, reshaped, scaled, split, transposed
from onnxq.ops.contrib import CONTRIB
from onnxq.ops.integer import IntegerOperator
from onnxq.ops.intervals import (
    added,
    always,
    clipped,
    difference,
    first,
    leaky,
    multiplied,
    of_one_sign,
    padded,
    power,
    rectified,
    summed,
    together,
)
from onnxq.ops.row import Operator, Role

if TYPE_CHECKING:
    from onnxq.ir import Node
    from onnxq.ir.reading import OperatorKey


def operator_of(node: Node) -> Operator | None:
    """Return what is known of the operator that a node calls.

    >>> from onnxq.ir import Node
    >>> operator_of(Node("Relu")).role, operator_of(Node("Relu", domain="my.own"))
    (<Role.CLAMP: 'clamp'>, None)
    """
    return OPERATORS.get((node.domain, node.op))


_COMPUTE, _ARITHMETIC, _CARRIER, _CLAMP, _WEIGHTED, _FLOAT = Role
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
_MOVING = Operator(_CARRIER, interval=first)
_ABOVE_ZERO = Operator(_FLOAT, interval=always(low=0.0))
_AROUND_ZERO = Operator(_FLOAT, interval=always(-1.0, 1.0))
_SET = Operator(_FLOAT, settings=True)
_DECIDED = Operator(_FLOAT, settings=True, data_dependent=True)
_LABELS = Operator(_FLOAT, labels=True)
_RANDOM = Operator(_FLOAT, settings=True, random=True)


def _integer(op: str, operands: tuple[tuple[int, int, int], ...] = _ONE, **facts: Any) -> tuple[IntegerOperator, ...]:
    """Return the integer twin, which gives codes in the usual places."""
    result = (6, 7) if operands == _TWO else (3, 4)
    return (IntegerOperator(op, operands, **{"result": result, **facts}),)


def _bounded(low: float, high: float, twin: tuple[IntegerOperator, ...] = ()) -> Operator:
    return Operator(_ARITHMETIC, fixed_range=(low, high), interval=always(low, high), integer=twin)


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
    "Gather": Operator(_CARRIER, weights={0: gathered}, passage=picked, interval=first),
    "Add": Operator(_ARITHMETIC, data=None, passage=aligned, interval=added, integer=_integer("QLinearAdd", _TWO)),
    "Mul": Operator(
        _ARITHMETIC,
        data=None,
        passage=scaled,
        multiplies=True,
        interval=multiplied,
        integer=_integer("QLinearMul", _TWO),
    ),
    "AveragePool": Operator(_ARITHMETIC, passage=alike, interval=first, integer=_integer("QLinearAveragePool")),
    "GlobalAveragePool": Operator(
        _ARITHMETIC, passage=alike, interval=first, integer=_integer("QLinearGlobalAveragePool")
    ),
    "LeakyRelu": Operator(_ARITHMETIC, passage=alike, interval=leaky, integer=_integer("QLinearLeakyRelu")),
    "Sigmoid": _bounded(0.0, 1.0, _integer("QLinearSigmoid")),
    # Most gates use a part of their range, and codes may end there.
    "HardSigmoid": Operator(_ARITHMETIC, interval=always(0.0, 1.0)),
    "Softmax": _bounded(0.0, 1.0, _integer("QLinearSoftmax", dropped=frozenset({"opset"}))),
    "Tanh": _bounded(-1.0, 1.0),
    "Concat": Operator(
        _CARRIER,
        data=None,
        passage=concatenated,
        interval=together,
        integer=_integer("QLinearConcat", ((2, 3, 4),), result=(0, 1), repeats=True),
    ),
    "DepthToSpace": _MOVING,
    "Expand": replace(_MOVING, passage=aligned),
    "Flatten": replace(_MOVING, passage=reshaped),
    "MaxPool": replace(_MOVING, passage=alike),
    # It brings in a value of its own.
    "Pad": Operator(_CARRIER, settings=True, interval=padded),
    "ReduceMax": _MOVING,
    "Reshape": replace(_MOVING, passage=reshaped),
    # It can overshoot.
    "Resize": Operator(_CARRIER, settings=True, passage=alike),
    "Slice": _MOVING,
    "SpaceToDepth": _MOVING,
    "Split": replace(_MOVING, passage=split),
    "Squeeze": replace(_MOVING, passage=reshaped),
    "Tile": replace(_MOVING, passage=alike),
    "Transpose": replace(_MOVING, passage=transposed),
    "Unsqueeze": replace(_MOVING, passage=reshaped),
    "Clip": Operator(_CLAMP, settings=True, interval=clipped),
    "Relu": Operator(_CLAMP, passage=alike, interval=rectified),
    "Abs": _ABOVE_ZERO,
    "ArgMax": _LABELS,
    "ArgMin": _LABELS,
    "Bernoulli": _RANDOM,
    "Cast": Operator(_FLOAT, interval=first),
    "Compress": _DECIDED,
    "Cos": _AROUND_ZERO,
    "DFT": _SET,
    "Div": Operator(_FLOAT, data=None, interval=of_one_sign),
    "Dropout": _RANDOM,
    "Equal": _SET,
    "Erf": _AROUND_ZERO,
    "Exp": _ABOVE_ZERO,
    "GlobalMaxPool": Operator(_FLOAT, interval=first),
    "Greater": _SET,
    "GreaterOrEqual": _SET,
    "GridSample": _SET,
    "Identity": Operator(_FLOAT, interval=first),
    "Less": _SET,
    "LessOrEqual": _SET,
    # Where its body or its data says when it ends.
    "Loop": replace(_DECIDED, data=()),
    "Mod": _SET,
    "Multinomial": _RANDOM,
    "NonMaxSuppression": _DECIDED,
    "NonZero": _DECIDED,
    "OneHot": _SET,
    "Pow": Operator(_FLOAT, data=(0, 1), settings=True, interval=power),
    "RandomNormal": replace(_RANDOM, data=()),
    "RandomNormalLike": _RANDOM,
    "RandomUniform": replace(_RANDOM, data=()),
    "RandomUniformLike": _RANDOM,
    "Range": _SET,
    "RotaryEmbedding": _SET,
    "Reciprocal": Operator(_FLOAT, interval=of_one_sign),
    "ReduceL1": _ABOVE_ZERO,
    "ReduceL2": _ABOVE_ZERO,
    "ReduceMean": Operator(_FLOAT, interval=first, integer=_integer("QLinearReduceMean")),
    "ReduceSum": Operator(_FLOAT, interval=summed),
    "ReduceSumSquare": _ABOVE_ZERO,
    "RoiAlign": _SET,
    "Shape": _ABOVE_ZERO,
    "Sin": _AROUND_ZERO,
    "Size": _ABOVE_ZERO,
    "STFT": _SET,
    "Softsign": _AROUND_ZERO,
    "Sqrt": _ABOVE_ZERO,
    "Sub": Operator(_FLOAT, data=None, interval=difference),
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
"""Every operator of which anything is known, by domain and op type. A new operator is one more line."""

INTEGER_OPERATORS: Mapping[str, IntegerOperator] = MappingProxyType(
    {
        twin.op: replace(twin, float_op=op, domain=domain)
        for (domain, op), row in OPERATORS.items()
        for twin in row.integer
    }
)
"""Every operator that computes with codes and has a float form, by op type."""

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
        "QuantizeLinear",
    }
)
"""Op types that only a quantized model holds."""
