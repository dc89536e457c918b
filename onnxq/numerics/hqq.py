"""HQQ: scales and zero points that ignore outliers.

After Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. HQQ minimizes the sum of
|w - s (q - z)| ** p, here with p = 1/2, which hardly counts the few large errors of clipping. Half-quadratic splitting
alternates between a generalized soft threshold, which gives the large errors e, and a fit of the rest, w - e. HQQ fits
a fractional zero point z at a given scale s. Here z is rounded in the end, so zero stays exact, and s is fitted too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import QuantParams, on_grid
from onnxq.numerics.blocks import Shape, whole_blocks
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.least_squares import PART, Singles, columns_of, fit_line, products_of
from onnxq.numerics.spec import QuantSpec

# Those of the paper's code.
_ITERATIONS: Final = 20
_BETA: Final = 10.0
_KAPPA: Final = 1.01


def half_quadratic(values: npt.NDArray[Any], initial: QuantParams, spec: QuantSpec, block: Shape) -> QuantParams:
    """Return scales and zero points of a smaller sum of the square roots of the errors, though not for every block.

    Args:
        values: finite float array.
        initial: scales and zero points of an affine format.
        spec: format and scales.
        block: extents of a block, one for each axis.
    """
    assert initial.zero_point is not None
    format, unit = format_named(spec.format), initial.effective_scale
    scale, zero_point = initial.scale.astype(np.float64), initial.zero_point.copy()
    room = np.empty(min(values.size, max(PART, math.prod(block))), np.float32)
    for place, own in whole_blocks(values.shape, block, PART):
        # The values are divided by the initial scale, so the fit does not depend on the size of the weight.
        columns = columns_of(values[place], unit[own], block, room)
        s, z = _solve(columns, zero_point[own].reshape(-1).astype(np.float32), format)
        scale[own] *= s.reshape(scale[own].shape)
        zero_point[own] = z.reshape(scale[own].shape).astype(format.dtype)
    return replace(initial, scale=on_grid(scale, spec), zero_point=zero_point)


def _solve(w: Singles, z: Singles, format: QuantDType) -> tuple[Singles, Singles]:
    """Return the scale and the zero point of each column of `w`."""
    s, beta = np.ones_like(z), _BETA
    scratch = np.empty((3, *w.shape), np.float32)
    for _ in range(_ITERATIONS):
        q, kept = _split(w, s, z, beta, format, scratch)
        s, offset = fit_line(kept, q, s)
        z = (z - offset).astype(np.float32)
        beta *= _KAPPA
    z = np.clip(np.rint(z), format.minimum, format.maximum).astype(np.float32)
    q, kept = _split(w, s, z, beta, format, scratch)
    products = products_of(q, kept)
    return np.where(products > 0, products / np.maximum(products_of(q, q), 1), s), z


def _split(
    w: Singles, s: Singles, z: Singles, beta: float, format: QuantDType, scratch: Singles
) -> tuple[Singles, Singles]:
    """Return the integers of `w` less their zero points, and `w` without its large errors."""
    q, error, bound = scratch
    np.divide(w, s, out=q)
    q += z
    np.rint(q, out=q)
    np.clip(q, np.float32(format.minimum), np.float32(format.maximum), out=q)
    q -= z
    np.multiply(q, s, out=error)
    np.subtract(w, error, out=error)
    # The soft threshold shrinks an error by |error| ** (p - 1) / beta, so this much of it stays here at most.
    np.abs(error, out=bound)
    np.sqrt(bound, out=bound)
    with np.errstate(divide="ignore"):
        np.divide(np.float32(1 / beta), bound, out=bound)
    np.minimum(error, bound, out=error)
    np.negative(bound, out=bound)
    np.maximum(error, bound, out=error)
    np.multiply(q, s, out=bound)
    error += bound
    return q, error
