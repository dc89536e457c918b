"""The kind ``gram``: sums of x and of x x^T over rows of a tensor, or over the patches of a convolution."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from onnxq.calibration.accumulators import (
    Accumulator,
    Arrays,
    Option,
    Request,
    TensorSample,
    check_channels,
    restored_from,
)
from onnxq.errors import DataError

HESSIAN_ROWS = 128
"""Rows of each sample: 64 samples then give 8,000, which is what error-compensating rounding needs."""

# Rows are rounded to so many bits below the power of two above their sample's greatest magnitude. Their products then
# are whole numbers of a grid, which float64 adds up without rounding, in any order, for as many rows as anybody has and
# samples whose magnitudes are up to 2**7 apart; beyond that only the last bits depend on the order.
_BITS = 12
# Rows wait to be multiplied until they take this share of the bytes of the products.
_WAITING = 16
# Of the products, which are symmetric, so many rows are kept from their first diagonal element on, then so many more.
_BAND = 256


@dataclass(frozen=True, eq=False)
class HessianAccumulator(Accumulator):
    """The sums of x and of x x^T over rows x of n values each, for each group of channels.

    The axis is that of the channels. Options:

    - ``rows``: at most about so many evenly spaced rows of each sample are taken; 0 takes all.
    - ``groups``: channels are split into so many equal groups, each with sums of its own.
    - ``kernel``, ``strides``, ``pads``, ``dilations``: extents as in ``3,3``, and pads at the beginning and at the end
      of each axis as in ``1,1,1,1``. With a kernel, the tensor is that of a convolution, its axes batch, channels and
      space, and a row is a patch: the channels of a group times the kernel, as the weight of an output channel lies.

    Args:
        count: Number of rows.
        sums: Of the rows that were multiplied, float64 of shape (groups, n).
        products: In bands of rows, each from its diagonal on: float64 of shape (groups, elements); of
            shape (groups, 0) while no row was multiplied.
        waiting: Rows that wait to be multiplied, int16 of shape (rows, groups, n).
        exponents: What each of these is in units of, as a power of two, int32 of shape (rows,).
    """

    kind: ClassVar[str] = "hessian"
    options: ClassVar[tuple[tuple[str, Option], ...]] = (("rows", HESSIAN_ROWS),)

    count: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    products: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    waiting: NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 0, 0), np.int16))
    exponents: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def observed(cls, seen: TensorSample, request: Request) -> HessianAccumulator:
        """Return the rows of one array, which are not multiplied yet.

        Raises:
            DataError: The axis is not there, the groups do not divide the channels, the array is not one that the
                kernel slides over, or an element is NaN or infinite.
        """
        low, high = seen.ends
        rows = rows_of(seen, request)
        exponent = math.frexp(max(-low, high))[1] - _BITS
        units = np.rint(np.ldexp(rows.astype(np.float64), -exponent)).astype(np.int16)
        groups, size = units.shape[1:]
        return cls(
            len(units),
            np.zeros((groups, size)),
            np.zeros((groups, 0)),
            units,
            np.full(len(units), exponent, np.int32),
        )

    @classmethod
    def bytes_kept(cls, request: Request, elements: int, samples: int) -> int:
        """Return about how much memory it takes; see `Accumulator.bytes_kept`."""
        # There seldom are more channels than places.
        groups = int(request.option("groups", 1))
        patch = math.prod(int(extent) for extent in str(request.option("kernel", "1")).split(","))
        return groups * (max(math.isqrt(elements) // groups, 1) * patch) ** 2 * np.dtype(np.float64).itemsize // 2

    def merge(self, other: HessianAccumulator) -> HessianAccumulator:
        """Return the sums of the rows of both.

        Raises:
            DataError: The numbers of groups or channels differ.
        """
        if not self.count or not other.count:
            return self if self.count else other
        for mine, theirs in zip(self.sums.shape, other.sums.shape, strict=True):
            check_channels(mine, theirs)
        merged = HessianAccumulator(
            self.count + other.count,
            self.sums + other.sums,
            _sum(self.products, other.products),
            _both(self.waiting, other.waiting),
            np.concatenate([self.exponents, other.exponents]),
        )
        groups, size = merged.sums.shape
        return merged.multiplied() if merged.waiting.nbytes * _WAITING > groups * size * size * 8 else merged

    def multiplied(self) -> HessianAccumulator:
        """Return the same with no rows waiting."""
        if not len(self.waiting):
            return self
        groups, size = self.sums.shape
        sums = self.sums.copy()
        products = self.products.copy() if self.products.size else np.zeros((groups, _packed_size(size)))
        for start in range(0, len(self.waiting), _BAND):
            some = slice(start, start + _BAND)
            rows = np.ldexp(self.waiting[some].astype(np.float64), self.exponents[some, None, None]).transpose(1, 0, 2)
            sums += rows.sum(1)
            for first, last, bands in _bands(products, size):
                bands += rows[:, :, first:last].transpose(0, 2, 1) @ rows[:, :, first:]
        return HessianAccumulator(self.count, sums, products)

    def means(self) -> NDArray[np.float64]:
        """Return E[x], float64 of shape (groups, n)."""
        return np.asarray(self.multiplied().sums / max(self.count, 1))

    def moments(self, dtype: type[np.floating[Any]] = np.float64) -> NDArray[np.floating[Any]]:
        """Return E[x x^T], of shape (groups, n, n); in float32 those of 4,096 values take 64 MB.

        What is beyond the type is infinite, and a matrix with such an element is of no use.
        """
        whole = self.multiplied()
        groups, size = whole.sums.shape
        found = np.zeros((groups, size, size), dtype)
        for first, last, bands in _bands(whole.products, size):
            with np.errstate(over="ignore"):
                found[:, first:last, first:] = bands / max(self.count, 1)
            found[:, first:, first:last] = found[:, first:last, first:].transpose(0, 2, 1)
        return found

    @cached_property
    def digest(self) -> str:
        """Tells apart matrices of other rows, however these were added up."""
        found = hashlib.blake2b(digest_size=16)
        for array in self.arrays().values():
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def arrays(self) -> Arrays:
        """Return the shape, the count, and sums and products of all rows."""
        whole = self.multiplied()
        return {"count": np.array([self.count], np.int64), "sums": whole.sums, "products": whole.products}

    @classmethod
    def restored(cls, arrays: Arrays) -> HessianAccumulator:
        """Return the sums of which these are the arrays."""
        count, sums, products = restored_from(arrays, ("count", "sums", "products"))
        if sums.ndim != 2 or products.shape != (len(sums), _packed_size(sums.shape[1])):
            raise ValueError("sums and products do not fit")
        found = cls(int(count[0]), sums, products)
        found.check()
        return found

    def check(self) -> None:
        """Check that counts, sums and products fit; rows that wait are not multiplied for that.

        Raises:
            ValueError: They do not.
        """
        groups, size = self.sums.shape
        waiting = len(self.waiting)
        shapes = [(groups, _packed_size(size))] + [(groups, 0)] * (waiting == self.count)
        if self.products.shape not in shapes or not waiting <= self.count or len(self.exponents) != waiting:
            raise ValueError("counts and products do not fit")
        if waiting and self.waiting.shape[1:] != (groups, size):
            raise ValueError("rows and sums do not fit")
        # Extremes tell it without a second array of the size of the products.
        if not all(
            np.isfinite([part.min(initial=0), part.max(initial=0)]).all() for part in (self.sums, self.products)
        ):
            raise ValueError("sums or products are not finite")
        bands = _bands(self.products, size) if self.products.size else ()
        if any((np.diagonal(band, axis1=1, axis2=2) < 0).any() for _, _, band in bands):
            raise ValueError("sums of squares are negative")

    @property
    def note(self) -> str:
        """How many rows of which length there are."""
        groups, size = self.sums.shape
        return f"products of {self.count} rows of {size} values in {groups} groups" if self.count else ""


def rows_of(seen: TensorSample, request: Request) -> NDArray[Any]:
    """Return rows of an array as a request wants them, float of shape (rows, groups, values).

    Raises:
        DataError: See `HessianAccumulator.observed`.
    """
    axis, groups = seen.axis(request.axis), int(request.option("groups", 1))
    array = seen.values.reshape(seen.array.shape)
    channels: int = array.shape[axis]
    if groups < 1 or channels % groups:
        raise DataError(f"Tensor {seen.tensor!r} has {channels} channels, expected a multiple of {groups} groups")
    most = int(request.option("rows", 0)) or None
    if request.option("kernel", ""):
        return _patches(seen, array, request, most).reshape(-1, groups, _size(channels, groups, request))
    rows = np.moveaxis(array, axis, -1).reshape(-1, channels)
    return rows[seen.selection(len(rows), most)].reshape(-1, groups, channels // groups)


def _patches(seen: TensorSample, array: NDArray[Any], request: Request, most: int | None) -> NDArray[Any]:
    """Return patches, float of shape (rows, channels, *kernel)."""
    kernel = _extents(request, "kernel", ())
    rank = len(kernel)
    if array.ndim != rank + 2 or seen.axis(request.axis) != 1:
        raise DataError(
            f"Tensor {seen.tensor!r} has {array.ndim} axes, expected {rank + 2} for a kernel of {rank}, channels second"
        )
    strides, dilations = _extents(request, "strides", (1,) * rank), _extents(request, "dilations", (1,) * rank)
    pads = _extents(request, "pads", (0,) * 2 * rank)
    padded = np.pad(array, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    spans = [dilation * (extent - 1) + 1 for extent, dilation in zip(kernel, dilations, strict=True)]
    if any(span > extent for span, extent in zip(spans, padded.shape[2:], strict=True)):
        raise DataError(f"Tensor {seen.tensor!r} is {padded.shape[2:]} with pads, expected a kernel of {spans} to fit")
    windows = sliding_window_view(padded, spans, axis=tuple(range(2, rank + 2)))
    spaced = (slice(None), slice(None), *(slice(None, None, stride) for stride in strides))
    windows = windows[spaced + tuple(slice(None, None, dilation) for dilation in dilations)]
    windows = np.moveaxis(windows, 1, rank + 1)
    positions = windows.shape[: rank + 1]
    places = np.unravel_index(np.arange(math.prod(positions))[seen.selection(math.prod(positions), most)], positions)
    return np.asarray(windows[places])


def _extents(request: Request, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    text = str(request.option(name, ""))
    return tuple(int(extent) for extent in text.split(",")) if text else default


def _size(channels: int, groups: int, request: Request) -> int:
    return channels // groups * math.prod(_extents(request, "kernel", ()))


def _packed_size(size: int) -> int:
    return sum(min(_BAND, size - first) * (size - first) for first in range(0, size, _BAND))


def _bands(packed: NDArray[np.float64], size: int) -> Iterator[tuple[int, int, NDArray[np.float64]]]:
    """Yield the first row of each band, which is its first column too, where its rows end, and a view of it."""
    start = 0
    for first in range(0, size, _BAND):
        rows, columns = min(_BAND, size - first), size - first
        bands = packed[:, start : start + rows * columns].reshape(len(packed), rows, columns)
        yield first, first + rows, bands
        start += rows * columns


def _both(a: NDArray[np.int16], b: NDArray[np.int16]) -> NDArray[np.int16]:
    return np.concatenate([a, b]) if len(a) and len(b) else a if len(a) else b


def _sum(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return a + b if a.size and b.size else a if a.size else b
