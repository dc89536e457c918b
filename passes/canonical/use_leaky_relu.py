"""Leaky rectifiers, which exporters write as formulas of Relu, as PRelu of one number, or as a maximum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.graph import Call, Match, New, Operators, RewriteRule


class UseLeakyRelu(RewriteRule):
    """Rectifiers with a slope below zero are LeakyRelu, or PRelu where each channel has its own."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each form."""
        x, slope = op.any("x"), op.constant("slope")
        negative = op.Relu(op.Neg(x))
        return (
            op.PRelu(x, slope),
            op.Add(op.Relu(x), op.Mul(negative, slope)),
            op.Sub(op.Relu(x), op.Mul(negative, slope)),
            op.Max(x, op.Mul(x, op.scalar("slope"))),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        dtype = np.dtype(found.x.dtype or "O")
        if found.opset < 7 or dtype.kind != "f" or found.x.shape is None:
            return "its data is not known to be floating point, or of unknown rank"
        slope = _slope(found)
        if slope.ndim > len(found.x.shape):
            return "its slope may raise the rank"
        if found.root.op == "PRelu" and not _is_one(slope):
            return "each channel has a slope of its own"
        if found.root.op == "Max" and not 0 <= slope.item() <= 1:
            return "its slope is not between 0 and 1"
        if _is_one(slope):
            return ""
        fits = _fits(slope.shape, found.x.shape)
        return "" if fits else "its slope is not known to fit its data"

    def replacement(self, new: New, found: Match) -> Any:
        """Make the LeakyRelu or PRelu."""
        slope = _slope(found)
        if not _is_one(slope):
            return new.PRelu(found.x, slope)
        alpha = float(slope.reshape(-1)[0])
        return new.LeakyRelu(found.x, alpha=alpha) if alpha else new.Relu(found.x)


def _slope(found: Match) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = found.slope.values
    return -values if found.root.op == "Add" else values


def _is_one(slope: npt.NDArray[Any]) -> bool:
    return bool(slope.size and (slope == slope.reshape(-1)[0]).all())


def _fits(slope: tuple[int, ...], data: Any) -> bool:
    """Whether a slope is broadcast to the data, and not the data to the slope."""
    return all(one in (1, size) for one, size in zip(slope[::-1], list(data)[::-1], strict=False))
