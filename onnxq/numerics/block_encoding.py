"""Quantize an array in bands that threads take in turns, each read once.

The result has the same bits as `block_range`, `search_params` and `quantize` on the whole array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import (
    Floats,
    QTensor,
    QuantParams,
    block_range,
    params_of_blocks,
    quantize,
    quantize_into,
)
from onnxq.numerics.blocks import PIECE, Shape, Slices, bands, grid_shape, pieces, whole_blocks
from onnxq.numerics.formats import format_named
from onnxq.numerics.scale_search import clipping_factors, search_params, square
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.system.resources import parallel_map

Array = npt.NDArray[Any]
Singles = npt.NDArray[np.float32]

# Elements of a band: its floats fit the last cache, and threads have enough to take in turns.
_BAND: Final = 1 << 20


class NotFiniteError(ValueError):
    """A value is NaN or infinite."""


def quantize_blocks(values: Array, spec: QuantSpec, block: Shape) -> QTensor:
    """Choose scales and zero points by the method of a spec, and quantize.

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
    quantized, scale = np.empty(values.shape, format.dtype), np.empty(grid, np.float32)
    zero_point = None if spec.symmetric else np.empty(grid, format.dtype)

    def encode(place: tuple[Slices, Slices]) -> None:
        part, own = values[place[0]], place[1]
        parameters = _params(part, spec, block)
        quantize_into(part, parameters, format, quantized[place[0]])
        scale[own] = parameters.scale
        if zero_point is not None:
            zero_point[own] = parameters.zero_point

    for _ in parallel_map(encode, places):
        pass
    return QTensor(quantized, QuantParams(scale, zero_point, None, block), format)


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
    return quantize(values, _params(values, spec, block), format_named(spec.format))


def _params(values: Array, spec: QuantSpec, block: Shape) -> QuantParams:
    low, high = block_range(values, block)
    if not (np.isfinite(low.min(initial=0)) and np.isfinite(high.max(initial=0))):
        raise NotFiniteError("a value is NaN or infinite")
    if spec.method is Method.MSE and (screen := _Screen.of(values, spec, block)) is not None:
        kept = screen.kept(values, low, high)
        return params_of_blocks(low * kept, high * kept, spec, block)
    return search_params(values, low, high, spec, block)


# --- least squares: errors in float32 leave few candidates to compare in float64 --------------------------------------

# Smaller arrays are searched at once.
_SMALL: Final = 1 << 15
# numpy sums longer rows pairwise, and its loops over fewer blocks side by side are slow.
_LONGEST, _FEWEST, _MOST_BITS = 512, 16, 8
# Outside of these scales float32 products could leave the normal numbers.
_SMALLEST_STEP, _LARGEST_STEP = 1e-30, 1e30
# Rounding in float32: of a sum, as a share for each term, and of a value, as a share of the range.
_ROUNDING, _RANGE_ROUNDING = 1e-7, 1e-6
# How near a zero point may be to the middle of two integers until it is computed for each candidate.
_NEAR_HALF: Final = 1e-4
# Candidates after which the error found so far rules out some of those that clip more.
_LOOK: Final = 4


@dataclass(frozen=True)
class _Screen:
    """Finds for each block the factor of its range with the least squared error.

    Errors are computed in units of the step of the whole range, because the candidates of all blocks are the same
    numbers then: five passes over a part that fits the cache. A block whose best candidates differ by less than the
    rounding of float32 is searched once more, as `search_params` does.

    Attributes:
        spec: a symmetric or affine integer format with float32 scales.
        block: extents of a block, one for each axis.
        axis: the axis along which blocks lie.
        runs: parts of a block whose errors are summed before they are added up, see `block_error`.
    """

    spec: QuantSpec
    block: Shape
    axis: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, values: Array, spec: QuantSpec, block: Shape) -> _Screen | None:
        """Return the screen for an array; None if `search_params` has to search all candidates."""
        shape, format = values.shape, format_named(spec.format)
        limits = [min(extent, length) for extent, length in zip(shape, block, strict=True)]
        axes = [axis for axis, length in enumerate(limits) if length > 1]
        if values.size < _SMALL or len(axes) != 1 or values.dtype.itemsize > np.dtype(np.float32).itemsize:
            return None
        if format.is_float or format.bits > _MOST_BITS or spec.scale != "float32" or spec.two_level:
            return None
        [axis] = axes
        last = axis == len(shape) - 1
        side = math.prod(shape[:-1]) if last else math.prod(shape[axis + 1 :])
        if limits[axis] >= _LONGEST or side < _FEWEST:
            return None
        one = (*(1,) * axis, limits[axis], *shape[axis + 1 :])
        runs = {(piece.values[axis].start, piece.values[axis].stop) for piece in pieces(one, block)}
        return cls(spec, block, axis, tuple(sorted(runs)))

    def kept(self, values: Array, low: Floats, high: Floats) -> Singles:
        """Return the factor of the range of each block, in the shape of the ranges."""
        kept = np.ones(low.shape, np.float32)
        scratch = np.empty((3, 2 * PIECE), np.float32)
        tied: dict[int, list[_Tied]] = {}
        for place, own in whole_blocks(values.shape, self.block, PIECE):
            columns = self._columns(values[place])
            ends = (end[own].reshape(-1).astype(np.float32, copy=False) for end in (low, high))
            lows, highs = ends
            factors, ties, close = self._screened(columns, lows, highs, scratch)
            kept[own] = factors.reshape(kept[own].shape)
            if len(ties):
                outer, inner = np.unravel_index(ties, (columns.shape[0], columns.shape[2]))
                where = np.unravel_index(ties, kept[own].shape)
                found = _Tied(own, where, np.ascontiguousarray(columns[outer, :, inner].T), close)
                tied.setdefault(columns.shape[1], []).append(found)
        for alike in tied.values():
            ranges = (np.concatenate([end[one.own][one.where] for one in alike]) for end in (low, high))
            columns, close = (
                np.concatenate(parts, axis=1)
                for parts in zip(*((one.columns, one.close) for one in alike), strict=True)
            )
            lows, highs = ranges
            best = self._best(columns, lows, highs, close)
            for one in alike:
                count = one.columns.shape[1]
                kept[one.own][one.where], best = best[:count], best[count:]
        return kept

    def _columns(self, part: Array) -> Singles:
        """Return a part as (blocks, positions in a block, blocks); blocks are in row-major order."""
        single = part.astype(np.float32, copy=False)
        length = min(self.block[self.axis], part.shape[self.axis])
        inner = math.prod(part.shape[self.axis + 1 :])
        columns = single.reshape(-1, length, inner)
        return np.ascontiguousarray(columns.transpose(2, 1, 0)) if self.axis == part.ndim - 1 else columns

    def _screened(
        self, columns: Singles, low: Singles, high: Singles, scratch: Singles
    ) -> tuple[Singles, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the factors of blocks, the blocks whose factors are not certain, and what may be the best of these."""
        outer, length, inner = columns.shape
        shape, format = (outer, 1, inner), format_named(self.spec.format)
        scaled, tried, quantized = (one[: columns.size].reshape(columns.shape) for one in scratch)
        factors = np.array((1.0, *clipping_factors(self.spec)))
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        width = 2 * np.maximum(-low, high) if self.spec.symmetric else high - low
        step = width * np.float32(1 / (format.maximum - format.minimum))
        signed = self.spec.has_signed_scales
        if signed:
            ends = (
                width * np.float32(-0.5 / format.minimum),
                np.minimum(-low, high) * np.float32(1 / (format.maximum + 0.5)),
            )
            step = np.maximum(*ends)
        empty, usual = step == 0, (step > _SMALLEST_STEP) & (step < _LARGEST_STEP)
        if signed:
            # Rounding of a candidate's range must not change which end is the larger one.
            usual &= np.abs(low + high) > _RANGE_ROUNDING * width
            np.negative(step, out=step, where=high > -low)
        step[~usual] = 1
        lowest, highest = np.float32(format.minimum), np.float32(format.maximum)
        low, high = low / step, high / step
        low, high = np.minimum(low, high), np.maximum(low, high)
        certain = usual
        limits: tuple[Any, Any] = lowest, highest
        if not self.spec.symmetric:
            zero = np.rint(low)
            certain = usual & ~self._may_move(low)
            limits = zero, zero + (highest - lowest)
        np.multiply(columns, np.reshape(1 / step, shape), out=scaled)
        errors, least = np.empty((len(factors), low.size), np.float32), np.full(low.shape, np.inf, np.float32)
        stop, count = 0.0, 0
        for factor in factors:
            if factor < stop:
                break
            np.multiply(scaled, np.float32(1 / factor), out=tried)
            np.rint(tried, out=quantized)
            if self.spec.symmetric:
                np.clip(quantized, *limits, out=quantized)
            else:
                np.maximum(quantized, limits[0].reshape(shape), out=quantized)
                np.minimum(quantized, limits[1].reshape(shape), out=quantized)
            quantized -= tried
            np.einsum("akb,akb->ab", quantized, quantized, out=errors[count].reshape(outer, inner))
            errors[count] *= np.float32(factor**2)
            np.minimum(least, errors[count], out=least)
            count += 1
            if factor < 1 and count % _LOOK == 0:
                reach = np.sqrt(least + self._uncertainty(least, length))
                stop = float(_ruled_out(low, high, limits, reach)[usual].min(initial=np.inf))
        close = np.zeros((len(factors), low.size), np.bool_)
        np.less_equal(errors[:count], least + self._uncertainty(least, length), out=close[:count])
        certain = certain & (np.add.reduce(close[:count].view(np.int8), axis=0) == 1)
        # Where one candidate is close, the product is its factor.
        kept = factors[:count].astype(np.float32) @ close[:count].astype(np.float32)
        kept[empty] = 1
        ties = np.flatnonzero(~empty & ~certain)
        return kept, ties, close[:, ties] | ~usual[ties] | self._may_move(low[ties])

    def _may_move(self, low: Singles) -> npt.NDArray[np.bool_]:
        """Return whether the zero point of blocks may be another for each candidate, because of rounding."""
        near = np.abs(np.abs(low - np.rint(low)) - np.float32(0.5)) <= _NEAR_HALF
        return near & (not self.spec.symmetric)

    def _uncertainty(self, error: Singles, length: int) -> Singles:
        """Return by how much squared errors in float32 may be from those in float64, in squared steps."""
        steps = format_named(self.spec.format).maximum - format_named(self.spec.format).minimum
        rounding = np.float32(_RANGE_ROUNDING * float(steps) * math.sqrt(length))
        return np.asarray(error * (_ROUNDING * (length + 10)) + rounding * np.sqrt(error) + rounding**2, np.float32)

    def _best(self, columns: Singles, low: Floats, high: Floats, close: npt.NDArray[np.bool_]) -> Singles:
        """Compare the candidates that may be the best of blocks, the columns of an array, in float64."""
        factors = np.array((1.0, *clipping_factors(self.spec)), np.float32)
        block, candidate = np.nonzero(close.T)
        tried = factors[candidate]
        found = self._errors(columns, block, params_of_blocks(low[block] * tried, high[block] * tried, self.spec, (1,)))
        starts = np.searchsorted(block, np.arange(columns.shape[1]))
        least = np.minimum.reduceat(found, starts)
        # The first of equals, as in `best_factors`.
        places = np.flatnonzero(found == least[block])
        first = places[np.searchsorted(block[places], np.arange(columns.shape[1]))]
        return np.asarray(tried[first], np.float32)

    def _errors(
        self, columns: Singles, block: npt.NDArray[np.intp], parameters: QuantParams
    ) -> npt.NDArray[np.float64]:
        """Return the squared error of each candidate, summed in the order of `block_error`."""
        format, length = format_named(self.spec.format), len(columns)
        found = np.zeros(len(block))
        wide = max(PIECE // length, 2)
        for start in range(0, len(block), wide):
            part = slice(start, start + wide)
            own = block[part]
            # numpy sums a single column in another order.
            own = np.append(own, own) if len(own) == 1 else own
            seen = columns[:, own]
            scale, zero = (
                None if one is None else np.broadcast_to(one[part], len(own))[None]
                for one in (parameters.scale, parameters.zero_point)
            )
            assert scale is not None
            lost = quantize(seen, QuantParams(scale, zero, None, (length, 1)), format).dequantize()
            lost -= seen
            squares, sums = square(lost.astype(np.float64)), np.zeros(len(own))
            for first, last in self.runs:
                if first < length:
                    sums += squares[first:last].sum(0)
            found[part] = sums[: len(found[part])]
        return found


@dataclass(frozen=True, eq=False)
class _Tied:
    """Blocks of a part whose factors are not certain: places, values as columns, and candidates as rows."""

    own: Slices
    where: tuple[npt.NDArray[np.intp], ...]
    columns: Singles
    close: npt.NDArray[np.bool_]


def _ruled_out(low: Singles, high: Singles, limits: tuple[Any, Any], reach: Singles) -> Singles:
    """Return the factor below which clipping the extremes of a block alone exceeds an error.

    Args:
        low: smallest value of each block in steps, at most 0.
        high: largest value of each block in steps, at least 0.
        limits: lowest and highest quantized value.
        reach: square roots of the errors.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        below, above = (-low - reach) / -limits[0], (high - reach) / limits[1]
    found: Singles = np.maximum(*(np.where(np.isfinite(one), one, 0) for one in (below, above)))
    return found
