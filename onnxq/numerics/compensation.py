"""Error-compensating rounding: codes whose errors cancel in the sums that a product computes.

A product with data x makes of the rounding errors e of one output channel the error e . x, whose mean square is
e H e^T with the Gram matrix H = E[x x^T]. Rounding one value at a time, and letting those that follow make up for what
is lost, keeps that sum small although single values move away from their nearest codes (GPTQ: Frantar et al.,
"Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.numerics.formats import Format
from onnxq.numerics.matrices import Matrices
from onnxq.numerics.numerics import Parameters, QTensor

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.intp]
Rows = Callable[[Order, Order], npt.NDArray[np.floating]]

DAMPING = 0.01
"""Share of the mean of a Gram matrix's diagonal that is added to it: what new data may differ by."""

# Columns that are rounded before what they lost reaches the others by one matrix product.
_BLOCK = 128
# Values that are worked on together, so that their copies take little beside a large Gram matrix.
_TOGETHER = 2**20
# Damping that a matrix without a Cholesky factor is tried again with.
_MORE = (0.1, 1.0)


@dataclass(frozen=True, eq=False)
class Moments:
    """Gram matrices of the terms that the columns of a weight are multiplied with, up to a factor.

    Attributes:
        products: float array of shape (groups, columns, columns), symmetric: sums of the products of each two terms.
        offsets: float array of shape (groups, columns), whose products with each other are taken from these; with the
            sums of the terms over the square root of the rows, what is left is about the means.
    """

    products: npt.NDArray[np.floating]
    offsets: npt.NDArray[np.floating] | None = None

    def of(self, groups: slice) -> Moments:
        """Return those of some groups."""
        return Moments(self.products[groups], None if self.offsets is None else self.offsets[groups])

    @property
    def diagonal(self) -> npt.NDArray[np.float64]:
        """The diagonals, of shape (groups, columns)."""
        found = np.diagonal(self.products, axis1=1, axis2=2).astype(np.float64)
        return found if self.offsets is None else found - np.square(self.offsets)

    def rows(self, group: int, rows: Order, order: Order) -> npt.NDArray[np.floating]:
        """Return some rows of a matrix with their columns in that order."""
        found = self.products[group, rows][:, order]
        offset = None if self.offsets is None else self.offsets[group]
        return np.asarray(found if offset is None else found - offset[rows, None] * offset[order])

    def times(self, values: Floats) -> npt.NDArray[np.floating]:
        """Return the matrices' products with values of shape (groups, columns, rows)."""
        found = self.products @ values
        if self.offsets is None:
            return found
        return found - self.offsets[:, :, None] * (self.offsets[:, None] @ values)


def compensated(
    values: npt.NDArray[np.floating],
    parameters: Parameters,
    format: Format,
    moments: Moments,
    matrices: Matrices,
    damping: float = DAMPING,
) -> QTensor:
    """Choose codes that make ``e H e^T`` small for each output channel, at scales and zero points that are given.

    Columns go by falling diagonal. A channel keeps its nearest codes where others are no better, and so do all of a
    group whose Gram matrix is not finite, is zero, or is not positive semidefinite even when damped.

    Args:
        values: finite weight of any rank.
        parameters: scales and zero points, with blocks of any kind.
        format: of at most 8 bits.
        moments: of the terms that columns are multiplied with.
        matrices: how the weight is a matrix for each group.
        damping: share of the mean diagonal that is added to the diagonal.

    Returns:
        Codes of the weight's shape with the parameters given.
    """
    weight = matrices.view(values)
    codes_of_zero = np.zeros((), np.uint8) if parameters.zero_point is None else parameters.zero_point
    entries = parameters.effective_scale, codes_of_zero
    scale, zero_point = (matrices.view(_spread(one, parameters, values.shape)) for one in entries)
    bits = np.empty(matrices.shape, np.uint8)
    groups, rows, columns = matrices.shape
    for together in _parts(groups, columns * columns):
        own = moments.of(together)
        order, factor = _factors(own, damping)
        for some in _parts(rows, len(order) * columns):
            part = (together, some)
            grid = _Grid(format, _turned(scale[part], order), _turned(zero_point[part], order).astype(np.float32))
            bits[part] = _chosen(_turned(weight[part].astype(np.float32), order), grid, own, order, factor)
    codes = matrices.back(bits, values.shape).view(format.dtype)
    return QTensor(codes, parameters, format)


def _parts(count: int, size: int) -> Iterator[slice]:
    """Cut so many things of a size into runs of few values."""
    step = max(_TOGETHER // max(size, 1), 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _spread(entries: npt.NDArray[Any], parameters: Parameters, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Repeat an entry for each block until there is one for each value."""
    if np.ndim(entries) == 0:
        return np.broadcast_to(entries, shape)
    for axis, (extent, length) in enumerate(zip(shape, parameters.block_in(shape), strict=True)):
        if length > 1:
            entries = np.repeat(entries, length, axis)[(slice(None),) * axis + (slice(extent),)]
    return entries


def _turned(part: npt.NDArray[Any], order: Order) -> npt.NDArray[Any]:
    """Return values of (groups, rows, columns) as (groups, columns in that order, rows)."""
    return np.take_along_axis(part.transpose(0, 2, 1), order[:, :, None], 1)


@dataclass(frozen=True, eq=False)
class _Grid:
    """What each value of a part may become; scale and zero point are of the part's shape, columns in front of rows."""

    format: Format
    scale: Floats
    zero_point: Floats

    def nearest(self, wanted: Floats, place: Any) -> tuple[Bytes, Floats]:
        """Return the codes, as bytes, nearest to values at a place of the part, and what they stand for.

        The arithmetic is that of ``numerics.quantize`` and ``dequantize``.
        """
        scale = self.scale[place]
        scaled = wanted / scale
        if self.format.is_float:
            codes = np.empty(scaled.shape, self.format.dtype)
            self.format.round_into(scaled, codes)
            bits = codes.view(np.uint8)
            return bits, self.format.values[bits & (2**self.format.bits - 1)] * scale
        # Integers stay floats on the way: this runs for each column.
        np.rint(scaled, out=scaled)
        if self._is_shifted:
            scaled += self.zero_point[place]
        # NaN becomes the minimum, as it does elsewhere.
        np.fmin(np.fmax(scaled, self.format.minimum, out=scaled), self.format.maximum, out=scaled)
        bits = scaled.astype(self.format.dtype).view(np.uint8)
        if self._is_shifted:
            scaled -= self.zero_point[place]
        return bits, np.multiply(scaled, scale, out=scaled)

    @cached_property
    def _is_shifted(self) -> bool:
        return bool(self.zero_point.any())


def _chosen(weight: Floats, grid: _Grid, moments: Moments, order: Order, factor: Floats) -> Bytes:
    """Return the codes of a part, of shape (groups, rows, columns), nearest ones where others are no better."""
    plain, decoded = grid.nearest(weight, ...)
    bits, lost = _rounded(weight, grid, factor)
    back = np.argsort(order, axis=1)[:, :, None]
    now, plainly = (np.take_along_axis(one, back, 1) for one in (lost, weight - decoded))
    with np.errstate(over="ignore", invalid="ignore"):
        # What is lost plainly, less what is lost now.
        gain = ((plainly - now) * moments.times(plainly + now)).sum(1)
    chosen = np.where(gain[:, None] > 0, bits, plain)
    return np.take_along_axis(chosen, back, 1).transpose(0, 2, 1)


def _rounded(weight: Floats, grid: _Grid, factor: Floats) -> tuple[Bytes, Floats]:
    """Round from the last column to the first.

    With H = L L^T the error of a channel is the sum over columns j of ``(sum over k >= j of e_k L_kj) ** 2``, so once
    those behind it are rounded, column j makes its term smallest at the code nearest to its value plus
    ``sum over k > j of e_k L_kj / L_jj``.

    Returns:
        Codes as bytes, and what each value lost, both of the weight's shape.
    """
    bits, lost = np.empty(weight.shape, np.uint8), np.zeros_like(weight)
    diagonal = np.diagonal(factor, axis1=1, axis2=2)
    for stop in range(weight.shape[1], 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        unit = (factor[:, start:, start:stop] / diagonal[:, None, start:stop]).transpose(0, 2, 1)
        wanted = weight[:, start:stop] + unit[:, :, stop - start :] @ lost[:, stop:]
        near = np.ascontiguousarray(unit[:, :, : stop - start])
        for column in range(stop - 1, start - 1, -1):
            row = column - start
            made_up = near[:, row : row + 1, row + 1 :] @ lost[:, column + 1 : stop]
            aim = (wanted[:, row] + made_up[:, 0]).astype(np.float32, copy=False)
            bits[:, column], decoded = grid.nearest(aim, (slice(None), column))
            lost[:, column] = weight[:, column] - decoded
    return bits, lost


def _factors(moments: Moments, damping: float) -> tuple[Order, Floats]:
    """Return columns by rising diagonal, (groups, columns), and the lower Cholesky factors of the damped matrices.

    Those that have none get the identity, by which every value goes to its nearest code.
    """
    diagonal = moments.diagonal
    order = np.argsort(diagonal, axis=1, kind="stable")
    with np.errstate(over="ignore"):
        size = diagonal.mean(1)
    factors = np.empty(moments.products.shape, np.float32)
    for group in _left(moments, order, size, damping, factors):
        factor, tried = factors[group], (damping, *_MORE) if 0 < size[group] < np.inf else ()
        if not any(
            _factorized(partial(moments.rows, group), order[group], size[group], more, factor) for more in tried
        ):
            factor[...] = np.eye(len(factor), dtype=np.float32)
    return order, factors


def _left(
    moments: Moments, order: Order, size: npt.NDArray[np.float64], damping: float, factors: Floats
) -> Sequence[int]:
    """Put the Cholesky factors of many small matrices in place at once, and return the groups that are left."""
    groups, count = order.shape
    if count > _BLOCK or groups == 1:
        return range(groups)
    each = np.arange(count)
    found = moments.products[np.arange(groups)[:, None, None], order[:, :, None], order[:, None]]
    if moments.offsets is not None:
        offsets = np.take_along_axis(moments.offsets, order, 1)
        found = found - offsets[:, :, None] * offsets[:, None]
    with np.errstate(all="ignore"):
        factors[...] = found / size[:, None, None]
    factors[:, each, each] += np.float32(damping)
    usual = (size > 0) & np.isfinite(size) & np.isfinite(factors).all((1, 2))
    try:
        factors[usual] = np.linalg.cholesky(factors[usual].astype(np.float64))
    except np.linalg.LinAlgError:
        return range(groups)
    return np.flatnonzero(~usual).tolist()


def _factorized(rows: Rows, order: Order, size: float, damping: float, factor: Floats) -> bool:
    """Put the Cholesky factor of a matrix, in that order and in units of that size, in place; whether it has one."""
    count = len(order)
    for start in range(0, count, _BLOCK):
        factor[start : start + _BLOCK] = rows(order[start : start + _BLOCK], order) / size
    factor[np.diag_indices(count)] += np.float32(damping)
    if not np.isfinite(factor).all():
        return False
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        try:
            corner = np.linalg.cholesky(factor[start:stop, start:stop].astype(np.float64))
        except np.linalg.LinAlgError:
            return False
        factor[start:stop, start:stop] = corner
        below = factor[stop:, start:stop]
        below[...] = below @ np.linalg.inv(corner).T
        for first in range(stop, count, _BLOCK):
            last = min(first + _BLOCK, count)
            factor[first:last, stop:last] -= below[first - stop : last - stop] @ below[: last - stop].T
    return True
