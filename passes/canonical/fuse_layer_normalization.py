"""Recognise layer normalization, written with means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.normalizations import normalization_obstacle

_FIRST_OPSET = 17


class FuseLayerNormalization(RewriteRule):
    """Means, squares and a root become LayerNormalization, or before opset 17 the spelling that runtimes know.

    That is ``(x - mean) / sqrt(mean((x - mean) ** 2) + epsilon)`` with Sub, Pow and Div. Only the last axis is looked
    at. A scale and a shift behind it are `FoldAffineIntoNormalization`'s, and a reciprocal is `DivideBySquareRoot`'s.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both ways to square what is centred once or twice."""
        return tuple(_forms(op))

    def obstacle(self, found: Match) -> str:
        """Refuse other axes, what is not known well enough, and what is in its best form already."""
        return normalization_obstacle(found, "LayerNormalization", _FIRST_OPSET, found.mean, found.variance)

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one LayerNormalization without an effect of its scale, or the known spelling of it."""
        x = found.x
        if found.opset >= _FIRST_OPSET:
            epsilon = float(found.epsilon.values.item())
            return new.LayerNormalization(x, np.ones(x.shape[-1]), axis=-1, epsilon=epsilon)
        centred = new.Sub(x, new.like(found.mean, x))
        variance = new.like(found.variance, new.Pow(centred, 2.0))
        return new.Div(centred, new.Sqrt(new.Add(variance, found.epsilon)))


def _forms(op: Operators) -> Iterator[Call]:
    """Yield the forms; runtimes know those with Pow."""
    x = op.any("x")
    mean = op.ReduceMean(x, ..., name="mean", keepdims=1)
    centred, again = op.Sub(x, mean), op.Sub(x, mean)
    for source in (centred, again):
        for square in (op.Pow(source, 2.0), op.Mul(source, source, name="odd")):
            variance = op.ReduceMean(square, ..., name="variance", keepdims=1)
            yield op.Div(centred, op.Sqrt(op.Add(variance, op.scalar("epsilon"))))
