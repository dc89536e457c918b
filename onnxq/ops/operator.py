"""The classes of the operator table: roles, weight axes and integer operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from onnxq.errors import ModelError
from onnxq.ops.channel_maps import ChannelMapRule

if TYPE_CHECKING:
    from onnxq.ir import Node


class Role(StrEnum):
    """How an operator relates the scales of its inputs and outputs."""

    COMPUTE = "compute"
    """Multiplies activations with a weight; the output needs its own scale."""
    ARITHMETIC = "arithmetic"
    """Has activation inputs only; the output needs its own scale."""
    PASS_THROUGH = "carrier"
    """Moves or selects values: all activation inputs and outputs share one scale."""
    CLAMP = "clamp"
    """Limits values; redundant before a quantizer whose range starts at the limit."""
    WEIGHTED = "weighted"
    """Has weights but no integer operator; its weights can be compressed."""
    FLOAT = "float"
    """Computes in float and has no weights."""


class Rounding(StrEnum):
    """The effect of a difference in the last bit of an input."""

    LOST = "lost"
    """The rounding of the result, such as a sum, hides it, or the input is not read."""
    PASSED = "passed"
    """It reaches the result: values are moved, or the result is piecewise monotone in each operand."""
    DECISIVE = "decisive"
    """It may change the result by far more, because the result has steps or is unknown."""


@dataclass(frozen=True)
class Operator:
    """One row of OPERATORS.

    Attributes:
        data: indices of the activation inputs; None for all inputs.
        weights: the axes of each weight, by input index.
        bias: input index of a bias added in the accumulator.
        channels: channel axis of the activations, if the mean of the output follows from the mean of each channel.
        channel_map: the rule for its channels, if each output channel is proportional to one input channel.
        multiplies: whether it multiplies activations with activations.
        fixed_range: range that the output never leaves, whatever the input.
        rounding: the effect of a difference in the last bit of an input.
        elementwise: whether each element of the output comes from the elements at its place in the broadcast inputs.
        never_negative: whether the output is zero or more, whatever the input.
        keeps_range: whether the output stays between the smallest and largest value of `data` and zero.
        highest: the largest output by the largest values of `data`, if none of these is negative and then no output is;
            None if an output may be negative all the same.
        product: whether it is a matrix multiplication of activations and a weight.
        transposed: attribute that transposes the weight.
        recurrent: whether it computes step by step from a state.
        precision_sensitive: whether its other float inputs, beside activations and weights, must not be rounded.
        data_dependent: whether the number or order of output elements depends on the values of the input.
        labels: whether it returns the index of the largest or smallest value.
        random: whether it draws random numbers, seeded by its attribute ``seed`` if there is one.
        integer: the operators that compute the same on quantized values.
        standard: an operator of ONNX whose first output has the same type and shape, and the indices of its inputs.
            It does not apply if an attribute transposes an input.
        types: for each output, the index of the input of the same type.
        shapes: for each output, the index of the input of the same shape.
    """

    role: Role
    data: tuple[int, ...] | None = (0,)
    weights: Mapping[int, WeightAxes] = field(default_factory=dict)
    bias: int | None = None
    channels: int | None = None
    channel_map: ChannelMapRule | None = None
    multiplies: bool = False
    fixed_range: tuple[float, float] | None = None
    rounding: Rounding = Rounding.LOST
    elementwise: bool = False
    never_negative: bool = False
    keeps_range: bool = False
    highest: Callable[[Sequence[float]], float] | None = None
    product: bool = False
    transposed: str = ""
    recurrent: bool = False
    precision_sensitive: bool = False
    data_dependent: bool = False
    labels: bool = False
    random: bool = False
    integer: tuple[IntegerOperator, ...] = ()
    standard: tuple[str, tuple[int, ...]] | None = None
    types: tuple[int | None, ...] = ()
    shapes: tuple[int | None, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether it moves or selects elements."""
        return self.role is Role.PASS_THROUGH

    @property
    def adds_bias(self) -> bool:
        """Whether it multiplies by a weight and adds a bias."""
        return self.role is Role.COMPUTE and self.bias is not None

    @property
    def convolves(self) -> bool:
        """Whether it is a convolution."""
        return self.role is Role.COMPUTE and not self.product

    @property
    def looks_up(self) -> bool:
        """Whether it selects rows of an embedding, which is its weight."""
        return self.moves and bool(self.weights)

    def is_transposed(self, node: Node) -> bool:
        """Whether an attribute of a node transposes its weight."""
        return bool(self.transposed and node.attrs.get(self.transposed, 0))


# Axes of weights

AxisOf: TypeAlias = "Callable[[Node], int]"
"""Maps a node to an axis of its weight."""


@dataclass(frozen=True)
class WeightAxes:
    """The axes of a weight, which may depend on the attributes of the node.

    Attributes:
        channels: axis of output channels, or of the rows of an embedding.
        reduction: axis that is summed over, or axis along a row of an embedding.
    """

    channels: AxisOf
    reduction: AxisOf


def axes(channels: int, reduction: int) -> WeightAxes:
    """Return axes that are the same for every node."""
    return WeightAxes(lambda node: channels, lambda node: reduction)


def turned(attribute: str, channels: int, reduction: int) -> WeightAxes:
    """Return two axes that are exchanged if an attribute transposes the weight."""
    return WeightAxes(
        lambda node: reduction if node.attrs.get(attribute, 0) else channels,
        lambda node: channels if node.attrs.get(attribute, 0) else reduction,
    )


# Gather selects along its attribute axis.
gathered = WeightAxes(lambda node: int(node.attrs.get("axis", 0)), lambda node: 0 if node.attrs.get("axis", 0) else -1)


# Operators that compute on quantized values


@dataclass(frozen=True)
class IntegerOperator:
    """The integer operator that corresponds to a float operator.

    Attributes:
        op: op type.
        operands: for each quantized operand, the input indices of values, scale and zero point, in the order of the
            float operator's inputs.
        result: input indices of the output's scale and zero point; None if the output is float.
        bias: input index of a bias: float, or int32 with the product of all operands' scales as its scale.
        first: indices of inputs that come unchanged before the operands of the float operator.
        last: indices of inputs that come unchanged after them.
        repeats: whether the operands repeat in threes until the inputs end.
        dropped: attributes that the float operator does not have.
        float_op: the float operator; filled in by the operator table.
        domain: domain of the float operator.
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
    """Raise ModelError unless a node has certain inputs, for operators whose schema onnx does not know."""
    missing = [index for index in needed if index >= len(node.inputs) or not node.inputs[index].name]
    if missing:
        raise ModelError(
            f"node {node.name} ({node.op}) lacks input {missing[0]}; the model is damaged, export it again"
        )
