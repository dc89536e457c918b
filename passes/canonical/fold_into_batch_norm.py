"""Factors and shifts of channels behind a BatchNormalization that no product takes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxq.graph import Call, Match, New, Operators, RewriteRule

Doubles: TypeAlias = npt.NDArray[np.float64]


class FoldIntoBatchNorm(RewriteRule):
    """What scales and shifts channels behind a BatchNormalization becomes a part of its scale and bias."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for Mul, Add and BatchNormalization by constants behind one."""
        norm = op.BatchNormalization(
            op.any("x"), op.constant("scale"), op.constant("bias"), op.any("mean"), op.any("variance"), name="norm"
        )
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
        nodes = (found.norm, found.values.get("second", found.norm))
        if any(node.attrs.get("training_mode", 0) or node.outputs[1:] for node in nodes):
            return "it is in training mode"
        if found.x.dtype is None or found.x.shape is None or len(found.x.shape) < 2:
            return "the type of its data is not known"
        affine = _affine(found)
        if isinstance(affine, str):
            return affine
        return "" if all(np.isfinite(array).all() for array in _folded(found, *affine)) else "it would not be finite"

    def replacement(self, new: New, found: Match) -> Any:
        """Make one BatchNormalization."""
        affine = _affine(found)
        assert not isinstance(affine, str), "looked at before"
        scale, bias = _folded(found, *affine)
        operands = new.constant(scale, "scale"), new.constant(bias, "bias")
        return new.like(found.norm, found.x, *operands, found.mean, found.variance)


def _affine(found: Match) -> tuple[Doubles, Doubles] | str:
    """Return factor and shift of each channel, or why they are not known."""
    if "second" in found.values:
        scale, bias, mean, variance = (np.asarray(tensor.values, np.float64) for tensor in found.second.inputs[1:5])
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = scale / np.sqrt(variance + float(found.second.attrs.get("epsilon", 1e-5)))
            return factor, bias - mean * factor
    operand = found.values["factor" if found.root.op == "Mul" else "shift"]
    rank, channels = len(found.x.shape), found.scale.shape[0]
    wide = [axis - len(operand.shape) for axis, size in enumerate(operand.shape) if size != 1]
    if len(operand.shape) > rank or any(axis != 1 - rank for axis in wide):
        return "its constant does not vary along the channels alone"
    values = np.asarray(operand.values, np.float64).reshape(-1)
    if values.size not in (1, channels):
        return "it has another number of channels"
    return (values, np.zeros(1)) if found.root.op == "Mul" else (np.ones(1), values)


def _folded(found: Match, factor: Doubles, shift: Doubles) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    with np.errstate(over="ignore", invalid="ignore"):
        scale, bias = (np.asarray(tensor.values, np.float64) for tensor in (found.scale, found.bias))
        return (scale * factor).astype(found.scale.dtype), (bias * factor + shift).astype(found.bias.dtype)
