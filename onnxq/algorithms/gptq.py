"""GPTQ: rounding whose errors cancel in the sums that a matrix multiplication or convolution computes.

A node multiplies activations x by the rounding errors e of one output channel. The mean square of e . x is e H e^T with
the Gram matrix H = E[x x^T]. GPTQ rounds one value at a time, and the values that follow compensate its error. The sum
stays small, although single values move away from their nearest quantized value (Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Option, Request
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.ir import Node, Variable
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.ops import facts_of


@dataclass(frozen=True)
class WeightMatrices:
    """A weight as one matrix for each group of channels: a row for each output, a column for each term of the sum.

    Attributes:
        split: shape of the weight with the groups on an axis of their own.
        order: axes of `split` in the order groups, rows, columns.
        shape: (groups, rows, columns).

    >>> WeightMatrices.of_product((3, 4)).view(np.arange(12).reshape(3, 4))[0, 1]
    array([1, 5, 9])
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, int, int]

    @classmethod
    def of_product(cls, shape: tuple[int, int], *, transposed: bool = False) -> WeightMatrices:
        """Return the matrices of a weight of shape (columns, rows), or (rows, columns) if transposed."""
        if transposed:
            return cls((1, *shape), (0, 1, 2), (1, *shape))
        return cls((1, *shape), (0, 2, 1), (1, shape[1], shape[0]))

    @classmethod
    def of_convolution(cls, shape: tuple[int, ...], groups: int) -> WeightMatrices:
        """Return the matrices of a Conv weight of shape (rows of all groups, channels of one group, *kernel)."""
        whole = groups, shape[0] // groups, math.prod(shape[1:])
        return cls(whole, (0, 1, 2), whole)

    @classmethod
    def of_cell(cls, shape: tuple[int, ...]) -> WeightMatrices:
        """Return the matrices of a recurrent weight of shape (directions, rows, columns)."""
        directions, rows, columns = shape
        return cls((directions, rows, columns), (0, 1, 2), (directions, rows, columns))

    def view(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reshape values of the weight's shape to (groups, rows, columns)."""
        return values.reshape(self.split).transpose(self.order).reshape(self.shape)

    def back(self, values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Reshape matrices to the weight's shape; the inverse of `view`."""
        turned = values.reshape([self.split[axis] for axis in self.order])
        return np.ascontiguousarray(turned.transpose(np.argsort(self.order))).reshape(shape)


# --- Gram matrices and rounding -------------------------------------------------------------------------------------

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.intp]
Moments = npt.NDArray[np.floating]

DAMPING = 0.01
"""Share of the mean diagonal of a Gram matrix that is added to its diagonal, as new activations differ."""

# Columns to round before one matrix multiplication passes their errors to the other columns.
_BLOCK = 128
# Values to process together, so that their copies are small beside a large Gram matrix.
_TOGETHER = 2**20
# Dampings to retry if a matrix has no Cholesky factor.
_MORE = (0.1, 1.0)


def round_by_gptq(
    values: npt.NDArray[np.floating],
    parameters: QuantParams,
    format: QuantDType,
    moments: Moments,
    matrices: WeightMatrices,
    damping: float = DAMPING,
) -> QTensor:
    """Choose quantized values that minimize `e H e^T` for each output channel, at given scales and zero points.

    Columns are rounded in the order of falling diagonal. A channel keeps the nearest values if GPTQ does not improve
    it. So does a group whose Gram matrix is zero, not finite, or not positive definite even when damped.

    Args:
        values: finite weight of any rank.
        parameters: scales and zero points, with blocks of any shape.
        format: of at most 8 bits.
        moments: Gram matrices of the terms that multiply the columns, up to a factor: sums of their pairwise products,
            of shape (groups, columns, columns).
        matrices: view of the weight as matrices.
        damping: share of the mean diagonal that is added to the diagonal.
    """
    weight = matrices.view(values)
    quantized_zero = np.zeros((), np.uint8) if parameters.zero_point is None else parameters.zero_point
    entries = parameters.effective_scale, quantized_zero
    scale, zero_point = (matrices.view(_spread(entry, parameters, values.shape)) for entry in entries)
    bits = np.empty(matrices.shape, np.uint8)
    groups, rows, columns = matrices.shape
    for together in _parts(groups, columns * columns):
        own = moments[together]
        order, factor = _factors(own, damping)
        for some in _parts(rows, len(order) * columns):
            part = (together, some)
            grid = _Grid(format, _turned(scale[part], order), _turned(zero_point[part], order).astype(np.float32))
            bits[part] = _chosen(_turned(weight[part].astype(np.float32), order), grid, own, order, factor)
    quantized = matrices.back(bits, values.shape).view(format.dtype)
    return QTensor(quantized, parameters, format)


def _parts(count: int, size: int) -> Iterator[slice]:
    step = max(_TOGETHER // max(size, 1), 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _spread(entries: npt.NDArray[Any], parameters: QuantParams, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if np.ndim(entries) == 0:
        return np.broadcast_to(entries, shape)
    for axis, (extent, length) in enumerate(zip(shape, parameters.block_in(shape), strict=True)):
        if length > 1:
            entries = np.repeat(entries, length, axis)[(slice(None),) * axis + (slice(extent),)]
    return entries


def _turned(part: npt.NDArray[Any], order: Order) -> npt.NDArray[Any]:
    """Transpose (groups, rows, columns) to (groups, columns, rows), with the columns in `order`."""
    return np.take_along_axis(part.transpose(0, 2, 1), order[:, :, None], 1)


@dataclass(frozen=True, eq=False)
class _Grid:
    """The quantized values of a part; scale and zero point have its shape, columns in front of rows."""

    format: QuantDType
    scale: Floats
    zero_point: Floats

    def nearest(self, wanted: Floats, place: Any) -> tuple[Bytes, Floats]:
        """Return the nearest quantized values as bytes, and their floats, at a place of the part.

        The arithmetic is that of `numerics.affine.quantize` and `dequantize`.
        """
        scale = self.scale[place]
        scaled = wanted / scale
        if self.format.is_float:
            quantized = np.empty(scaled.shape, self.format.dtype)
            self.format.round_into(scaled, quantized)
            bits = quantized.view(np.uint8)
            return bits, self.format.values[bits & (2**self.format.bits - 1)] * scale
        # Integers stay in float arrays for speed: this runs for each column.
        np.rint(scaled, out=scaled)
        if self._is_shifted:
            scaled += self.zero_point[place]
        # NaN becomes the minimum, as in `QuantDType.round`.
        np.fmin(np.fmax(scaled, self.format.minimum, out=scaled), self.format.maximum, out=scaled)
        bits = scaled.astype(self.format.dtype).view(np.uint8)
        if self._is_shifted:
            scaled -= self.zero_point[place]
        return bits, np.multiply(scaled, scale, out=scaled)

    @cached_property
    def _is_shifted(self) -> bool:
        return bool(self.zero_point.any())


def _chosen(weight: Floats, grid: _Grid, moments: Moments, order: Order, factor: Floats) -> Bytes:
    """Return the quantized values (groups, rows, columns) of a part; the nearest if GPTQ is no better."""
    plain, decoded = grid.nearest(weight, ...)
    bits, lost = _rounded(weight, grid, factor)
    back = np.argsort(order, axis=1)[:, :, None]
    now, plainly = (np.take_along_axis(values, back, 1) for values in (lost, weight - decoded))
    with np.errstate(over="ignore", invalid="ignore"):
        # Error of rounding to nearest, less the error of GPTQ.
        gain = ((plainly - now) * (moments @ (plainly + now))).sum(1)
    chosen = np.where(gain[:, None] > 0, bits, plain)
    return np.take_along_axis(chosen, back, 1).transpose(0, 2, 1)


def _rounded(w: Floats, grid: _Grid, factor: Floats) -> tuple[Bytes, Floats]:
    """Round from the last column to the first, in blocks of columns as in the paper.

    The paper rounds from the first column on, with a Cholesky factor of the inverse of H. The factor of H = L L^T needs
    no inverse: the error of a channel is the sum over columns j of `(sum over k >= j of e_k L_kj) ** 2`. Once the
    columns behind j are rounded, term j is smallest at the quantized value nearest to
    `w_j + sum over k > j of e_k L_kj / L_jj`. The sums over columns behind a block are one matrix multiplication.

    Returns:
        The quantized values q as bytes, and the errors e = w - q.
    """
    q, e = np.empty(w.shape, np.uint8), np.zeros_like(w)
    diagonal = np.diagonal(factor, axis1=1, axis2=2)
    for stop in range(w.shape[1], 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        unit = (factor[:, start:, start:stop] / diagonal[:, None, start:stop]).transpose(0, 2, 1)
        wanted = w[:, start:stop] + unit[:, :, stop - start :] @ e[:, stop:]
        near = np.ascontiguousarray(unit[:, :, : stop - start])
        for j in range(stop - 1, start - 1, -1):
            row = j - start
            made_up = near[:, row : row + 1, row + 1 :] @ e[:, j + 1 : stop]
            aim = (wanted[:, row] + made_up[:, 0]).astype(np.float32, copy=False)
            q[:, j], decoded = grid.nearest(aim, (slice(None), j))
            e[:, j] = w[:, j] - decoded
    return q, e


def _factors(moments: Moments, damping: float) -> tuple[Order, Floats]:
    """Return columns by rising diagonal, (groups, columns), and the lower Cholesky factors of the damped matrices.

    A matrix without a factor gets the identity, which rounds to nearest.
    """
    diagonal = np.diagonal(moments, axis1=1, axis2=2).astype(np.float64)
    order = np.argsort(diagonal, axis=1, kind="stable")
    with np.errstate(over="ignore"):
        size = diagonal.mean(1)
    factors = np.empty(moments.shape, np.float32)
    for group in _left(moments, order, size, damping, factors):
        dampings = (damping, *_MORE) if 0 < size[group] < np.inf else ()
        if not any(_factorized(moments[group], order[group], size[group], more, factors[group]) for more in dampings):
            factors[group] = np.eye(order.shape[1], dtype=np.float32)
    return order, factors


def _left(
    moments: Moments, order: Order, size: npt.NDArray[np.float64], damping: float, factors: Floats
) -> Sequence[int]:
    """Compute the Cholesky factors of many small matrices at once, in place; return the groups that are left."""
    groups, count = order.shape
    if count > _BLOCK or groups == 1:
        return range(groups)
    each = np.arange(count)
    ordered = moments[np.arange(groups)[:, None, None], order[:, :, None], order[:, None]]
    with np.errstate(all="ignore"):
        factors[...] = ordered / size[:, None, None]
    factors[:, each, each] += np.float32(damping)
    usual = (size > 0) & np.isfinite(size) & np.isfinite(factors).all((1, 2))
    try:
        factors[usual] = np.linalg.cholesky(factors[usual].astype(np.float64))
    except np.linalg.LinAlgError:
        return range(groups)
    return np.flatnonzero(~usual).tolist()


def _factorized(matrix: Moments, order: Order, size: float, damping: float, factor: Floats) -> bool:
    """Compute the Cholesky factor of a matrix in place, blockwise; return whether it exists."""
    count = len(order)
    blocks = [slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]
    for block in blocks:
        factor[block] = matrix[order[block]][:, order] / size
    factor[np.diag_indices(count)] += np.float32(damping)
    if not np.isfinite(factor).all():
        return False
    for number, block in enumerate(blocks):
        try:
            corner = np.linalg.cholesky(factor[block, block].astype(np.float64))
        except np.linalg.LinAlgError:
            return False
        factor[block, block] = corner
        below = factor[block.stop :, block]
        below[...] = below @ np.linalg.inv(corner).T
        for later in blocks[number + 1 :]:
            factor[later, block.stop : later.stop] -= factor[later, block] @ below[: later.stop - block.stop].T
    return True


# --- weights that GPTQ covers, and the statistics they need ---------------------------------------------------------

ROWS: Final = 8192
"""Rows of activations for each Gram matrix, from all samples together."""
GRAM_BYTES: Final = 1 << 30
"""Default limit in bytes of the Gram matrices of a group of samples."""
# Grouped convolutions use one in this many rows, because their many matrices have few columns.
_GROUPED = 8

_MOST_BITS = 8
_WEIGHT, _RECURRENCE = 1, 2
_FLOAT64_BYTES = 8


@dataclass(frozen=True)
class GemmView:
    """A weight as matrices, with the statistic of the activations that it multiplies."""

    request: Request
    matrices: WeightMatrices

    @property
    def gram_bytes(self) -> int:
        """Largest size of the Gram matrices in bytes."""
        groups, _, columns = self.matrices.shape
        return groups * columns * columns * _FLOAT64_BYTES


@dataclass(frozen=True)
class Gptq:
    """Settings of GPTQ, and the weights it covers.

    Attributes:
        rows: largest number of rows of activations from each sample.
        damping: share of the mean diagonal of a Gram matrix that is added to its diagonal.
        bits: weights of more bits are rounded to nearest.
        memory: limit of all Gram matrices in bytes. Weights whose matrices do not fit are rounded to nearest.
    """

    rows: int
    damping: float = DAMPING
    bits: int = _MOST_BITS
    memory: int = GRAM_BYTES

    @classmethod
    def of_samples(
        cls, samples: int, damping: float = DAMPING, bits: int = _MOST_BITS, memory: int = GRAM_BYTES
    ) -> Gptq:
        """Return settings with which all samples together give about `ROWS` rows.

        >>> Gptq.of_samples(100).rows
        82
        """
        return cls(-(-ROWS // max(samples, 1)), damping, bits, memory)

    def covers(self, spec: QuantSpec) -> bool:
        """Whether GPTQ applies to weights of a spec. Encoders of packages keep their own values."""
        free = isinstance(spec.method, Method) and not spec.is_followed
        return free and format_named(spec.format).bits <= min(self.bits, _MOST_BITS)


@dataclass(frozen=True, eq=False)
class HessianInfo:
    """The Gram matrices of a weight, the view of the weight as matrices, and the damping; see `round_by_gptq`."""

    moments: Moments
    matrices: WeightMatrices
    damping: float = DAMPING


def gemm_view_of(node: Node, index: int, shape: tuple[int, ...], rows: int) -> GemmView | None:
    """Return how a node multiplies its input `index`; None if that is unknown.

    Args:
        node: a node of a prepared graph.
        index: index of the weight among its inputs.
        shape: shape of the weight.
        rows: largest number of rows of activations from each sample.
    """
    if facts_of(node).recurrent:
        return _recurrent_sums(node, index, shape, rows)
    data: Any = node.inputs[0]
    if not isinstance(data, Variable) or index != _WEIGHT:
        return None
    if node.op == "Conv":
        return _patches(node, data, shape, rows)
    if node.op in ("Gemm", "MatMul") and len(shape) == 2:
        transposed = node.op == "Gemm" and bool(node.attrs.get("transB", 0))
        axis = 0 if node.op == "Gemm" and node.attrs.get("transA", 0) else -1
        request = Request.of(data.name, "hessian", axis, rows=rows)
        return GemmView(request, WeightMatrices.of_product((shape[0], shape[1]), transposed=transposed))
    return None


def _patches(node: Node, data: Variable, shape: tuple[int, ...], rows: int) -> GemmView | None:
    pads = [int(pad) for pad in node.attrs.get("pads", ())]
    if node.attrs.get("auto_pad", "NOTSET") != "NOTSET" or min(pads, default=0) < 0:
        return None
    groups = int(node.attrs.get("group", 1))
    extents = {"kernel": shape[2:], "pads": pads}
    extents |= {name: node.attrs[name] for name in ("strides", "dilations") if name in node.attrs}
    options: dict[str, Option] = {name: ",".join(map(str, numbers)) for name, numbers in extents.items() if numbers}
    rows = rows if groups == 1 else -(-rows // _GROUPED)
    request = Request.of(data.name, "hessian", 1, rows=rows, groups=groups, **options)
    return GemmView(request, WeightMatrices.of_convolution(shape, groups))


def _recurrent_sums(node: Node, index: int, shape: tuple[int, ...], rows: int) -> GemmView | None:
    """Return the view of a weight of a one-directional cell.

    The recurrent weight multiplies the output of the previous step; only the initial state is not observed.
    """
    data: Any = node.inputs[0] if index == _WEIGHT else node.outputs[0] if index == _RECURRENCE else None
    if not isinstance(data, Variable) or data.is_empty() or shape[0] != 1 or node.attrs.get("layout", 0):
        return None
    return GemmView(Request.of(data.name, "hessian", -1, rows=rows), WeightMatrices.of_cell(shape))


def within(sizes: Mapping[Request, int], memory: int) -> Iterator[Request]:
    """Yield the smallest requests that fit the memory together."""
    for request, size in sorted(sizes.items(), key=lambda pair: pair[1]):
        memory -= size
        if memory < 0:
            return
        yield request


def hessian_info(
    gram: HessianAccumulator, sums: GemmView, factors: NDArray[np.float64] | None, damping: float, *, corrected: bool
) -> HessianInfo:
    """Compute the Gram matrices of a weight.

    Args:
        gram: the statistic of its activations.
        sums: view of the weight as matrices.
        factors: divisor of each term, in the weight's shape; None without equalization.
        damping: share of the mean diagonal of a Gram matrix that is added to its diagonal.
        corrected: whether the bias corrects the mean error, so that only the variance counts.
    """
    moments = gram.moments(np.float32, centered=corrected)
    if factors is not None:
        # All output channels multiply the same terms.
        each = sums.matrices.view(factors)[:, 0]
        # Very large values overflow; a matrix that is not finite is not used.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            moments /= (each[:, :, None] * each[:, None]).astype(np.float32)
    return HessianInfo(moments, sums.matrices, damping)
