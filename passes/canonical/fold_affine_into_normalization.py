"""Let a normalization scale and shift by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.patterns import Capture
from onnxq.rewrite.ranks import rank
from onnxq.rewrite.soundness import stored


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
