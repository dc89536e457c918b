"""Operators that compute with codes: which float operator each stands for, and which inputs say what the codes mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from onnxq.errors import ModelError

if TYPE_CHECKING:
    from onnxq.graph import Node


@dataclass(frozen=True)
class IntegerOperator:
    """One row of INTEGER_OPERATORS.

    Attributes:
        float_op: the operator that computes the same with floats.
        operands: for each operand that is codes the input indices of codes, scale and zero point, in the order in
            which the float operator reads them.
        result: input indices of scale and zero point of the codes that come out; None where floats do, or where the
            scale may be left out and is.
        bias: input index of a bias: int32 codes with the product of all operands' scales, or floats.
        first: indices of inputs that the float operator reads unchanged before the operands.
        last: indices of inputs that it reads unchanged behind them.
        repeats: whether the operands go on in threes until the inputs end.
        domain: of the float operator.
        dropped: attributes that the float operator does not have.
    """

    float_op: str
    operands: tuple[tuple[int, int, int], ...]
    result: tuple[int, int] | None = None
    bias: int | None = None
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    repeats: bool = False
    domain: str = ""
    dropped: frozenset[str] = frozenset({"channels_last"})


def check_inputs(node: Node, needed: Iterable[int]) -> None:
    """Check that a node has the inputs of these indices, for operators that onnx itself does not know.

    Raises:
        ModelError: it does not.
    """
    missing = [index for index in needed if index >= len(node.inputs) or not node.inputs[index].name]
    if missing:
        raise ModelError(
            f"node {node.name} ({node.op}) lacks input {missing[0]}; the model is damaged, export it again"
        )


_ONE = ((0, 1, 2),)
_TWO = ((0, 1, 2), (3, 4, 5))

INTEGER_OPERATORS: Mapping[str, IntegerOperator] = MappingProxyType(
    {
        "QLinearConv": IntegerOperator("Conv", _TWO, (6, 7), bias=8),
        "QLinearConvTranspose": IntegerOperator("ConvTranspose", _TWO, (6, 7), bias=8),
        "QLinearMatMul": IntegerOperator("MatMul", _TWO, (6, 7)),
        "QGemm": IntegerOperator("Gemm", _TWO, (7, 8), bias=6),
        "QLinearAdd": IntegerOperator("Add", _TWO, (6, 7)),
        "QLinearMul": IntegerOperator("Mul", _TWO, (6, 7)),
        "QLinearAveragePool": IntegerOperator("AveragePool", _ONE, (3, 4)),
        "QLinearGlobalAveragePool": IntegerOperator("GlobalAveragePool", _ONE, (3, 4)),
        "QLinearLeakyRelu": IntegerOperator("LeakyRelu", _ONE, (3, 4)),
        "QLinearReduceMean": IntegerOperator("ReduceMean", _ONE, (3, 4)),
        "QLinearSigmoid": IntegerOperator("Sigmoid", _ONE, (3, 4)),
        "QLinearSoftmax": IntegerOperator("Softmax", _ONE, (3, 4), dropped=frozenset({"opset"})),
        "QLinearConcat": IntegerOperator("Concat", ((2, 3, 4),), (0, 1), repeats=True),
        "QLinearWhere": IntegerOperator("Where", ((1, 2, 3), (4, 5, 6)), (7, 8), first=(0,)),
        "DynamicQuantizeMatMul": IntegerOperator("MatMul", ((1, 2, 3),), bias=4, first=(0,)),
        "MatMulIntegerToFloat": IntegerOperator("MatMul", ((0, 2, 4), (1, 3, 5)), bias=6),
        "QAttention": IntegerOperator(
            "Attention", ((0, 3, 6), (1, 4, 7)), first=(), last=(2, 5, 8), domain="com.microsoft"
        ),
    }
)
"""Every such operator with a float form, by op type."""
