"""Layouts: the shapes that blocked scales and their weight take in nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxq.numerics.affine import QTensor, QuantParams


@dataclass(frozen=True)
class Layout:
    """The shapes of one weight and its scales.

    Attributes:
        shape: shape of the weight.
        grid: shape of the scale, with the rank of the weight.
        block: elements along each axis that share a scale. The last block of an axis may be shorter.

    >>> Layout((6, 70), (6, 3), (1, 32)).split
    (6, 3, 32)
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, quantized: QTensor) -> Layout:
        """Return the layout of a quantized weight."""
        shape, scales = quantized.shape, quantized.parameters.scale.shape
        grid = (1,) * (len(shape) - len(scales)) + scales
        return cls(shape, grid, quantized.parameters.block_in(shape))

    @cached_property
    def blocked(self) -> tuple[int, ...]:
        """The axes with several scales, each for several elements."""
        return tuple(axis for axis, count in enumerate(self.grid) if 1 < count < self.shape[axis])

    @property
    def padded(self) -> tuple[int, ...]:
        """The weight's shape with its last blocks filled up."""
        return tuple(
            self.grid[axis] * self.block[axis] if axis in self.blocked else extent
            for axis, extent in enumerate(self.shape)
        )

    @property
    def split(self) -> tuple[int, ...]:
        """The padded shape with each blocked axis split in two: blocks, and elements of a block."""
        return self._interleaved(self.shape, self.block)

    @property
    def split_scale(self) -> tuple[int, ...]:
        """The shape of the scale that is multiplied with the split weight."""
        return self._interleaved(self.grid, (1,) * len(self.grid))

    def _interleaved(self, plain: tuple[int, ...], inner: tuple[int, ...]) -> tuple[int, ...]:
        pairs = (
            (self.grid[axis], inner[axis]) if axis in self.blocked else (extent,) for axis, extent in enumerate(plain)
        )
        return tuple(extent for pair in pairs for extent in pair)

    @property
    def linear(self) -> Linear | None:
        """The attributes of one DequantizeLinear for this layout; None if it cannot be expressed."""
        several = [axis for axis, count in enumerate(self.grid) if count > 1]
        if not self.blocked:
            if not several:
                return Linear(None, None, ())
            return Linear(several[0], None, (self.grid[several[0]],)) if len(several) == 1 else None
        axis = self.blocked[0]
        others = [index for index in range(len(self.shape)) if index != axis]
        if len(self.blocked) == 1 and all(self.grid[index] == self.shape[index] for index in others):
            return Linear(axis, self.block[axis], self.grid)
        return None


def transposed(quantized: QTensor) -> QTensor:
    """Return a quantized matrix with rows and columns exchanged."""
    old = quantized.parameters
    parameters = QuantParams(
        old.scale.T,
        None if old.zero_point is None else old.zero_point.T,
        old.tensor_scale,
        old.block_in(quantized.shape)[::-1],
    )
    return QTensor(np.ascontiguousarray(quantized.values.T), parameters, quantized.format)


@dataclass(frozen=True)
class Linear:
    """Axis and block size of a DequantizeLinear, and the shape of its scale and zero point.

    The axis is None for one scale, the block size without blocks.
    """

    axis: int | None
    block_size: int | None
    shape: tuple[int, ...]
