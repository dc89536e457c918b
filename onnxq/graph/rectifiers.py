"""Rectifiers in the form that runs fastest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.graph.elements import Tensor
from onnxq.graph.replacements import New

_MAX_BROADCASTS = 8
_CLIP_TAKES_LIMITS = 11


def rectified(new: New, data: Tensor, slope: NDArray[np.floating[Any]]) -> Any:
    """Return data with a slope of its own in each channel below zero: PRelu, for which it takes onnxruntime longer.

    Args:
        new: makes the nodes.
        data: floats.
        slope: what data is multiplied by where it is negative.
    """
    if (slope <= 1).all():
        return new.Max(data, new.Mul(data, slope))
    if (slope >= 1).all():
        return new.Min(data, new.Mul(data, slope))
    return new.Add(data, new.Mul(new.Clip(data, None, 0.0), slope - 1))


def first_opset(slope: NDArray[np.floating[Any]]) -> int:
    """Return the opset from which on `rectified` can be written.

    >>> first_opset(np.array([0.1, 0.2])), first_opset(np.array([0.1, 2.0]))
    (8, 11)
    """
    return _MAX_BROADCASTS if (slope <= 1).all() or (slope >= 1).all() else _CLIP_TAKES_LIMITS
