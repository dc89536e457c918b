"""Factors and shifts of channels behind a BatchNormalization that no product takes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.soundness import affine_of, stays_in_range, stored

Doubles: TypeAlias = npt.NDArray[np.float64]
Folded: TypeAlias = "tuple[npt.NDArray[Any], npt.NDArray[Any]]"


class FoldIntoBatchNorm(RewriteRule):
    """What scales and shifts channels behind a BatchNormalization becomes a part of its scale and bias."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for Mul, Add and BatchNormalization by constants behind one."""
        names = ("scale", "bias", "mean", "variance")
        norm = op.BatchNormalization(op.any("x"), *map(op.constant, names), name="norm")
        again = [op.constant(name) for name in ("scale2", "bias2", "mean2", "variance2")]
        return (
            op.Mul(norm, op.constant("factor")),
            op.Add(norm, op.constant("shift")),
            op.BatchNormalization(norm, *again, name="second"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        if found.opset < 7:
            return "operands of this opset lie along an axis"
        if isinstance(own := affine_of(found.norm), str):
            return own
        if found.x.dtype is None or found.x.shape is None or len(found.x.shape) < 2:
            return "the type of its data is not known"
        affine = _affine(found)
        if isinstance(affine, str):
            return affine
        if not stays_in_range(affine[0], found.scale.dtype):
            return "its factors are too far from 1"
        # Runtimes divide the scale by the deviation of its channel.
        whole = stored(own[0] * affine[0], found.scale.dtype) is not None
        return "" if whole and _folded(found, *affine) is not None else "its scale or bias would leave the range"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make one BatchNormalization."""
        affine = _affine(found)
        assert not isinstance(affine, str), "looked at before"
        folded = _folded(found, *affine)
        assert folded is not None, "looked at before"
        operands = new.constant(folded[0], "scale"), new.constant(folded[1], "bias")
        return new.like(found.norm, found.x, *operands, found.mean, found.variance)


def _affine(found: Match) -> tuple[Doubles, Doubles] | str:
    """Return factor and shift of each channel, or why they are not known."""
    rank, channels = len(found.x.shape), found.scale.shape[0]
    if "second" in found.values:
        affine = affine_of(found.second)
        same = isinstance(affine, str) or affine[0].size == channels
        return affine if same else "it has another number of channels"
    operand = found.values["factor" if found.root.op == "Mul" else "shift"]
    wide = [axis - len(operand.shape) for axis, size in enumerate(operand.shape) if size != 1]
    if len(operand.shape) > rank or any(axis != 1 - rank for axis in wide):
        return "its constant does not vary along the channels alone"
    values = np.asarray(operand.values, np.float64).reshape(-1)
    if values.size not in (1, channels):
        return "it has another number of channels"
    return (values, np.zeros(1)) if found.root.op == "Mul" else (np.ones(1), values)


@np.errstate(over="ignore", invalid="ignore")
def _folded(found: Match, factor: Doubles, shift: Doubles) -> Folded | None:
    """Return the new scale and bias, or None if their type cannot hold them."""
    scale, bias = (np.asarray(tensor.values, np.float64) for tensor in (found.scale, found.bias))
    made = stored(scale * factor, found.scale.dtype, scale, factor)
    factors = () if shift.any() else (bias, factor)
    added = stored(np.broadcast_to(bias * factor + shift, bias.shape), found.bias.dtype, *factors)
    return None if made is None or added is None else (made, added)
