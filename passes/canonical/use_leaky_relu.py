"""Leaky rectifiers, which exporters write as formulas of Relu, as PRelu of one number, or as a maximum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import may_widen
from onnxq.rewrite.rectifiers import FIRST_OPSET, is_extreme_of_two, rectified


class UseLeakyRelu(RewriteRule):
    """Rectifiers with a slope below zero are LeakyRelu, or where each channel has its own, two or three nodes.

    These are faster than the one that PRelu would be. The formula with ``x - abs(x)`` stays: it makes NaN of infinity.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each form."""
        x, slope = op.any("x"), op.constant("slope")
        positive, turned = op.Relu(x), op.Relu(op.Neg(x))
        return (
            op.PRelu(x, slope),
            op.Add(positive, op.Mul(turned, slope, name="turned")),
            op.Sub(positive, op.Mul(turned, slope)),
            *(op.Add(positive, op.Mul(below, slope)) for below in _below_zero(op, x)),
            op.Max(x, op.Mul(x, op.scalar("slope"))),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        dtype = np.dtype(found.x.dtype or "O")
        if found.opset < 7 or dtype.kind != "f" or found.x.shape is None:
            return "its data is not known to be floating point, or of unknown rank"
        slope = _slope(found)
        if may_widen(found, found.x):
            return "a constant may raise the rank"
        if not np.isfinite(slope).all():
            return "its slope is not finite"
        if found.root.op == "PRelu" and not _is_one(slope):
            return "each channel has a slope of its own"
        if found.root.op == "Max" and not 0 < slope.item() <= 1:
            return "its slope is not between 0 and 1"
        if _is_one(slope) and float(np.float32(slope.reshape(-1)[0])) != float(slope.reshape(-1)[0]):
            return "LeakyRelu has a slope of single precision"
        if not _is_one(slope) and (found.opset < FIRST_OPSET or not is_extreme_of_two(slope)):
            return "its slopes lie on both sides of 1, or its opset has nothing faster"
        fits = found.root.op == "PRelu" or _fits(slope.shape, found.x.shape)
        return "" if fits else "its slope is not known to fit its data"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the LeakyRelu, or what chooses between data and product."""
        slope = _slope(found)
        if not _is_one(slope):
            return rectified(new, found.x, slope)
        return new.LeakyRelu(found.x, alpha=float(slope.reshape(-1)[0]))


def _below_zero(op: Operators, x: Any) -> tuple[Call, ...]:
    return op.Min(x, 0.0), op.Clip(x, -np.inf, 0.0), op.Clip(x, min=-np.inf, max=0.0)


def _slope(found: Match) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = found.slope.values
    return -values if "turned" in found.values else values


def _is_one(slope: npt.NDArray[Any]) -> bool:
    return bool(slope.size and (slope == slope.reshape(-1)[0]).all())


def _fits(slope: tuple[int, ...], data: Any) -> bool:
    """Whether a slope is broadcast to the data, and not the data to the slope."""
    return all(one in (1, size) for one, size in zip(slope[::-1], list(data)[::-1], strict=False))
