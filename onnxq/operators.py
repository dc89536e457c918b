"""Operators: which inputs of an op type are data, weight or bias, and along which axis its channels lie.

What an operator *is* stands here; what a runtime does with it stands in targets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from onnxq.integer_operators import INTEGER_OPERATORS

if TYPE_CHECKING:
    from onnxq.graph import Node


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
    """

    role: Role
    data: tuple[int, ...] | None = (0,)
    weights: Mapping[int, Callable[[Node], int]] = field(default_factory=dict)
    reductions: Mapping[int, Callable[[Node], int]] = field(default_factory=dict)
    bias: int | None = None
    channels: int | None = None
    fixed_range: tuple[float, float] | None = None


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


_COMPUTE, _ARITHMETIC, _CARRIER, _CLAMP, _WEIGHTED = Role

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "Conv": Operator(_COMPUTE, weights={1: _axis(0)}, reductions={1: _axis(1)}, bias=2, channels=1),
        "ConvTranspose": Operator(_COMPUTE, weights={1: _axis(1)}, reductions={1: _axis(0)}, bias=2),
        "Gemm": Operator(_COMPUTE, weights={1: _gemm_axis}, reductions={1: _gemm_reduction}, bias=2, channels=-1),
        "MatMul": Operator(_COMPUTE, (0, 1), {0: _axis(-2), 1: _axis(-1)}, {0: _axis(-1), 1: _axis(-2)}, channels=-1),
        "LSTM": Operator(_WEIGHTED, weights={1: _axis(1), 2: _axis(1)}, reductions={1: _axis(2), 2: _axis(2)}),
        "GRU": Operator(_WEIGHTED, weights={1: _axis(1), 2: _axis(1)}, reductions={1: _axis(2), 2: _axis(2)}),
        "RNN": Operator(_WEIGHTED, weights={1: _axis(1), 2: _axis(1)}, reductions={1: _axis(2), 2: _axis(2)}),
        "Gather": Operator(_CARRIER, weights={0: _gather_axis}, reductions={0: _gather_row}),
        "Add": Operator(_ARITHMETIC, data=None),
        "Mul": Operator(_ARITHMETIC, data=None),
        "AveragePool": Operator(_ARITHMETIC),
        "GlobalAveragePool": Operator(_ARITHMETIC),
        "LeakyRelu": Operator(_ARITHMETIC),
        "Sigmoid": Operator(_ARITHMETIC, fixed_range=(0.0, 1.0)),
        "HardSigmoid": Operator(_ARITHMETIC, fixed_range=(0.0, 1.0)),
        "Softmax": Operator(_ARITHMETIC, fixed_range=(0.0, 1.0)),
        "Tanh": Operator(_ARITHMETIC, fixed_range=(-1.0, 1.0)),
        "Concat": Operator(_CARRIER, data=None),
        "DepthToSpace": Operator(_CARRIER),
        "Expand": Operator(_CARRIER),
        "Flatten": Operator(_CARRIER),
        "MaxPool": Operator(_CARRIER),
        "Pad": Operator(_CARRIER),
        "ReduceMax": Operator(_CARRIER),
        "Reshape": Operator(_CARRIER),
        "Resize": Operator(_CARRIER),
        "Slice": Operator(_CARRIER),
        "SpaceToDepth": Operator(_CARRIER),
        "Split": Operator(_CARRIER),
        "Squeeze": Operator(_CARRIER),
        "Tile": Operator(_CARRIER),
        "Transpose": Operator(_CARRIER),
        "Unsqueeze": Operator(_CARRIER),
        "Clip": Operator(_CLAMP),
        "Relu": Operator(_CLAMP),
    }
)
"""Every operator the planner knows, by op type of the default domain. A new operator is one more line."""

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
