"""Weights as matrices: which of their values belong to one sum, and to one output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Matrices:
    """A weight seen as one matrix for each group of channels: a row for each output, a column for each term of a sum.

    Attributes:
        split: shape of the weight with the groups apart from what they hold.
        order: axes of ``split`` in the order groups, rows, columns.
        shape: (groups, rows, columns).

    >>> Matrices.of_product((3, 4)).view(np.arange(12).reshape(3, 4))[0, 1]
    array([1, 5, 9])
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, int, int]

    @classmethod
    def of_product(cls, shape: tuple[int, int], *, transposed: bool = False) -> Matrices:
        """Return those of a weight of shape (columns, rows), or (rows, columns) when it is transposed."""
        if transposed:
            return cls((1, *shape), (0, 1, 2), (1, *shape))
        return cls((1, *shape), (0, 2, 1), (1, shape[1], shape[0]))

    @classmethod
    def of_convolution(cls, shape: tuple[int, ...], groups: int) -> Matrices:
        """Return those of a Conv's weight of shape (rows of all groups, channels of one, *kernel)."""
        whole = groups, shape[0] // groups, math.prod(shape[1:])
        return cls(whole, (0, 1, 2), whole)

    @classmethod
    def of_cell(cls, shape: tuple[int, ...]) -> Matrices:
        """Return those of a recurrent cell's weight of shape (directions, rows, columns)."""
        directions, rows, columns = shape
        return cls((directions, rows, columns), (0, 1, 2), (directions, rows, columns))

    def view(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values of the weight's shape as an array of shape (groups, rows, columns)."""
        return values.reshape(self.split).transpose(self.order).reshape(self.shape)

    def back(self, values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return the array of the weight's shape that ``view`` makes these values of."""
        turned = values.reshape([self.split[axis] for axis in self.order])
        return np.ascontiguousarray(turned.transpose(np.argsort(self.order))).reshape(shape)
