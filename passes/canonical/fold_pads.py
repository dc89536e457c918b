"""Padding in front of convolutions and pooling, as exporters of "same" padding write it."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from onnxq.ir import Constant, Node, Tensor
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule

Pads: TypeAlias = "list[tuple[int, int]]"
"""Elements before and after, for each axis."""

_NEVER_NEGATIVE: Final = frozenset(
    {"Abs", "Exp", "HardSigmoid", "ReduceL1", "ReduceL2", "Relu", "Sigmoid", "Softmax", "Softplus", "Sqrt"}
)
_KEEPING_SIGN: Final = frozenset(
    {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Identity", "MaxPool", "Reshape", "Slice", "Transpose"}
)
_MOST_FOLLOWED: Final = 16


class FoldPads(RewriteRule):
    """Padding in front of a convolution or pooling becomes its own; padding by nothing goes.

    Only zeros around the image fold: a mean must count them, and for a maximum nothing may lie below them (or they are
    minus infinity). What is padded in front of a ConvTranspose is cropped less behind it.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for a Pad that feeds one of the operators, and for any Pad."""
        padded = op.Pad(op.any("x"), ..., name="pad", shared=True)
        return (
            op.Conv(padded, op.any("w"), op.optional("b"), name="window"),
            op.ConvTranspose(padded, op.any("w"), op.optional("b"), name="window"),
            op.AveragePool(padded, name="window"),
            op.MaxPool(padded, name="window"),
            op.Pad(op.any("x"), ..., name="pad"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why the padding stays."""
        pads = _pads_of(found.pad, _rank(found))
        if isinstance(pads, str):
            return pads
        if found.root is found.pad:
            return "it pads something" if any(map(any, pads)) else ""
        if any(map(any, pads[:2])):
            return "it pads the batch or the channels"
        if min(map(min, pads)) < 0:
            return "it crops"
        window = found.window
        if _text(window.attrs.get("auto_pad", "NOTSET")) not in ("NOTSET", "VALID"):
            return f"{window.name} pads by itself, by a size that is not known"
        if window.op == "MaxPool" and _value_of(found.pad) == -np.inf:
            return _pooling_obstacle(found, pads)
        if _value_of(found.pad) != 0:
            return "it does not pad with zeros"
        if window.op == "ConvTranspose":
            return _cropping_obstacle(window, pads)
        return _pooling_obstacle(found, pads) if window.op.endswith("Pool") else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the operator with pads of its own."""
        if found.root is found.pad:
            return found.x
        window, pads = found.window, _pads_of(found.pad, _rank(found))
        assert not isinstance(pads, str), "looked at before"
        own = _own_pads(window, len(pads) - 2)
        steps = [1] * len(own)
        if window.op == "ConvTranspose":
            steps = [-step for step in window.attrs.get("strides", steps)]
        sums = [
            (first + step * before, last + step * after)
            for (first, last), step, (before, after) in zip(own, steps, pads[2:], strict=True)
        ]
        counted = {"count_include_pad": 1} if window.op == "AveragePool" else {}
        flat = [before for before, _ in sums] + [after for _, after in sums]
        return new.like(window, found.x, *window.inputs[1:], pads=flat, auto_pad=None, **counted)


def _rank(found: Match) -> int | None:
    """Return the rank of what is padded, as far as it is known."""
    for tensor in (found.x, found.pad.outputs[0], found.values.get("w")):
        if tensor is not None and tensor.shape is not None:
            return len(tensor.shape)
    kernel = found.root.attrs.get("kernel_shape")
    return None if kernel is None else len(kernel) + 2


def _pads_of(pad: Node, rank: int | None) -> Pads | str:
    """Return what a Pad adds along each axis, or why that is not known or no constant is added."""
    if _text(pad.attrs.get("mode", "constant")) != "constant":
        return f"it pads by mode {_text(pad.attrs['mode'])}"
    flat = _numbers(pad, 1, pad.attrs.get("pads", pad.attrs.get("paddings")))
    axes = _numbers(pad, 3, range(len(flat or ()) // 2))
    if flat is None or axes is None or _value_of(pad) is None:
        return "its pads are computed"
    if len(pad.inputs) < 4:
        rank = len(axes)
    if rank is None or len(flat) != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        return "its pads do not fit its data, whose rank must be known"
    pads = [(0, 0)] * rank
    for axis, before, after in zip(axes, flat, flat[len(axes) :], strict=False):
        pads[axis] = (before, after)
    return pads


def _value_of(pad: Node) -> float | None:
    value = _numbers(pad, 2, [pad.attrs.get("value", 0.0)])
    return value[0] if value is not None and len(value) == 1 else None


def _numbers(node: Node, index: int, default: Any) -> list[Any] | None:
    """Return what a constant input holds, the default where it is left out, or None where it is computed."""
    tensor = node.inputs[index] if index < len(node.inputs) and node.inputs[index].name else None
    if tensor is None:
        return None if default is None else list(default)
    fixed = isinstance(tensor, Constant) and tensor.input_source is None
    return list(tensor.values.reshape(-1).tolist()) if fixed else None


def _own_pads(window: Node, axes: int) -> Pads:
    valid = _text(window.attrs.get("auto_pad", "NOTSET")) == "VALID"
    flat = [0] * 2 * axes if valid else list(window.attrs.get("pads", [0] * 2 * axes))
    return list(zip(flat[:axes], flat[axes:], strict=True))


def _cropping_obstacle(window: Node, pads: Pads) -> str:
    if window.attrs.get("output_shape"):
        return f"{window.name} fixes the shape of its output"
    own = _own_pads(window, len(pads) - 2)
    strides = window.attrs.get("strides", [1] * len(own))
    enough = all(
        step * before <= first and step * after <= last
        for (first, last), step, (before, after) in zip(own, strides, pads[2:], strict=True)
    )
    return "" if enough else f"{window.name} does not crop what it would add"


def _pooling_obstacle(found: Match, pads: Pads) -> str:
    window, name = found.window, found.window.name
    kernel = window.attrs.get("kernel_shape", ())
    if len(kernel) != len(pads) - 2:
        return f"{name} has no kernel of its rank"
    if not all(isinstance(length, int) and length > 0 for length in (found.x.shape or (None,))[2:]):
        return f"its data may be empty, which {name} only takes padded"
    own = _own_pads(window, len(kernel))
    if any(
        first + before >= size or last + after >= size
        for (first, last), size, (before, after) in zip(own, kernel, pads[2:], strict=True)
    ):
        return f"{name} cannot pad as much as its kernel is wide"
    if window.attrs.get("ceil_mode", 0) or any(step != 1 for step in window.attrs.get("dilations", ())):
        return f"{name} rounds up or skips elements"
    if window.op == "AveragePool":
        uncounted = any(map(any, own)) and not window.attrs.get("count_include_pad", 0)
        if uncounted:
            return f"{name} pads too, and does not count that"
        return "" if found.opset >= 7 else "means of this opset cannot count zeros"
    if any(output.name for output in window.outputs[1:]):
        return f"{name} gives positions in the padded data"
    negative = _value_of(found.pad) == 0 and not _is_never_negative(found.x)
    return "its zeros may be the largest of a window" if negative else ""


def _is_never_negative(tensor: Tensor) -> bool:
    for _ in range(_MOST_FOLLOWED):
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is None or producer.domain or not producer.inputs:
            return False
        if producer.op in _NEVER_NEGATIVE:
            return True
        if producer.op == "Clip":
            lowest = _numbers(producer, 1, [producer.attrs.get("min", -np.inf)])
            return lowest is not None and lowest[0] >= 0
        if producer.op not in _KEEPING_SIGN:
            return False
        tensor = producer.inputs[0]
    return False


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
