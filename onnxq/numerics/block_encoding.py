"""Quantize and pack an array in bands that threads take in turns, each read once.

The result has the same bits as `block_range`, `search_params` and `quantize` on the whole array.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import QTensor, QuantParams, block_range, quantize
from onnxq.numerics.blocks import Shape, Slices, bands, grid_shape
from onnxq.numerics.formats import format_named
from onnxq.numerics.scale_search import search_params
from onnxq.numerics.spec import QuantSpec
from onnxq.system.resources import parallel_map

Array = npt.NDArray[Any]

# Elements of a band: threads have enough of them to take in turns.
_BAND: Final = 1 << 21


class NotFiniteError(ValueError):
    """A value is NaN or infinite."""


def quantize_blocks(values: Array, spec: QuantSpec, block: Shape) -> QTensor:
    """Choose scales and zero points by the method of a spec, and quantize; pack fewer than 8 bits of several bands.

    Args:
        values: float array.
        spec: format, scales and method.
        block: extents of a block, one for each axis.

    Raises:
        NotFiniteError: a value is NaN or infinite.

    >>> found = quantize_blocks(np.array([1.0, -7.0, 0.25, 1.75]), QuantSpec("int4-narrow", (2,)), (2,))
    >>> found.values, found.parameters.scale
    (array([ 1, -7,  1,  7], dtype=int8), array([1.  , 0.25], dtype=float32))
    """
    # One scale of the whole tensor depends on all blocks.
    places = [] if spec.two_level else bands(values.shape, block, _BAND)
    if len(places) < 2:
        return _quantized(values, spec, block)
    format, grid = format_named(spec.format), grid_shape(values.shape, block)
    scale, zero_point = np.empty(grid, np.float32), None if spec.symmetric else np.empty(grid, format.dtype)
    is_packed = format.bits < 8 and values[places[0][0]].size * format.bits % 8 == 0
    size = -(-values.size * format.bits // 8) if is_packed else values.size
    stored, end = np.empty(size, np.uint8 if is_packed else format.dtype), 0

    def encode(place: tuple[Slices, Slices]) -> tuple[Array, QuantParams]:
        quantized = _quantized(values[place[0]], spec, block)
        return quantized.packed if is_packed else quantized.values.reshape(-1), quantized.parameters

    for (_, own), (band, parameters) in zip(places, parallel_map(encode, places), strict=True):
        stored[end : end + band.size] = band
        end += band.size
        scale[own] = parameters.scale
        if zero_point is not None:
            zero_point[own] = parameters.zero_point
    whole = QuantParams(scale, zero_point, None, block)
    return QTensor(
        stored if is_packed else stored.reshape(values.shape), whole, format, values.shape if is_packed else None
    )


def are_finite(values: Array) -> bool:
    """Return whether no value is NaN or infinite; threads look at parts of the array.

    >>> are_finite(np.array([1.0, -2.0])), are_finite(np.array([1.0, np.nan]))
    (True, False)
    """

    def holds(place: tuple[Slices, Slices]) -> bool:
        part = values[place[0]]
        return math.isfinite(float(part.min(initial=0))) and math.isfinite(float(part.max(initial=0)))

    places = bands(values.shape, (1,) * values.ndim, _BAND)
    return all(parallel_map(holds, places) if len(places) > 1 else map(holds, places))


def _quantized(values: Array, spec: QuantSpec, block: Shape) -> QTensor:
    low, high = block_range(values, block)
    if not (np.isfinite(low.min(initial=0)) and np.isfinite(high.max(initial=0))):
        raise NotFiniteError("a value is NaN or infinite")
    return quantize(values, search_params(values, low, high, spec, block), format_named(spec.format))
