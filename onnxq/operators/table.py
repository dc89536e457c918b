"""Operators: every fact about an operator, in one row each.

What an operator *is* stands here; what a runtime does with it stands in targets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from onnxq.operators.integer import IntegerOperator
from onnxq.operators.intervals import (
    IntervalRule,
    added,
    always,
    clipped,
    difference,
    first,
    leaky,
    multiplied,
    of_one_sign,
    power,
    rectified,
    summed,
    together,
)

if TYPE_CHECKING:
    from onnxq.graph import Node
    from onnxq.graph.reading import OperatorKey


class Role(StrEnum):
    """How an operator treats the scale of the tensor that passes through it."""

    COMPUTE = "compute"
    """Multiplies data with a weight; the output needs a scale of its own."""
    ARITHMETIC = "arithmetic"
    """Has data inputs only; the output needs a scale of its own."""
    CARRIER = "carrier"
    """Moves or selects values: every data input and output carries the same scale."""
    CLAMP = "clamp"
    """Limits values; a quantizer behind it does the same when its range starts at the limit."""
    WEIGHTED = "weighted"
    """Has weights but no integer form of its own; its weights can be stored as codes."""
    FLOAT = "float"
    """Computes in float, and has no weights."""


@dataclass(frozen=True)
class Operator:
    """One row of OPERATORS.

    Attributes:
        role: how the scale passes through.
        data: indices of the activation inputs; None stands for all inputs.
        weights: input index of each weight to the axis that indexes its output channels, given the node.
        reductions: input index of each weight to the axis that is summed over, or that a looked-up row lies along.
        bias: input index of a bias added in the accumulator.
        channels: axis of the data's channels where the mean of each is what the mean of the output follows from.
        fixed_range: range the output can never leave, whatever the input.
        product: whether it multiplies matrices, data with a weight.
        transposed: attribute that says that the weight lies transposed.
        recurrent: whether it computes step by step from states of its own.
        settings: whether its float inputs besides data and weights say what it does, so that a coarser number would
            make it do something else.
        interval: which values the first output has, from those of the inputs.
        integer: its integer twins.
    """

    role: Role
    data: tuple[int, ...] | None = (0,)
    weights: Mapping[int, Callable[[Node], int]] = field(default_factory=dict)
    reductions: Mapping[int, Callable[[Node], int]] = field(default_factory=dict)
    bias: int | None = None
    channels: int | None = None
    fixed_range: tuple[float, float] | None = None
    product: bool = False
    transposed: str = ""
    recurrent: bool = False
    settings: bool = False
    interval: IntervalRule | None = None
    integer: tuple[IntegerOperator, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether it moves or selects elements."""
        return self.role is Role.CARRIER

    @property
    def looks_up(self) -> bool:
        """Whether it moves rows of a table, which is its weight."""
        return self.moves and bool(self.weights)

    def is_transposed(self, node: Node) -> bool:
        """Whether the weight of a node lies transposed."""
        return bool(self.transposed and node.attrs.get(self.transposed, 0))


def operator_of(node: Node) -> Operator | None:
    """Return what is known of the operator that a node calls.

    >>> from onnxq.graph import Node
    >>> operator_of(Node("Relu")).role, operator_of(Node("Relu", domain="my.own"))
    (<Role.CLAMP: 'clamp'>, None)
    """
    return OPERATORS.get((node.domain, node.op))


def _axis(axis: int) -> Callable[[Node], int]:
    return lambda node: axis


def _gemm_axis(node: Node) -> int:
    return 0 if node.attrs.get("transB", 0) else 1


def _gemm_reduction(node: Node) -> int:
    return 1 if node.attrs.get("transB", 0) else 0


def _gather_axis(node: Node) -> int:
    return int(node.attrs.get("axis", 0))


def _gather_row(node: Node) -> int:
    return 0 if node.attrs.get("axis", 0) else -1


_COMPUTE, _ARITHMETIC, _CARRIER, _CLAMP, _WEIGHTED, _FLOAT = Role
_ONE = ((0, 1, 2),)
_TWO = ((0, 1, 2), (3, 4, 5))
_CONV = Operator(_COMPUTE, weights={1: _axis(0)}, reductions={1: _axis(1)}, bias=2, channels=1)
_MATMUL = Operator(
    _COMPUTE, (0, 1), {0: _axis(-2), 1: _axis(-1)}, {0: _axis(-1), 1: _axis(-2)}, channels=-1, product=True
)
_GEMM = Operator(
    _COMPUTE,
    weights={1: _gemm_axis},
    reductions={1: _gemm_reduction},
    bias=2,
    channels=-1,
    product=True,
    transposed="transB",
)
_CELL = Operator(
    _WEIGHTED,
    weights={1: _axis(1), 2: _axis(1)},
    reductions={1: _axis(2), 2: _axis(2)},
    recurrent=True,
)
_MOVING = Operator(_CARRIER, interval=first)
_ABOVE_ZERO = Operator(_FLOAT, interval=always(low=0.0))
_AROUND_ZERO = Operator(_FLOAT, interval=always(-1.0, 1.0))
_SET = Operator(_FLOAT, settings=True)


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
        weights={1: _axis(1)},
        reductions={1: _axis(0)},
        bias=2,
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
    "Gather": Operator(_CARRIER, weights={0: _gather_axis}, reductions={0: _gather_row}, interval=first),
    "Add": Operator(_ARITHMETIC, data=None, interval=added, integer=_integer("QLinearAdd", _TWO)),
    "Mul": Operator(_ARITHMETIC, data=None, interval=multiplied, integer=_integer("QLinearMul", _TWO)),
    "AveragePool": Operator(_ARITHMETIC, interval=first, integer=_integer("QLinearAveragePool")),
    "GlobalAveragePool": Operator(_ARITHMETIC, interval=first, integer=_integer("QLinearGlobalAveragePool")),
    "LeakyRelu": Operator(_ARITHMETIC, interval=leaky, integer=_integer("QLinearLeakyRelu")),
    "Sigmoid": _bounded(0.0, 1.0, _integer("QLinearSigmoid")),
    "HardSigmoid": _bounded(0.0, 1.0),
    "Softmax": _bounded(0.0, 1.0, _integer("QLinearSoftmax", dropped=frozenset({"opset"}))),
    "Tanh": _bounded(-1.0, 1.0),
    "Concat": Operator(
        _CARRIER,
        data=None,
        interval=together,
        integer=_integer("QLinearConcat", ((2, 3, 4),), result=(0, 1), repeats=True),
    ),
    "DepthToSpace": _MOVING,
    "Expand": _MOVING,
    "Flatten": _MOVING,
    "MaxPool": _MOVING,
    # It brings in a value of its own.
    "Pad": Operator(_CARRIER, settings=True),
    "ReduceMax": _MOVING,
    "Reshape": _MOVING,
    # It can overshoot.
    "Resize": Operator(_CARRIER, settings=True),
    "Slice": _MOVING,
    "SpaceToDepth": _MOVING,
    "Split": _MOVING,
    "Squeeze": _MOVING,
    "Tile": _MOVING,
    "Transpose": _MOVING,
    "Unsqueeze": _MOVING,
    "Clip": Operator(_CLAMP, settings=True, interval=clipped),
    "Relu": Operator(_CLAMP, interval=rectified),
    "Abs": _ABOVE_ZERO,
    "Cast": Operator(_FLOAT, interval=first),
    "Cos": _AROUND_ZERO,
    "Div": Operator(_FLOAT, data=None, interval=of_one_sign),
    "Dropout": _SET,
    "Erf": _AROUND_ZERO,
    "Exp": _ABOVE_ZERO,
    "GlobalMaxPool": Operator(_FLOAT, interval=first),
    "Identity": Operator(_FLOAT, interval=first),
    "NonMaxSuppression": _SET,
    "OneHot": _SET,
    "Pow": Operator(_FLOAT, data=(0, 1), interval=power),
    "Range": _SET,
    "Reciprocal": Operator(_FLOAT, interval=of_one_sign),
    "ReduceL1": _ABOVE_ZERO,
    "ReduceL2": _ABOVE_ZERO,
    "ReduceMean": Operator(_FLOAT, interval=first, integer=_integer("QLinearReduceMean")),
    "ReduceSum": Operator(_FLOAT, interval=summed),
    "ReduceSumSquare": _ABOVE_ZERO,
    "Shape": _ABOVE_ZERO,
    "Sin": _AROUND_ZERO,
    "Size": _ABOVE_ZERO,
    "Softsign": _AROUND_ZERO,
    "Sqrt": _ABOVE_ZERO,
    "Sub": Operator(_FLOAT, data=None, interval=difference),
    "Upsample": _SET,
    "Where": Operator(
        _FLOAT, data=(1, 2), integer=_integer("QLinearWhere", ((1, 2, 3), (4, 5, 6)), result=(7, 8), first=(0,))
    ),
}

_MICROSOFT: Mapping[str, Operator] = {
    "Attention": Operator(_FLOAT, integer=_integer("QAttention", ((0, 3, 6), (1, 4, 7)), result=None, last=(2, 5, 8))),
}

OPERATORS: Mapping[OperatorKey, Operator] = MappingProxyType(
    {
        **{("", op): row for op, row in _STANDARD.items()},
        **{("com.microsoft", op): row for op, row in _MICROSOFT.items()},
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
