"""Means over a whole image, which exporters write in five ways."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from onnxq.ir import Constant
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule

# Kernels of ReduceMean add pairwise, those of GlobalAveragePool one by one, which is less exact for large images.
_LARGEST: Final = 64 * 64


_NOT_KNOWN: Final = "it is not known to keep batch and channels"


class UseGlobalAveragePool(RewriteRule):
    """A mean over the whole image is a GlobalAveragePool, and a Flatten behind it drops what is left of the image.

    ReduceMean and AveragePool become it, whose layout convolutions share and which computes with integers; Squeeze and
    Reshape behind it become the Flatten, which goes where the axes are restored at once.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for means, and for what drops axes behind them."""
        pooled = op.GlobalAveragePool(op.any("x"), name="pool", shared=True)
        flat = op.Flatten(op.any("x"), axis=1, shared=True)
        return (
            op.ReduceMean(op.any("x"), ..., name="mean"),
            op.AveragePool(op.any("x"), name="mean"),
            op.Squeeze(pooled, ..., name="drop"),
            op.Reshape(pooled, op.constant("target"), name="drop"),
            op.Reshape(flat, op.constant("target"), name="restore"),
            op.Unsqueeze(flat, ..., name="restore"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it is no mean over the whole image, or not known to be."""
        if found.x.shape is None or not 3 <= len(found.x.shape) <= 5:
            return "its data is not known to be an image"
        if "restore" in found.values:
            return _restore_obstacle(found)
        if found.root.op == "Reshape":
            return _reshape_obstacle(found)
        if found.root.op == "Squeeze":
            return _squeeze_obstacle(found)
        if found.x.dtype not in (np.float32, np.float16):
            return "its data is not known to be of single or half precision"
        if found.root.op == "AveragePool":
            return _window_obstacle(found)
        return _axes_obstacle(found) or _size_obstacle(found.x.shape)

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise, as means do."""
        return found.root.op in ("ReduceMean", "AveragePool")

    def replacement(self, new: New, found: Match) -> Any:
        """Make the GlobalAveragePool, or the Flatten behind it."""
        if "restore" in found.values:
            return found.x
        if found.root.op in ("Squeeze", "Reshape"):
            return new.Flatten(found.pool.outputs[0], axis=1)
        pooled = new.GlobalAveragePool(found.x)
        keeps = found.root.op == "AveragePool" or found.root.attrs.get("keepdims", 1)
        return pooled if keeps else new.Flatten(pooled, axis=1)


def _axes(found: Match) -> list[int] | None:
    """Return the axes of a ReduceMean or Squeeze, counted from the front; None where they are computed or not given."""
    given = found.root.attrs.get("axes")
    if len(found.root.inputs) > 1 and found.root.inputs[1].name:
        tensor = found.root.inputs[1]
        given = tensor.values.reshape(-1) if isinstance(tensor, Constant) and tensor.input_source is None else None
    return None if given is None else sorted({int(axis) % len(found.x.shape) for axis in given})


def _axes_obstacle(found: Match) -> str:
    if found.root.op == "ReduceMean" and len(found.x.shape) == 3:
        return "its data may be a sequence"
    whole = _axes(found) == list(range(2, len(found.x.shape)))
    return "" if whole else "it is not known to be over all axes of an image and no other"


def _size_obstacle(shape: Sequence[Any]) -> str:
    if not all(isinstance(size, int) for size in shape[2:]):
        return "the size of its image is not known"
    # A mean over channels that are not there is empty, and onnxruntime pools none.
    if not isinstance(shape[1], int):
        return "the number of its channels is not known"
    if not prod(shape[1:]):
        return "its image is empty"
    return "" if prod(shape[2:]) <= _LARGEST else "its image is large, and its sum would be less exact"


def _squeeze_obstacle(found: Match) -> str:
    if _axes(found) is None and len(found.root.inputs) < 2 and "axes" not in found.root.attrs:
        return "" if all(isinstance(size, int) and size != 1 for size in found.x.shape[:2]) else "it may drop more axes"
    return _axes_obstacle(found)


def _window_obstacle(found: Match) -> str:
    attributes = found.root.attrs
    if any(attributes.get("pads", ())) or attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "it pads"
    if any(step != 1 for step in attributes.get("dilations", ())):
        return "it skips elements"
    whole = list(attributes.get("kernel_shape", ())) == list(found.x.shape[2:]) and 0 not in found.x.shape
    return "" if whole else "its window is not known to be the whole image"


def _restore_obstacle(found: Match) -> str:
    if [producer.op for producer in found.x.inputs] != ["GlobalAveragePool"]:
        return "it restores the axes of something else"
    if found.root.op == "Unsqueeze":
        return _axes_obstacle(found)
    image = [1] * (len(found.x.shape) - 2)
    return _target_obstacle(found, image)


def _reshape_obstacle(found: Match) -> str:
    return _target_obstacle(found, [])


def _target_obstacle(found: Match, behind: Sequence[int]) -> str:
    """Return why a Reshape is not known to make batch, channels and the given sizes."""
    target, (batch, channels) = found.target.values.tolist(), found.x.shape[:2]
    empties = 0 in target and found.root.attrs.get("allowzero", 0)
    if len(target) < 2 or target[2:] != list(behind) or empties:
        return "it does more than dropping or restoring axes"
    keeps_batch = target[0] == 0 or (isinstance(batch, int) and batch == target[0] != 0)
    keeps_channels = target[1] == 0 or (isinstance(channels, int) and channels == target[1] != 0)
    rest = target[1] == -1 if keeps_batch else target[0] == -1
    return "" if (keeps_batch or keeps_channels) and (rest or (keeps_batch and keeps_channels)) else _NOT_KNOWN
