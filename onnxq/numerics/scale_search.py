"""Choose scales and zero points: by the range, by least squared error, or by half-quadratic quantization (HQQ)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import Doubles, Floats, QuantParams, params_of_blocks, quantize
from onnxq.numerics.blocks import grid_shape, pieces
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.hqq import half_quadratic
from onnxq.numerics.least_squares import alternate, is_alternated
from onnxq.numerics.spec import Method, QuantSpec

Measure = Callable[[Doubles], Doubles]

# Fractions of the min-max range to try. For 2 bits and a bell-shaped channel about a third is best.
_KEPT = tuple(round(0.98 - 0.02 * step, 2) for step in range(40))

# Number of wider ranges to try.
_WIDENED = 3

_FEW_BITS = 4


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
    initial, format = params_of_blocks(low, high, spec, block), format_named(spec.format)
    if spec.method is Method.HQQ:
        return _best_of(initial, [half_quadratic(values, initial, spec, block)], values, format, root)
    if spec.method is not Method.MSE:
        return initial
    if not is_alternated(spec):
        ranges = ((low * factor, high * factor) for factor in clipping_factors(spec))
        tried = (params_of_blocks(*ends, spec, block, initial.tensor_scale) for ends in ranges)
        return _best_of(initial, tried, values, format)
    fitted = alternate(values, low, high, initial, spec, block)
    # Sums in float32 show the errors of few bits. Otherwise rounding, of sums or of scales, may have raised some.
    certain = format.bits <= _FEW_BITS and spec.scale == "float32"
    return fitted if certain else _best_of(initial, [fitted], values, format)


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


def block_error(
    values: npt.NDArray[Any], parameters: QuantParams, format: QuantDType, measure: Measure
) -> npt.NDArray[np.float64]:
    """Return the summed quantization error of each block.

    Args:
        values: float array.
        parameters: scales and zero points.
        format: format of the quantized values.
        measure: maps float64 errors to the terms of the sum, such as `np.square`.

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


def root(error: Doubles) -> Doubles:
    """Return the square roots of the magnitudes of errors."""
    return np.asarray(np.sqrt(np.abs(error)))


def _best_of(
    initial: QuantParams,
    candidates: Iterable[QuantParams],
    values: npt.NDArray[Any],
    format: QuantDType,
    measure: Measure = np.square,
) -> QuantParams:
    """Return the scale and zero point of least error for each block: the first of several, or else the initial ones."""
    best, least = initial, block_error(values, initial, format, measure)
    for candidate in candidates:
        error = block_error(values, candidate, format, measure)
        better, zero_point = error < least, best.zero_point
        if zero_point is not None and candidate.zero_point is not None:
            zero_point = np.where(better, candidate.zero_point, zero_point)
        best = replace(best, scale=np.where(better, candidate.scale, best.scale), zero_point=zero_point)
        least = np.where(better, error, least)
    return best
