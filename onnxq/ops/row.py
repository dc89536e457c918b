"""What a row of the table of operators can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from onnxq.ops.axes import WeightAxes
from onnxq.ops.channels import PassageRule
from onnxq.ops.integer import IntegerOperator
from onnxq.ops.intervals import IntervalRule

if TYPE_CHECKING:
    from onnxq.ir import Node


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
        weights: input index of each weight to where its axes lie.
        bias: input index of a bias added in the accumulator.
        channels: axis of the data's channels where the mean of each is what the mean of the output follows from.
        passage: where the channels of its data are found in its outputs, where it gives each channel from that channel
            alone and in proportion.
        multiplies: whether it multiplies data with data.
        fixed_range: range the output can never leave, whatever the input.
        product: whether it multiplies matrices, data with a weight.
        transposed: attribute that says that the weight lies transposed.
        recurrent: whether it computes step by step from states of its own.
        settings: whether its float inputs besides data and weights say what it does, so that a coarser number would
            make it do something else.
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
    passage: PassageRule | None = None
    multiplies: bool = False
    fixed_range: tuple[float, float] | None = None
    product: bool = False
    transposed: str = ""
    recurrent: bool = False
    settings: bool = False
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
        return self.role is Role.CARRIER

    @property
    def looks_up(self) -> bool:
        """Whether it moves rows of a table, which is its weight."""
        return self.moves and bool(self.weights)

    def is_transposed(self, node: Node) -> bool:
        """Whether the weight of a node lies transposed."""
        return bool(self.transposed and node.attrs.get(self.transposed, 0))
