"""Padding that an operator works out from the size of its data, as numbers where that size is known."""

from __future__ import annotations

from typing import Any

from onnxq.rewrite import Call, Match, New, Operators, RewriteRule


class ResolveAutomaticPadding(RewriteRule):
    """The attribute auto_pad of a convolution or pooling becomes the pads that it means."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each operator with each way to pad."""
        return tuple(
            getattr(op, name)(op.any("x"), ..., name="window", auto_pad=way)
            for name in ("Conv", "AveragePool", "MaxPool")
            for way in ("SAME_UPPER", "SAME_LOWER", "VALID")
        )

    def obstacle(self, found: Match) -> str:
        """Return why the pads are not known."""
        if found.window.attrs.get("ceil_mode", 0):
            return "it rounds up"
        # Of pooling onnxruntime then pads as if there were none, and a convolution of these it refuses.
        has_gaps = any(step != 1 for step in found.window.attrs.get("dilations", ()))
        if has_gaps and found.window.attrs["auto_pad"] != "VALID":
            return "its window has gaps"
        return "" if _pads(found) is not None else "the size of its data or kernel is not known"

    def replacement(self, new: New, found: Match) -> Any:
        """Make the same operator with pads."""
        return new.like(found.window, *found.window.inputs, auto_pad=None, pads=_pads(found))


def _pads(found: Match) -> list[int] | None:
    """Return what comes before and after the data along each axis, the numbers before first."""
    window, data = found.window, found.x.shape
    way = window.attrs["auto_pad"]
    kernel = window.attrs.get("kernel_shape") or (
        window.inputs[1].shape[2:] if window.op == "Conv" and window.inputs[1].shape is not None else None
    )
    if kernel is None:
        return None
    if way == "VALID":
        return [0] * 2 * len(kernel)
    sizes = () if data is None else (*data[2:], *kernel)
    if len(sizes) != 2 * len(kernel) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    strides = window.attrs.get("strides", [1] * len(kernel))
    before, after = [], []
    for size, wide, stride in zip(data[2:], kernel, strides, strict=True):
        missing = max(0, (-(-size // stride) - 1) * stride + wide - size)
        smaller, larger = missing // 2, missing - missing // 2
        before.append(smaller if way == "SAME_UPPER" else larger)
        after.append(larger if way == "SAME_UPPER" else smaller)
    return [*before, *after]
