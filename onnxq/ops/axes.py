"""Axes of weights, which the attributes of a node may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from onnxq.ir import Node

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
