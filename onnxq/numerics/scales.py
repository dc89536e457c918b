"""Ranges of blocks to scales: on the grid of the scale's format, with one level or two."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.numerics.blocks import PIECE, grid_shape, pieces
from onnxq.numerics.formats import Format, format_named
from onnxq.numerics.numerics import SMALLEST_SCALE, Parameters
from onnxq.numerics.scale_formats import SCALE_FORMATS, ScaleFormat, scale_format_named
from onnxq.numerics.spec import Rounding, Spec

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32] | Doubles


def block_range(values: npt.NDArray[Any], block: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return the minimum and maximum of each block.

    Args:
        values: float array.
        block: extents of a block, one for each axis.

    Returns:
        Two arrays of the grid's shape, float64 if the values are and else float32; NaN where a block holds NaN.

    >>> block_range(np.array([1.0, -2.0, 5.0]), (2,))
    (array([-2.,  5.]), array([1., 5.]))
    """
    grid, dtype = grid_shape(values.shape, block), np.result_type(values.dtype, np.float32)
    low, high = np.full(grid, np.inf, dtype), np.full(grid, -np.inf, dtype)
    for piece in pieces(values.shape, block):
        piece.gather(piece.part(values), (np.minimum, low), (np.maximum, high))
    return low, high


def spec_parameters(
    low: Floats, high: Floats, spec: Spec, block: tuple[int, ...], tensor_scale: np.float32 | None = None
) -> Parameters:
    """Choose scales and zero points so that each range and zero are representable, as a Spec says.

    The range of a scale is that of ``numerics.parameters_from_range``; the sizes of floating-point codes are those of
    their largest value. Two levels follow Burn and NVFP4: the tensor's scale brings the largest of the others to the
    largest number of its format. All is computed in float64.

    Args:
        low: minimum of each block.
        high: maximum of each block, same shape.
        spec: format, symmetry and scales.
        block: extents of a block, one for each axis.
        tensor_scale: the second level; None finds it when the Spec has two.

    Returns:
        Parameters of the shape of ``low``.
    """
    format = format_named(spec.format)
    scale = np.empty(low.shape, np.float32)
    zero_point = None if spec.symmetric else np.empty(low.shape, format.dtype)
    # A grid of small blocks is large itself, so the float64 arrays are kept to parts of it.
    parts = [slice(start, start + PIECE) for start in range(0, low.size, PIECE)]
    ends = low.reshape(-1), high.reshape(-1)
    if spec.two_level and tensor_scale is None:
        largest = max((float(_wanted_scale(*_to_zero(*ends, part), spec).max()) for part in parts), default=0.0)
        tensor_scale = _tensor_scale(largest, scale_format_named(spec.scale))
    for part in parts:
        lows, highs = _to_zero(*ends, part)
        wanted = _wanted_scale(lows, highs, spec)
        if tensor_scale is not None:
            wanted /= np.float64(tensor_scale)
        rounded = np.where(wanted > 0, on_grid(wanted, spec), np.float32(1.0))
        scale.reshape(-1)[part] = rounded
        if zero_point is not None:
            effective = Parameters(rounded, None, tensor_scale).effective_scale
            zero_point.reshape(-1)[part] = format.round(format.minimum - lows / effective.astype(np.float64))
    return Parameters(scale, zero_point, tensor_scale, block)


def _to_zero(low: Floats, high: Floats, part: slice) -> tuple[Doubles, Doubles]:
    """Return a part of the ranges, extended to zero."""
    return np.minimum(low[part].astype(np.float64), 0.0), np.maximum(high[part].astype(np.float64), 0.0)


def _wanted_scale(low: Doubles, high: Doubles, spec: Spec) -> Doubles:
    """Return the scales that the ranges ask for, zero for a range of width zero."""
    format, magnitude = format_named(spec.format), np.maximum(-low, high)
    if spec.scale_rounding is Rounding.FLOOR:
        wanted = _microscaling(magnitude, format)
    else:
        width = 2 * magnitude if spec.symmetric else high - low
        wanted = width / float(format.maximum - format.minimum)
    return np.where(high > low, np.maximum(wanted, SMALLEST_SCALE), 0.0)


def on_grid(scales: Doubles, spec: Spec) -> npt.NDArray[np.float32]:
    """Bring scales to the format of a Spec; to a power of two that FLOOR found, nothing is left to do."""
    scale_format = scale_format_named(spec.scale)
    # Half a unit in the last place of a float32 scale clips nothing that a code could tell.
    if spec.scale_rounding is Rounding.UP and spec.scale != "float32":
        return scale_format.round_up(scales)
    return scale_format.round_nearest(scales)


def _microscaling(magnitude: Doubles, format: Format) -> Doubles:
    """Return ``2 ** (floor(log2(magnitude)) - floor(log2(maximum)))`` (OCP Microscaling Formats 1.0, section 6.3)."""
    exponent = np.frexp(magnitude)[1] - np.frexp(float(format.maximum))[1]
    powers: Doubles = np.ldexp(np.ones_like(magnitude), exponent)
    return powers


def _tensor_scale(largest: float, scale_format: ScaleFormat) -> np.float32:
    """Return the float32 scale that leaves the largest scale within its format and each product normal."""
    if largest == 0:
        return np.float32(1)
    wanted = max(largest / scale_format.maximum, SMALLEST_SCALE / scale_format.smallest)
    return np.float32(SCALE_FORMATS["float32"].round_up(np.array(wanted)))
