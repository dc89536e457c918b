"""Recognise normalization by the root of the mean square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.normalizations import normalization_obstacle

_FIRST_OPSET = 23


class FuseRmsNormalization(RewriteRule):
    """A mean of squares and a root become RMSNormalization, or before opset 23 the spelling that runtimes know.

    That is ``x / sqrt(mean(x ** 2) + epsilon)`` with Pow and Div. Only the last axis is looked at. A scale behind it is
    `FoldAffineIntoNormalization`'s, and a reciprocal is `DivideBySquareRoot`'s.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both ways to square."""
        return tuple(_forms(op))

    def obstacle(self, found: Match) -> str:
        """Refuse other axes, what is not known well enough, and what is in its best form already."""
        return normalization_obstacle(found, "RMSNormalization", _FIRST_OPSET, found.mean)

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one RMSNormalization without an effect of its scale, or the known spelling of it."""
        x = found.x
        if found.opset >= _FIRST_OPSET:
            return new.RMSNormalization(x, np.ones(x.shape[-1]), axis=-1, epsilon=float(found.epsilon.values.item()))
        mean = new.like(found.mean, new.Pow(x, 2.0), *found.mean.inputs[1:])
        return new.Div(x, new.Sqrt(new.Add(mean, found.epsilon)))


def _forms(op: Operators) -> Iterator[Call]:
    """Yield the forms; runtimes know the first."""
    x = op.any("x")
    for square in (op.Pow(x, 2.0), op.Mul(x, x, name="odd")):
        mean = op.ReduceMean(square, ..., name="mean", keepdims=1)
        yield op.Div(x, op.Sqrt(op.Add(mean, op.scalar("epsilon"))))
