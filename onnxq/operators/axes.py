"""Axes of weights, which the attributes of a node may say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from onnxq.graph import Node

AxisOf: TypeAlias = "Callable[[Node], int]"
"""From a node to an axis of its weight."""


def axis(number: int) -> AxisOf:
    """Return the same axis for every node."""
    return lambda node: number


def turned(attribute: str, plain: int, transposed: int) -> AxisOf:
    """Return one of two axes, as an attribute says that the weight lies transposed or not."""
    return lambda node: transposed if node.attrs.get(attribute, 0) else plain


def gathered(node: Node) -> int:
    """Return the axis along which Gather chooses."""
    return int(node.attrs.get("axis", 0))


def gathered_row(node: Node) -> int:
    """Return the axis along which what Gather chooses lies."""
    return 0 if node.attrs.get("axis", 0) else -1
