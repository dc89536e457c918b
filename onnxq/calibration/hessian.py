"""The kind ``hessian``: sums of x and of x x^T over rows of a tensor, or over the patches of a convolution."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
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

# Rows are buffered until they take 1/16 of the bytes of the products.
_WAITING = 16
# The products are symmetric: they are kept in bands of this many rows, each from its first diagonal element on.
_BAND = 256


@dataclass(frozen=True, eq=False)
class HessianAccumulator(Accumulator):
    """The sums of x and of x x^T over rows x of n values, for each group of channels.

    ``axis`` is the channel axis. Options:

    - ``rows``: about the most evenly spaced rows to take from each sample; 0 takes all.
    - ``groups``: number of equal groups of channels, each with its own sums.
    - ``kernel``, ``strides``, ``pads``, ``dilations``: sizes as in ``3,3``; pads are at the beginning and at the end of
      each axis, as in ``1,1,1,1``. With a kernel, the tensor is the input of a convolution, with axes batch, channels
      and space. A row is then a patch: the channels of a group times the kernel, in the layout of the weight of an
      output channel.

    Args:
        count: Number of rows.
        sums: Sums of the rows that were multiplied, float64 of shape (groups, n).
        products: Sums of x x^T in bands of rows, each from its diagonal on: float64 of shape (groups, elements); of
            shape (groups, 0) before any row is multiplied.
        waiting: Rows that are not multiplied yet, float32 of shape (rows, groups, n).
    """

    kind: ClassVar[str] = "hessian"
    options: ClassVar[tuple[tuple[str, Option], ...]] = (("rows", HESSIAN_ROWS),)

    count: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    products: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    waiting: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))

    @classmethod
    def observed(cls, seen: TensorSample, request: Request) -> HessianAccumulator:
        """Return the rows of one array, which are not multiplied yet.

        Raises:
            DataError: The axis does not exist, the groups do not divide the channels, the kernel does not fit the
                array, or an element is NaN or infinite.
        """
        # Raises if an element is NaN or infinite.
        _ = seen.ends
        rows = rows_of(seen, request).astype(np.float32)
        groups, size = rows.shape[1:]
        return cls(len(rows), np.zeros((groups, size)), np.zeros((groups, 0)), rows)

    def merge(self, other: HessianAccumulator) -> HessianAccumulator:
        if not self.count or not other.count:
            return self if self.count else other
        for mine, theirs in zip(self.sums.shape, other.sums.shape, strict=True):
            check_channels(mine, theirs)
        products = [array for array in (self.products, other.products) if array.size]
        merged = HessianAccumulator(
            self.count + other.count,
            self.sums + other.sums,
            reduce(np.add, products) if products else self.products,
            np.concatenate([self.waiting, other.waiting]),
        )
        groups, size = merged.sums.shape
        return merged.multiplied() if merged.waiting.nbytes * _WAITING > groups * size * size * 8 else merged

    def multiplied(self) -> HessianAccumulator:
        """Return the same statistic with all rows multiplied."""
        if not len(self.waiting):
            return self
        groups, size = self.sums.shape
        sums = self.sums.copy()
        products = self.products.copy() if self.products.size else np.zeros((groups, _packed_size(size)))
        for start in range(0, len(self.waiting), _BAND):
            rows = self.waiting[start : start + _BAND].astype(np.float64).transpose(1, 0, 2)
            sums += rows.sum(1)
            for first, last, bands in _bands(products, size):
                bands += rows[:, :, first:last].transpose(0, 2, 1) @ rows[:, :, first:]
        return HessianAccumulator(self.count, sums, products, self.waiting[:0])

    def means(self) -> NDArray[np.float64]:
        """Return E[x], float64 of shape (groups, n)."""
        return np.asarray(self.multiplied().sums / max(self.count, 1))

    def moments(
        self, dtype: type[np.floating[Any]] = np.float64, *, centered: bool = False
    ) -> NDArray[np.floating[Any]]:
        """Return E[x x^T], of shape (groups, n, n), centered at the means if asked for.

        In float32, 4,096 values take 64 MB. Elements beyond the dtype are not finite, which makes a matrix useless.
        """
        whole = self.multiplied()
        means = whole.means()
        groups, size = whole.sums.shape
        found = np.zeros((groups, size, size), dtype)
        for first, last, bands in _bands(whole.products, size):
            with np.errstate(over="ignore", invalid="ignore"):
                offset = means[:, first:last, None] * means[:, None, first:] if centered else 0.0
                found[:, first:last, first:] = bands / max(self.count, 1) - offset
            found[:, first:, first:last] = found[:, first:last, first:].transpose(0, 2, 1)
        return found

    @cached_property
    def digest(self) -> str:
        """A digest of the sums."""
        found = hashlib.blake2b(digest_size=16)
        for array in self.arrays().values():
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def arrays(self) -> Arrays:
        whole = self.multiplied()
        return {"count": np.array([self.count], np.int64), "sums": whole.sums, "products": whole.products}

    @classmethod
    def restored(cls, arrays: Arrays) -> HessianAccumulator:
        count, sums, products = restored_from(arrays, ("count", "sums", "products"))
        if sums.ndim != 2 or products.shape != (len(sums), _packed_size(sums.shape[1])):
            raise ValueError("sums and products do not fit")
        whole = int(count[0])
        # Extremes need no second array of the size of the products.
        if whole < 0 or not all(
            np.isfinite([part.min(initial=0), part.max(initial=0)]).all() for part in (sums, products)
        ):
            raise ValueError("sums or products are not finite")
        if any((np.diagonal(band, axis1=1, axis2=2) < 0).any() for _, _, band in _bands(products, sums.shape[1])):
            raise ValueError("sums of squares are negative")
        return cls(whole, sums, products, np.zeros((0, *sums.shape), np.float32))


def rows_of(seen: TensorSample, request: Request) -> NDArray[Any]:
    """Return the requested rows of an array, float of shape (rows, groups, values).

    Raises:
        DataError: See `HessianAccumulator.observed`.
    """
    axis, groups = seen.axis(request.axis), int(request.option("groups", 1))
    array = seen.values.reshape(seen.array.shape)
    channels: int = array.shape[axis]
    if groups < 1 or channels % groups:
        raise DataError(f"Tensor {seen.tensor!r} has {channels} channels, expected a multiple of {groups} groups")
    most = int(request.option("rows", 0)) or None
    if kernel := _extents(request, "kernel", ()):
        patches = _patches(seen, array, kernel, request, most)
        return patches.reshape(-1, groups, channels // groups * math.prod(kernel))
    rows = np.moveaxis(array, axis, -1).reshape(-1, channels)
    return rows[seen.selection(len(rows), most)].reshape(-1, groups, channels // groups)


def _patches(
    seen: TensorSample, array: NDArray[Any], kernel: tuple[int, ...], request: Request, most: int | None
) -> NDArray[Any]:
    """Return patches, float of shape (rows, channels, *kernel)."""
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


def _packed_size(size: int) -> int:
    return sum(min(_BAND, size - first) * (size - first) for first in range(0, size, _BAND))


def _bands(packed: NDArray[np.float64], size: int) -> Iterator[tuple[int, int, NDArray[np.float64]]]:
    """Yield the first row of each band, which is also its first column, its end row, and a view of it."""
    start = 0
    for first in range(0, size, _BAND):
        rows, columns = min(_BAND, size - first), size - first
        bands = packed[:, start : start + rows * columns].reshape(len(packed), rows, columns)
        yield first, first + rows, bands
        start += rows * columns
