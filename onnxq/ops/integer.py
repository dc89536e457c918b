"""Operators that compute with codes: which inputs say what the codes mean, and what they have in common with floats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxq.errors import ModelError

if TYPE_CHECKING:
    from onnxq.ir import Node


@dataclass(frozen=True)
class IntegerOperator:
    """The integer twin of a float operator.

    Attributes:
        op: op type.
        operands: for each operand that is codes the input indices of codes, scale and zero point, in the order in
            which the float operator reads them.
        result: input indices of scale and zero point of the codes that come out; None where floats do, or where the
            scale may be left out and is.
        bias: input index of a bias: int32 codes with the product of all operands' scales, or floats.
        first: indices of inputs that the float operator reads unchanged before the operands.
        last: indices of inputs that it reads unchanged behind them.
        repeats: whether the operands go on in threes until the inputs end.
        dropped: attributes that the float operator does not have.
        float_op: the operator that computes the same with floats; the table of operators fills it in.
        domain: of the float operator.
    """

    op: str
    operands: tuple[tuple[int, int, int], ...]
    result: tuple[int, int] | None = None
    bias: int | None = None
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    repeats: bool = False
    dropped: frozenset[str] = frozenset({"channels_last"})
    float_op: str = ""
    domain: str = ""


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
