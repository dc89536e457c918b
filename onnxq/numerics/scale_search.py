"""Choose scales and zero points: by the range, by least squared error, or by half-quadratic quantization (HQQ)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import Doubles, Floats, QuantParams, on_grid, params_of_blocks, quantize
from onnxq.numerics.blocks import Shape, grid_shape, pieces, whole_blocks
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.least_squares import PART, Singles, alternate, columns_of, is_alternated, products_of
from onnxq.numerics.spec import Method, QuantSpec

Measure = Callable[[Doubles], Doubles]

# Fractions of the min-max range to try. For 2 bits and a bell-shaped channel about a third is best.
_KEPT = tuple(round(0.98 - 0.02 * step, 2) for step in range(40))

# Number of wider ranges to try.
_WIDENED = 3

_FEW_BITS = 4

_ITERATIONS = 20
_WEIGHT = 10.0
_GROWTH = 1.01
# Below this spread a block has no slope: all its values round to the same number.
_NOTHING = 1e-12


def search_params(
    values: npt.NDArray[Any], low: Floats, high: Floats, spec: QuantSpec, block: tuple[int, ...]
) -> QuantParams:
    """Choose scales and zero points by the method of a spec.

    Args:
        values: float array.
        low: minimum of each block.
        high: maximum of each block.
        spec: format, scales and method.
        block: extents of a block, one for each axis.
    """
    parameters = params_of_blocks(low, high, spec, block)
    format = format_named(spec.format)
    if spec.method is Method.MSE and is_alternated(spec):
        fitted = alternate(values, low, high, parameters, spec, block)
        # Sums in float32 show the errors of few bits. Otherwise rounding, of sums or of scales, may have raised some.
        certain = format.bits <= _FEW_BITS and spec.scale == "float32"
        return fitted if certain else _better(values, fitted, parameters, format, square)
    if spec.method is Method.MSE:
        tensor_scale = parameters.tensor_scale

        def error(tried: QuantParams) -> Doubles:
            return block_error(values, tried, format, square)

        kept = best_factors(low, high, spec, block, error, tensor_scale)
        return params_of_blocks(low * kept, high * kept, spec, block, tensor_scale)
    if spec.method is Method.HQQ:
        return half_quadratic(values, parameters, spec, block)
    return parameters


def best_factors(
    low: Floats,
    high: Floats,
    spec: QuantSpec,
    block: tuple[int, ...],
    error: Callable[[QuantParams], Doubles],
    tensor_scale: np.float32 | None = None,
) -> Floats:
    """Return the factor of each range whose scale has the least error: 1, or the first of `clipping_factors`.

    Args:
        low: minimum of each block.
        high: maximum of each block.
        spec: format and scales.
        block: extents of a block, one for each axis.
        error: returns the error of each block for scales and zero points.
        tensor_scale: the second level of the scales, if there is one.
    """
    kept = np.ones_like(low)
    least = error(params_of_blocks(low, high, spec, block, tensor_scale))
    for factor in clipping_factors(spec):
        found = error(params_of_blocks(low * factor, high * factor, spec, block, tensor_scale))
        better = found < least
        least = np.where(better, found, least)
        kept[better] = factor
    return kept


def clipping_factors(spec: QuantSpec) -> tuple[float, ...]:
    """Return the factors of a range that are tried.

    Some are above 1: in a symmetric format the largest positive value clips first.

    >>> [round(one, 3) for one in clipping_factors(QuantSpec("int4"))[:5]]
    [1.071, 1.048, 1.024, 0.98, 0.96]
    """
    format = format_named(spec.format)
    whole = float((format.maximum - format.minimum) / (2 * format.maximum)) if spec.symmetric else 1.0
    wider = tuple(1 + (whole - 1) * step / _WIDENED for step in range(_WIDENED, 0, -1)) if whole > 1 else ()
    return (*wider, *_KEPT)


def half_quadratic(values: npt.NDArray[Any], parameters: QuantParams, spec: QuantSpec, block: Shape) -> QuantParams:
    """Move scales and zero points to reduce the sum of the square roots of the errors.

    This norm hardly counts the few large errors of clipping. The algorithm is HQQ (Badri and Shaji 2023):
    half-quadratic splitting alternates between shrinking the errors and fitting the rest. HQQ fits a fractional zero
    point. Here zero points are rounded, so zero stays exact, and scales are fitted as well. A block whose error does
    not fall keeps its scale and zero point.

    Args:
        values: float array.
        parameters: initial scales and zero points of an affine format.
        spec: format and scales.
        block: extents of a block, one for each axis.
    """
    assert parameters.zero_point is not None
    format, unit = format_named(spec.format), parameters.effective_scale
    scale, zero_point = parameters.scale.astype(np.float64), parameters.zero_point.copy()
    room = np.empty(min(values.size, max(PART, math.prod(block))), np.float32)
    for place, own in whole_blocks(values.shape, block, PART):
        # The values are divided by the initial scale, so the fit does not depend on the size of the weight.
        columns = columns_of(values[place], unit[own], block, room)
        slope, zero = _half_quadratic(columns, zero_point[own].reshape(-1).astype(np.float32), format)
        scale[own] *= slope.reshape(scale[own].shape)
        zero_point[own] = zero.reshape(scale[own].shape).astype(format.dtype)
    moved = replace(parameters, scale=on_grid(scale, spec), zero_point=zero_point)
    return _better(values, moved, parameters, format, root)


def _half_quadratic(columns: Singles, zero: Singles, format: QuantDType) -> tuple[Singles, Singles]:
    """Return the factor of each column's scale, and its zero point."""
    count, slope = float(len(columns)), np.ones_like(zero)
    scratch = np.empty((3, *columns.shape), np.float32)
    weight = _WEIGHT
    for _ in range(_ITERATIONS):
        integers, kept = _shrunk(columns, slope, zero, weight, format, scratch)
        total, whole = (array.sum(0, dtype=np.float64) for array in (integers, kept))
        spread = count * products_of(integers, integers) - total**2
        shared = count * products_of(integers, kept) - whole * total
        fits = (spread > _NOTHING) & (shared > 0)
        steeper = shared / np.maximum(spread, _NOTHING)
        slope = np.where(fits, steeper, slope).astype(np.float32)
        zero = np.where(fits, zero - (whole / slope - total) / count, zero).astype(np.float32)
        weight *= _GROWTH
    zero = np.clip(np.rint(zero), format.minimum, format.maximum).astype(np.float32)
    integers, kept = _shrunk(columns, slope, zero, weight, format, scratch)
    products = products_of(integers, kept)
    return np.where(products > 0, products / np.maximum(products_of(integers, integers), _NOTHING), slope), zero


def _shrunk(
    columns: Singles, slope: Singles, zero: Singles, weight: float, format: QuantDType, scratch: Singles
) -> tuple[Singles, Singles]:
    """Return the integers of columns less their zero points, and the values without their large errors."""
    integers, error, bound = scratch
    np.divide(columns, slope, out=integers)
    integers += zero
    np.rint(integers, out=integers)
    np.clip(integers, np.float32(format.minimum), np.float32(format.maximum), out=integers)
    integers -= zero
    np.multiply(integers, slope, out=error)
    np.subtract(columns, error, out=error)
    # Proximal step of the l_p norm with p = 1/2: an error loses all but this much.
    np.abs(error, out=bound)
    np.sqrt(bound, out=bound)
    with np.errstate(divide="ignore"):
        np.divide(np.float32(1 / weight), bound, out=bound)
    np.minimum(error, bound, out=error)
    np.negative(bound, out=bound)
    np.maximum(error, bound, out=error)
    np.multiply(integers, slope, out=bound)
    error += bound
    return integers, error


def block_error(
    values: npt.NDArray[Any], parameters: QuantParams, format: QuantDType, measure: Measure
) -> npt.NDArray[np.float64]:
    """Return the summed quantization error of each block.

    Args:
        values: float array.
        parameters: scales and zero points.
        format: format of the quantized values.
        measure: maps float64 errors to the terms of the sum, such as `square`.

    Returns:
        Array of the scales' shape.
    """
    block = parameters.block_in(values.shape)
    error = np.zeros(grid_shape(values.shape, block))
    scale, zero_point = parameters.effective_scale, parameters.zero_point
    for piece in pieces(values.shape, block):
        own = QuantParams(
            piece.own(scale),
            None if zero_point is None else piece.own(zero_point),
        )
        seen = piece.part(values).astype(np.float32, copy=False)
        lost = quantize(seen, own, format).dequantize()
        np.subtract(lost, seen, out=lost)
        piece.gather(measure(lost.astype(np.float64)), (np.add, error))
    return error


def square(error: Doubles) -> Doubles:
    """Square the errors in place."""
    return np.square(error, out=error)


def root(error: Doubles) -> Doubles:
    """Replace the errors by the square roots of their magnitudes, in place."""
    return np.sqrt(np.abs(error, out=error), out=error)


def _better(
    values: npt.NDArray[Any], candidate: QuantParams, initial: QuantParams, format: QuantDType, measure: Measure
) -> QuantParams:
    """Return the candidate where its error is less, and the initial parameters of the other blocks."""
    better = block_error(values, candidate, format, measure) < block_error(values, initial, format, measure)
    scale, zero = np.where(better, candidate.scale, initial.scale), initial.zero_point
    if zero is not None and candidate.zero_point is not None:
        zero = np.where(better, candidate.zero_point, zero)
    return replace(initial, scale=scale, zero_point=zero)
