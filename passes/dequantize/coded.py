"""Tensors of codes: which floats they stand for, and whether two of them mean the same by the same codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.ir import Constant, Node, Tensor, optional_input


@dataclass(frozen=True, eq=False)
class Coded:
    """What codes stand for.

    Attributes:
        value: the floats.
        scale: as a tensor.
        zero_point: as a tensor, or None.
        layout: axis and block size of the scale; empty for a single number.
    """

    value: Tensor
    scale: Tensor
    zero_point: Tensor | None
    layout: tuple[int, ...] = ()

    @classmethod
    def by(cls, node: Node, value: Tensor) -> Coded:
        """Return what a QuantizeLinear or DequantizeLinear says about codes."""
        scale = node.inputs[1]
        if isinstance(scale, Constant):
            single = math.prod(scale.shape) == 1
        else:
            single = any(maker.op == "DynamicQuantizeLinear" for maker in scale.inputs)
        layout = () if single else (int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0)))
        return cls(value, scale, optional_input(node, 2), layout)

    def agrees(self, other: Coded) -> bool:
        """Whether the same codes mean the same floats."""
        return (
            self.layout == other.layout
            and same_parameter(self.scale, other.scale)
            and same_parameter(self.zero_point, other.zero_point)
        )

    def factor(self, other: Coded) -> NDArray[np.float64] | None:
        """Return how many times as large the floats are that another reading makes of the same codes, where it knows.

        A scale in which a factor lies leaves the zero point as it is. The factor is a single number, or one for each
        channel in a shape that is broadcast to the floats.
        """
        if not _have_one_zero_point(self.zero_point, other.zero_point):
            return None
        here, there = (self._scales(one, self.value) for one in (self, other))
        return there / here if here is not None and there is not None and here.all() and there.all() else None

    @staticmethod
    def _scales(of: Coded, value: Tensor) -> NDArray[np.float64] | None:
        """Return the scale in a shape that is broadcast to the floats, or None where it is not known or in blocks."""
        if not isinstance(of.scale, Constant):
            return None
        scales = of.scale.values.astype(np.float64)
        if not of.layout:
            return scales.reshape(())
        axis, block = of.layout
        if block or value.shape is None:
            return None
        return scales.reshape([-1 if place == axis % len(value.shape) else 1 for place in range(len(value.shape))])


def _have_one_zero_point(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether all codes of two readings have the same zero point, however many times it is written down."""
    if not all(isinstance(tensor, Constant | None) for tensor in (one, other)):
        return one is other
    found = {int(value) for tensor in (one, other) for value in ([0] if tensor is None else tensor.values.reshape(-1))}
    return len(found) == 1


def same_parameter(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two scales or zero points are the same; a zero point that is left out is zero."""
    if one is other:
        return True
    if not all(isinstance(tensor, Constant | None) for tensor in (one, other)):
        return False
    left, right = (np.zeros(()) if tensor is None else tensor.values.squeeze() for tensor in (one, other))
    return bool(np.array_equal(left, right)) or (None in (one, other) and not left.any() and not right.any())
