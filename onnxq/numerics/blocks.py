"""Blocks of values that share a scale, and a walk over a tensor in pieces that fit the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.errors import SchemeError
from onnxq.numerics.spec import Granularity

Shape = tuple[int, ...]
Slices = tuple[slice, ...]

PIECE = 2**20
"""Elements of a piece: few enough for the last cache, and enough that threads seldom wait for the interpreter."""

_SHORT_ROW = 512


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, reshaped so that its scales broadcast without being repeated.

    Attributes:
        values: slices of the part in the tensor.
        scales: slices of its scales in the array of scales.
        split: shape of the part. An axis with several blocks is split into blocks and positions within a block.
        spread: shape of the scales that broadcasts against `split`.
        shared: axes of `split` along which a scale is shared.
    """

    values: Slices
    scales: Slices
    split: Shape
    spread: Shape
    shared: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.split)

    def part(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of the part of `values`, of shape `split`."""
        # The ellipsis makes the result a view for a scalar tensor, too.
        place: tuple[Any, ...] = (*self.values, ...)
        view: npt.NDArray[Any] = values[place].reshape(self.split)
        return view

    def own(self, scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of the part's entries of `scales`, which broadcasts with the part."""
        place: tuple[Any, ...] = (*self.scales, ...)
        view: npt.NDArray[Any] = scales[place].reshape(self.spread)
        return view

    def gather(self, terms: npt.NDArray[Any], *into: tuple[np.ufunc, npt.NDArray[Any]]) -> None:
        """Reduce the terms of each block and combine the result with the block's entry of an array.

        Args:
            terms: array of shape `split`.
            into: pairs of a ufunc, such as `np.add`, and an array of the scales' shape.
        """
        axes = self.shared
        if axes and axes[-1] == terms.ndim - 1 and terms.shape[-1] < _SHORT_ROW:
            # Reducing many short rows is slow, so the shared axes move to the front.
            axes = tuple(range(len(axes)))
            terms = np.moveaxis(terms, self.shared, axes).copy()
        for combine, array in into:
            entries = self.own(array)
            found = combine.reduce(terms, axis=axes, dtype=np.float64 if combine is np.add else None)
            combine(entries, np.reshape(found, self.spread), out=entries)


def along(values: npt.NDArray[Any], axis: int, rank: int) -> npt.NDArray[Any]:
    """Return a vector as an array of a rank, with its entries along one axis.

    >>> along(np.array([1, 2]), -3, 4).shape
    (1, 2, 1, 1)
    """
    return values.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def block_shape(
    granularity: Granularity | Shape, shape: Sequence[int], *, channel_axis: int, reduction_axis: int
) -> Shape:
    """Return the extents of the values that share a scale, one for each axis of a tensor.

    Args:
        granularity: granularity or block shape of a spec.
        shape: shape of the tensor.
        channel_axis: axis of the operator's output channels.
        reduction_axis: axis of the operator's sum, along which a single block extent lies.

    Raises:
        SchemeError: the block has more axes than the tensor.

    >>> block_shape((32,), (64, 128), channel_axis=1, reduction_axis=0)
    (32, 1)
    >>> block_shape((2, 16), (8, 64, 128), channel_axis=2, reduction_axis=1)
    (1, 2, 16)
    """
    rank = len(shape)
    if granularity is Granularity.TENSOR:
        return tuple(max(extent, 1) for extent in shape)
    if granularity is Granularity.CHANNEL:
        return tuple(1 if axis == channel_axis % rank else max(extent, 1) for axis, extent in enumerate(shape))
    if len(granularity) == 1:
        return tuple(granularity[0] if axis == reduction_axis % rank else 1 for axis in range(rank))
    extents = granularity[-rank:] if rank else ()
    if math.prod(granularity) != math.prod(extents):
        raise SchemeError(
            f"blocks of {list(granularity)} have {len(granularity)} axes and a weight of shape {list(shape)} has "
            f"{rank}; give as many extents as the weight has axes, or fewer"
        )
    return (1,) * (rank - len(extents)) + tuple(extents)


def grid_shape(shape: Sequence[int], block: Shape) -> Shape:
    """Return the number of blocks along each axis; the last one may be partial.

    >>> grid_shape((70, 4), (32, 1))
    (3, 4)
    """
    return tuple(-(-extent // length) for extent, length in zip(shape, block, strict=True))


def pieces(shape: Sequence[int], block: Shape, elements: int = PIECE) -> Iterator[Piece]:
    """Cut a tensor into pieces of at most `elements` values, in row-major order.

    Along each axis a piece holds whole blocks of equal length, or a part of one block.

    Args:
        shape: shape of the tensor.
        block: extents of a block, one for each axis.
        elements: largest number of values in a piece.
    """
    room, cuts = max(elements, 1), []
    for extent, length in zip(reversed(shape), reversed(block), strict=True):
        taken = min(extent, room)
        cuts.append(list(_cuts(extent, length, max(taken, 1))))
        room = room // taken if taken == extent and taken else 1
    for cut in product(*reversed(cuts)):
        split: list[int] = []
        spread: list[int] = []
        shared: list[int] = []
        for start, stop, length in cut:
            blocks = (stop - start) // length
            if length == 1:
                split.append(blocks)
                spread.append(blocks)
                continue
            if blocks > 1:
                split.append(blocks)
                spread.append(blocks)
            shared.append(len(split))
            split.append(length)
            spread.append(1)
        yield Piece(
            tuple(slice(start, stop) for start, stop, _ in cut),
            tuple(slice(start // whole, -(-stop // whole)) for (start, stop, _), whole in zip(cut, block, strict=True)),
            tuple(split),
            tuple(spread),
            tuple(shared),
        )


def whole_blocks(shape: Sequence[int], block: Shape, elements: int) -> Iterator[tuple[Slices, Slices]]:
    """Cut a tensor into parts of whole blocks, of at most about `elements` values.

    Args:
        shape: shape of the tensor.
        block: extents of a block, one for each axis.
        elements: number of values in a part; a part has one block at least.

    Yields:
        The slices of a part in the tensor and in the array of scales, in row-major order. A partial block has parts of
        its own.

    >>> [place for _, place in whole_blocks((4, 6), (2, 2), 16)]
    [(slice(0, 1, None), slice(0, 3, None)), (slice(1, 2, None), slice(0, 3, None))]
    """
    limits = [min(extent, length) for extent, length in zip(shape, block, strict=True)]
    room, cuts = max(elements // max(math.prod(limits), 1), 1), []
    for extent, length in zip(reversed(shape), reversed(block), strict=True):
        blocks = -(-extent // length)
        taken = max(min(blocks, room), 1)
        cuts.append([(start, stop) for start, stop, _ in _cuts(extent, length, taken * length)])
        room = room // taken if taken == blocks else 1
    for cut in product(*reversed(cuts)):
        yield (
            tuple(slice(start, stop) for start, stop in cut),
            tuple(slice(start // length, -(-stop // length)) for (start, stop), length in zip(cut, block, strict=True)),
        )


def bands(shape: Sequence[int], block: Shape, elements: int, piece: int = PIECE) -> list[tuple[Slices, Slices]]:
    """Cut a tensor along its first axis, so that `pieces` cuts each band as it cuts the whole tensor.

    Args:
        shape: shape of the tensor.
        block: extents of a block, one for each axis.
        elements: about how many values a band has.
        piece: most values of a piece, see `pieces`.

    Returns:
        The slices of each band in the tensor and in the array of scales.

    >>> bands((96, 2), (32, 1), 128, piece=64)
    [((slice(0, 64, None),), (slice(0, 2, None),)), ((slice(64, 96, None),), (slice(2, 3, None),))]
    """
    axis = next((place for place, extent in enumerate(shape) if extent > 1), 0)
    if not shape or not math.prod(shape):
        return [((), ())]
    extent, length, side = shape[axis], block[axis], math.prod(shape[axis + 1 :])
    # Pieces of several blocks begin at multiples of `step`; the other ones are parts of a block.
    step = max(min(extent, piece // side) // length, 1) * length
    step *= max(elements // (step * side), 1)
    lead = (slice(None),) * axis
    return [
        (
            (*lead, slice(start, min(start + step, extent))),
            (*lead, slice(start // length, -(-min(start + step, extent) // length))),
        )
        for start in range(0, extent, step)
    ]


def _cuts(extent: int, length: int, most: int) -> Iterator[tuple[int, int, int]]:
    whole = extent // length * length
    if most >= length:
        step = most // length * length
        for start in range(0, whole, step):
            yield start, min(start + step, whole), length
        if whole < extent:
            yield whole, extent, extent - whole
    else:
        for first in range(0, extent, length):
            last = min(first + length, extent)
            for start in range(first, last, most):
                stop = min(start + most, last)
                yield start, stop, stop - start
