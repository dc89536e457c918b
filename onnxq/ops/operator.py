"""The facts in a row of the operator table: roles, weight axes and integer twins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from onnxq.errors import ModelError
from onnxq.ops.channel_maps import ChannelMapRule
from onnxq.ops.intervals import IntervalRule

if TYPE_CHECKING:
    from onnxq.ir import Node


class Role(StrEnum):
    """How an operator treats the scale of the tensor that passes through it."""

    COMPUTE = "compute"
    """Multiplies data with a weight; the output needs a scale of its own."""
    ARITHMETIC = "arithmetic"
    """Has data inputs only; the output needs a scale of its own."""
    PASS_THROUGH = "carrier"
    """Moves or selects values: every data input and output carries the same scale."""
    CLAMP = "clamp"
    """Limits values; a quantizer behind it does the same when its range starts at the limit."""
    WEIGHTED = "weighted"
    """Has weights but no integer form; its weights can be compressed."""
    FLOAT = "float"
    """Computes in float, and has no weights."""


@dataclass(frozen=True)
class Operator:
    """One row of OPERATORS.

    Attributes:
        role: how the scale passes through.
        data: indices of the activation inputs; None stands for all inputs.
        weights: input index of each weight to where its axes lie.
        bias: input index of a bias added in the accumulator.
        channels: axis of the data's channels, if the mean of the output follows from the mean of each channel.
        channel_map: where the outputs have the channels of its data, if each output channel is proportional to one
            input channel.
        multiplies: whether it multiplies data with data.
        fixed_range: range the output can never leave, whatever the input.
        product: whether it is a matrix multiplication of data and a weight.
        transposed: attribute that transposes the weight.
        recurrent: whether it computes step by step from a state.
        precision_sensitive: whether its float inputs besides data and weights are parameters that must not be rounded.
        data_dependent: whether the number or order of output elements depends on the values of the data.
        labels: whether it gives the index of the largest or least value, such as the label of scores.
        random: whether it draws random numbers, seeded by its attribute ``seed`` if there is one.
        interval: the rule for the range of the first output.
        integer: the operators that compute the same on quantized values.
        standard: an operator of ONNX and the indices of the inputs that give it a first output of the same type and
            shape, unless an attribute transposes them.
        types: for each output, the input of the same type.
        shapes: for each output, the input of the same shape.
    """

    role: Role
    data: tuple[int, ...] | None = (0,)
    weights: Mapping[int, WeightAxes] = field(default_factory=dict)
    bias: int | None = None
    channels: int | None = None
    channel_map: ChannelMapRule | None = None
    multiplies: bool = False
    fixed_range: tuple[float, float] | None = None
    product: bool = False
    transposed: str = ""
    recurrent: bool = False
    precision_sensitive: bool = False
    data_dependent: bool = False
    labels: bool = False
    random: bool = False
    interval: IntervalRule | None = None
    integer: tuple[IntegerOperator, ...] = ()
    standard: tuple[str, tuple[int, ...]] | None = None
    types: tuple[int | None, ...] = ()
    shapes: tuple[int | None, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether it moves or selects elements."""
        return self.role is Role.PASS_THROUGH

    @property
    def looks_up(self) -> bool:
        """Whether it moves rows of a table, which is its weight."""
        return self.moves and bool(self.weights)

    def is_transposed(self, node: Node) -> bool:
        """Whether the weight of a node lies transposed."""
        return bool(self.transposed and node.attrs.get(self.transposed, 0))


# Axes of weights, which may depend on the attributes of a node

AxisOf: TypeAlias = "Callable[[Node], int]"
"""From a node to an axis of its weight."""


@dataclass(frozen=True)
class WeightAxes:
    """Where a weight's axes lie, given the node.

    Attributes:
        channels: axis of output channels, or of the rows of an embedding.
        reduction: axis that is summed over, or along the row of an embedding.
    """

    channels: AxisOf
    reduction: AxisOf


def axes(channels: int, reduction: int) -> WeightAxes:
    """Return the same axes for every node."""
    return WeightAxes(lambda node: channels, lambda node: reduction)


def turned(attribute: str, channels: int, reduction: int) -> WeightAxes:
    """Return two axes that change places if an attribute transposes the weight."""
    return WeightAxes(
        lambda node: reduction if node.attrs.get(attribute, 0) else channels,
        lambda node: channels if node.attrs.get(attribute, 0) else reduction,
    )


# Gather chooses along the axis that it names.
gathered = WeightAxes(lambda node: int(node.attrs.get("axis", 0)), lambda node: 0 if node.attrs.get("axis", 0) else -1)


# Operators that compute on quantized values


@dataclass(frozen=True)
class IntegerOperator:
    """The integer twin of a float operator.

    Attributes:
        op: op type.
        operands: for each quantized operand, the input indices of values, scale and zero point, in the order of the
            float operator's inputs.
        result: input indices of the output's scale and zero point; None if the output is float.
        bias: input index of a bias: int32 with the product of all operands' scales, or float.
        first: indices of inputs that the float operator reads unchanged before the operands.
        last: indices of inputs that it reads unchanged behind them.
        repeats: whether the operands go on in threes until the inputs end.
        dropped: attributes that the float operator does not have.
        float_op: the float operator; the operator table fills it in.
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
    """Check that a node has certain inputs, for operators whose schema onnx does not know.

    Raises:
        ModelError: an input is missing.
    """
    missing = [index for index in needed if index >= len(node.inputs) or not node.inputs[index].name]
    if missing:
        raise ModelError(
            f"node {node.name} ({node.op}) lacks input {missing[0]}; the model is damaged, export it again"
        )
