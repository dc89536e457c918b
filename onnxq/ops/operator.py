"""What a row of the table of operators can say."""

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
if TYPE_CHECKING:
    from onnxq.ir import Node
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
    """Has weights but no integer form of its own; its weights can be stored as codes."""
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
        channels: axis of the data's channels where the mean of each is what the mean of the output follows from.
        channel_map: where the outputs have the channels of its data, if each output channel is proportional to one
            input channel.
        multiplies: whether it multiplies data with data.
        fixed_range: range the output can never leave, whatever the input.
        product: whether it multiplies matrices, data with a weight.
        transposed: attribute that says that the weight lies transposed.
        recurrent: whether it computes step by step from states of its own.
        precision_sensitive: whether its float inputs besides data and weights are parameters that must not be rounded.
        data_dependent: whether the values of its data say how many elements it gives, or in which order.
        labels: whether it gives the places of the largest or least of its data, such as the label of scores.
        random: whether it draws random numbers, from its attribute ``seed`` where that is given.
        interval: which values the first output has, from those of the inputs.
        integer: its integer twins.
        standard: an operator of ONNX with the indices of the inputs from which that makes a first output of the same
            type and shape, unless an attribute transposes them.
        types: for each output the input whose type it has.
        shapes: for each output the input whose shape it has as well.
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


# Axes of weights, which the attributes of a node may say.

AxisOf: TypeAlias = "Callable[[Node], int]"
"""From a node to an axis of its weight."""


@dataclass(frozen=True)
class WeightAxes:
    """Where a weight's axes lie, given the node.

    Attributes:
        channels: the one that indexes output channels, or the rows of a table.
        reduction: the one that is summed over, or that a looked-up row lies along.
    """

    channels: AxisOf
    reduction: AxisOf


def axes(channels: int, reduction: int) -> WeightAxes:
    """Return the same axes for every node."""
    return WeightAxes(lambda node: channels, lambda node: reduction)


def turned(attribute: str, channels: int, reduction: int) -> WeightAxes:
    """Return two axes that change places where an attribute says that the weight lies transposed."""
    return WeightAxes(
        lambda node: reduction if node.attrs.get(attribute, 0) else channels,
        lambda node: channels if node.attrs.get(attribute, 0) else reduction,
    )


# Gather chooses along the axis that it names.
gathered = WeightAxes(lambda node: int(node.attrs.get("axis", 0)), lambda node: 0 if node.attrs.get("axis", 0) else -1)


# Operators that compute with codes: which inputs say what the codes mean, and what they have in common with floats.


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
