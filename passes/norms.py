"""Normalizations that are written out become one node, with their scale and bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.ir.elements import Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.patterns import Capture
from onnxq.rewrite.soundness import may_widen, rank, reduces_last_axis, stored


def normalization_obstacle(found: Match, operator: str, first_opset: int, *means: Node) -> str:
    """Say why a match that normalizes ``x`` keeps its form; an empty string where it need not.

    Args:
        found: the match. A value named ``odd`` says that it is not in the form that runtimes know.
        operator: what ONNX has for it.
        first_opset: from which on it does.
        means: nodes that have to reduce their data along the last axis.
    """
    if not all(map(reduces_last_axis, means)):
        return "it normalizes along another axis than the last"
    if found.opset < first_opset and "odd" not in found.values:
        return f"ONNX has {operator} from opset {first_opset} on"
    if found.x.dtype is None or not found.x.shape or not isinstance(found.x.shape[-1], int) or not found.x.shape[-1]:
        return "type or length of what it normalizes is unknown"
    if np.dtype(found.x.dtype).itemsize > 4:
        return f"{np.dtype(found.x.dtype)} would be normalized with float32"
    return "its constants may have more dimensions than its data" if may_widen(found.nodes, found.x) else ""


class DivideBySquareRoot(RewriteRule):
    """Mul by the reciprocal of a square root becomes Div by the root, as normalizations are looked for."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return the reciprocal, also spelled as Div."""
        root = op.Sqrt(op.any("square"))
        return op.Mul(op.Reciprocal(root), op.any("x")), op.Mul(op.Div(1.0, root), op.any("x"))

    def obstacle(self, found: Match) -> str:
        """Refuse a one of more dimensions than what it is divided by."""
        wide = may_widen(found.nodes, found.square) and found.nodes[1].op == "Div" and found.nodes[1].inputs[0].shape
        return "its constant may have more dimensions than its data" if wide else ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the root and the division."""
        return new.Div(found.x, new.Sqrt(found.square))


_LAYER_NORMALIZATION_OPSET = 17


class FuseLayerNormalization(RewriteRule):
    """Means, squares and a root become LayerNormalization, or before opset 17 the spelling that runtimes know.

    That is ``(x - mean) / sqrt(mean((x - mean) ** 2) + epsilon)`` with Sub, Pow and Div. Only the last axis is looked
    at. A scale and a shift behind it are `FoldAffineIntoNormalization`'s, and a reciprocal is `DivideBySquareRoot`'s.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both ways to square what is centred once or twice."""
        return tuple(_layer_normalizations(op))

    def obstacle(self, found: Match) -> str:
        """Refuse other axes, what is not known well enough, and what is in its best form already."""
        return normalization_obstacle(
            found, "LayerNormalization", _LAYER_NORMALIZATION_OPSET, found.mean, found.variance
        )

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one LayerNormalization without an effect of its scale, or the known spelling of it."""
        x = found.x
        if found.opset >= _LAYER_NORMALIZATION_OPSET:
            epsilon = float(found.epsilon.values.item())
            return new.LayerNormalization(x, np.ones(x.shape[-1]), axis=-1, epsilon=epsilon)
        centred = new.Sub(x, new.like(found.mean, x))
        variance = new.like(found.variance, new.Pow(centred, 2.0))
        return new.Div(centred, new.Sqrt(new.Add(variance, found.epsilon)))


def _layer_normalizations(op: Operators) -> Iterator[Call]:
    """Yield the forms; runtimes know those with Pow."""
    x = op.any("x")
    mean = op.ReduceMean(x, ..., name="mean", keepdims=1)
    centred, again = op.Sub(x, mean), op.Sub(x, mean)
    for source in (centred, again):
        for square in (op.Pow(source, 2.0), op.Mul(source, source, name="odd")):
            variance = op.ReduceMean(square, ..., name="variance", keepdims=1)
            yield op.Div(centred, op.Sqrt(op.Add(variance, op.scalar("epsilon"))))


_RMS_NORMALIZATION_OPSET = 23


class FuseRmsNormalization(RewriteRule):
    """A mean of squares and a root become RMSNormalization, or before opset 23 the spelling that runtimes know.

    That is ``x / sqrt(mean(x ** 2) + epsilon)`` with Pow and Div. Only the last axis is looked at. A scale behind it is
    `FoldAffineIntoNormalization`'s, and a reciprocal is `DivideBySquareRoot`'s.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both ways to square."""
        return tuple(_rms_normalizations(op))

    def obstacle(self, found: Match) -> str:
        """Refuse other axes, what is not known well enough, and what is in its best form already."""
        return normalization_obstacle(found, "RMSNormalization", _RMS_NORMALIZATION_OPSET, found.mean)

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one RMSNormalization without an effect of its scale, or the known spelling of it."""
        x = found.x
        if found.opset >= _RMS_NORMALIZATION_OPSET:
            return new.RMSNormalization(x, np.ones(x.shape[-1]), axis=-1, epsilon=float(found.epsilon.values.item()))
        mean = new.like(found.mean, new.Pow(x, 2.0), *found.mean.inputs[1:])
        return new.Div(x, new.Sqrt(new.Add(mean, found.epsilon)))


def _rms_normalizations(op: Operators) -> Iterator[Call]:
    """Yield the forms; runtimes know the first."""
    x = op.any("x")
    for square in (op.Pow(x, 2.0), op.Mul(x, x, name="odd")):
        mean = op.ReduceMean(square, ..., name="mean", keepdims=1)
        yield op.Div(x, op.Sqrt(op.Add(mean, op.scalar("epsilon"))))


# Scale and bias -------------------------------------------------------------------------------------------------------


class FoldAffineIntoNormalization(RewriteRule):
    """Mul and Add by constants behind LayerNormalization or RMSNormalization become its own scale and bias."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both operators behind both normalizations; RMSNormalization has no bias."""
        x, scale, operand = op.any("x"), op.constant("scale"), op.constant("operand")
        layer = op.LayerNormalization(x, scale, Capture("bias", constant=True, optional=True), name="norm")
        return (
            op.Mul(layer, operand),
            op.Add(layer, operand),
            op.Mul(op.RMSNormalization(x, scale, name="norm"), operand),
        )

    def obstacle(self, found: Match) -> str:
        """Refuse constants that vary along other axes or add some."""
        dimensions = rank(found.norm.outputs[0])
        length = found.scale.shape[-1] if len(found.scale.shape) == 1 else 0
        shape = found.operand.shape
        if found.operand.dtype != found.scale.dtype or not length:
            return "its constant is of another type, or its normalization spans several axes"
        if len(shape) > (dimensions or 0) and shape:
            return "its constant has more dimensions than its data, as far as these are known"
        if any(extent != 1 for extent in shape[:-1]) or shape[-1:] not in ((), (1,), (length,)):
            return "its constant varies along another axis than the last"
        if found.norm.attrs.get("axis", -1) not in (-1, (dimensions or 0) - 1):
            return "its normalization spans several axes"
        return "" if _folded(found) is not None else "its scale or bias would leave the range of its type"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the normalization with the scale and bias of both."""
        parts = _folded(found)
        assert parts is not None, "looked at before"
        made = [new.constant(part, name) for part, name in zip(parts, ("scale", "bias"), strict=False)]
        return new.call("", found.norm.op, found.x, *made, **found.norm.attrs)


@np.errstate(over="ignore", invalid="ignore")
def _folded(found: Match) -> list[npt.NDArray[Any]] | None:
    """Return the scale, and the bias if there is one; None if they or any result would not be finite and normal."""
    dtype, length = found.scale.dtype, found.scale.shape[0]
    operand = np.broadcast_to(found.operand.values.astype(np.float64).reshape(-1), length)
    scale, given = found.scale.values.astype(np.float64), found.values.get("bias")
    bias = given.values.astype(np.float64) if given is not None else np.zeros(length)
    if found.root.op == "Mul":
        parts = [stored(scale * operand, dtype, scale, operand), stored(bias * operand, dtype, bias, operand)]
    else:
        parts = [stored(scale, dtype), stored(bias + operand, dtype)]
    made = [part for part in parts if part is not None]
    if len(made) < len(parts):
        return None
    # No normalized value is larger than the root of their number.
    most = np.abs(made[0].astype(np.float64)) * math.sqrt(length) + np.abs(made[1].astype(np.float64))
    if stored(most, dtype) is None:
        return None
    return made if given is not None or found.root.op == "Add" else made[:1]
