"""Normalizations: their formulas become one node, with scale and bias folded in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.ir.elements import Node
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RoundingRule
from onnxq.rewrite.soundness import may_widen, rank, reduces_last_axis, stored


def normalization_obstacle(match: Match, operator: str, first_opset: int, *means: Node) -> str:
    """Return why a match that normalizes ``x`` is skipped, or an empty string.

    Args:
        match: the match. A node named ``is_noncanonical`` marks a variant that runtimes do not match.
        operator: the ONNX operator for it.
        first_opset: first opset with that operator.
        means: nodes that must reduce their data along the last axis.
    """
    if not all(map(reduces_last_axis, means)):
        return "it normalizes along another axis than the last"
    if match.opset < first_opset and "is_noncanonical" not in match.values:
        return f"ONNX has {operator} from opset {first_opset} on"
    if match.x.dtype is None or not match.x.shape or not isinstance(match.x.shape[-1], int) or not match.x.shape[-1]:
        return "the type or length of its normalized axis is unknown"
    if np.dtype(match.x.dtype).itemsize > 4:
        return f"{np.dtype(match.x.dtype)} would be normalized with float32"
    return "its constants may have more dimensions than its data" if may_widen(match.nodes, match.x) else ""


class DivideBySquareRoot(RoundingRule):
    """``Mul(Reciprocal(Sqrt(v)), x) -> Div(x, Sqrt(v))``.

    Replace Mul by the reciprocal of a square root by Div, which the rules for normalizations match.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        root = op.Sqrt(op.any("square"))
        return op.Mul(op.Reciprocal(root), op.any("x")), op.Mul(op.Div(1.0, root), op.any("x"))

    def check(self, match: Match) -> str:
        return "its constant may have more dimensions than its data" if may_widen(match.nodes[1:], match.square) else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.Div(match.x, new.Sqrt(match.square))


_LAYER_NORMALIZATION_OPSET = 17


class FuseLayerNormalization(RoundingRule):
    """``Div(x - mean, Sqrt(ReduceMean((x - mean)**2) + epsilon)) -> LayerNormalization(x, 1)``.

    Replace the formula by LayerNormalization, or before opset 17 by the variant that runtimes match.

    The variant has Sub, Pow and Div. Not for other axes than the last, and not for float64.
    `FoldAffineIntoNormalization` folds scale and bias, and `DivideBySquareRoot` replaces a reciprocal.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return tuple(_layer_normalizations(op))

    def check(self, match: Match) -> str:
        return normalization_obstacle(
            match, "LayerNormalization", _LAYER_NORMALIZATION_OPSET, match.mean, match.variance
        )

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        x = match.x
        if match.opset >= _LAYER_NORMALIZATION_OPSET:
            epsilon = float(match.epsilon.values.item())
            return new.LayerNormalization(x, np.ones(x.shape[-1]), axis=-1, epsilon=epsilon)
        centred = new.Sub(x, new.like(match.mean, x))
        variance = new.like(match.variance, new.Pow(centred, 2.0))
        return new.Div(centred, new.Sqrt(new.Add(variance, match.epsilon)))


def _layer_normalizations(op: OpsetPatternBuilder) -> Iterator[NodePattern]:
    """Variants; runtimes match those with Pow."""
    x = op.any("x")
    mean = op.ReduceMean(x, ..., name="mean", keepdims=1)
    centred, again = op.Sub(x, mean), op.Sub(x, mean)
    for source in (centred, again):
        for square in (op.Pow(source, 2.0), op.Mul(source, source, name="is_noncanonical")):
            variance = op.ReduceMean(square, ..., name="variance", keepdims=1)
            yield op.Div(centred, op.Sqrt(op.Add(variance, op.scalar("epsilon"))))


_RMS_NORMALIZATION_OPSET = 23


class FuseRmsNormalization(RoundingRule):
    """``Div(x, Sqrt(ReduceMean(x**2) + epsilon)) -> RMSNormalization(x, 1)``.

    Replace the formula by RMSNormalization, or before opset 23 by the variant that runtimes match.

    The variant has Pow and Div. Not for other axes than the last, and not for float64. `FoldAffineIntoNormalization`
    folds a scale, and `DivideBySquareRoot` replaces a reciprocal.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return tuple(_rms_normalizations(op))

    def check(self, match: Match) -> str:
        return normalization_obstacle(match, "RMSNormalization", _RMS_NORMALIZATION_OPSET, match.mean)

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        x = match.x
        if match.opset >= _RMS_NORMALIZATION_OPSET:
            return new.RMSNormalization(x, np.ones(x.shape[-1]), axis=-1, epsilon=float(match.epsilon.values.item()))
        mean = new.like(match.mean, new.Pow(x, 2.0), *match.mean.inputs[1:])
        return new.Div(x, new.Sqrt(new.Add(mean, match.epsilon)))


def _rms_normalizations(op: OpsetPatternBuilder) -> Iterator[NodePattern]:
    """Variants; runtimes match the first."""
    x = op.any("x")
    for square in (op.Pow(x, 2.0), op.Mul(x, x, name="is_noncanonical")):
        mean = op.ReduceMean(square, ..., name="mean", keepdims=1)
        yield op.Div(x, op.Sqrt(op.Add(mean, op.scalar("epsilon"))))


# Scale and bias -------------------------------------------------------------------------------------------------------


class FoldAffineIntoNormalization(RoundingRule):
    """``Add(Mul(LayerNormalization(x, s, b), k), c) -> LayerNormalization(x, s * k, b * k + c)``.

    Fold Mul and Add by constants into the scale and bias of LayerNormalization or RMSNormalization.

    Not if the constant varies along another axis than the last, or a result may leave the range of its type.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, scale, operand = op.any("x"), op.constant("scale"), op.constant("operand")
        layer = op.LayerNormalization(x, scale, op.optional("bias", constant=True), name="norm")
        return (
            op.Mul(layer, operand),
            op.Add(layer, operand),
            op.Mul(op.RMSNormalization(x, scale, name="norm"), operand),
        )

    def check(self, match: Match) -> str:
        dimensions = rank(match.norm.outputs[0])
        length = match.scale.shape[-1] if len(match.scale.shape) == 1 else 0
        shape = match.operand.shape
        if match.operand.dtype != match.scale.dtype or not length:
            return "its constant is of another type, or its normalization spans several axes"
        if len(shape) > (dimensions or 0) and shape:
            return "its constant has more dimensions than its data, as far as these are known"
        if any(extent != 1 for extent in shape[:-1]) or shape[-1:] not in ((), (1,), (length,)):
            return "its constant varies along another axis than the last"
        spans = match.norm.attrs.get("axis", -1) not in (-1, (dimensions or 0) - 1)
        return "its normalization spans several axes" if spans else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        parts = _folded(match)
        if parts is None:
            return "its scale or bias would leave the range of its type"
        parameters = [new.constant(part, name) for part, name in zip(parts, ("scale", "bias"), strict=False)]
        return new.call("", match.norm.op, match.x, *parameters, **match.norm.attrs)


@np.errstate(over="ignore", invalid="ignore")
def _folded(match: Match) -> list[npt.NDArray[Any]] | None:
    """Return the scale, and the bias if there is one; None if they or a result may not be finite and normal."""
    dtype, length = match.scale.dtype, match.scale.shape[0]
    operand = np.broadcast_to(match.operand.values.astype(np.float64).reshape(-1), length)
    scale, old_bias = match.scale.values.astype(np.float64), match.values.get("bias")
    bias = old_bias.values.astype(np.float64) if old_bias is not None else np.zeros(length)
    if match.root.op == "Mul":
        parts = [stored(scale * operand, dtype, scale, operand), stored(bias * operand, dtype, bias, operand)]
    else:
        parts = [stored(scale, dtype), stored(bias + operand, dtype)]
    folded = [part for part in parts if part is not None]
    if len(folded) < len(parts):
        return None
    # A normalized vector of n values has no value above sqrt(n).
    most = np.abs(folded[0].astype(np.float64)) * math.sqrt(length) + np.abs(folded[1].astype(np.float64))
    if stored(most, dtype) is None:
        return None
    return folded if old_bias is not None or match.root.op == "Add" else folded[:1]
