"""What a constant repeats along its axes."""

from __future__ import annotations

import numpy as np

from onnxq.rewrite.constants.linear import Array


def without_repeats(values: Array) -> Array:
    """Return an array with axes of one wherever all along an axis is the same, bit for bit.

    >>> without_repeats(np.array([[1, 2], [1, 2], [1, 2]])).tolist(), without_repeats(np.zeros((2, 3))).shape
    ([[1, 2]], (1, 1))
    """
    if values.dtype.itemsize not in (1, 2, 4, 8):
        return values
    # Zeros of both signs are equal as numbers, and a NaN is not equal to itself.
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(values.shape)
    for axis, extent in enumerate(values.shape):
        first = bits.take([0], axis) if extent > 1 else bits
        # The first two tell most apart.
        if extent > 1 and np.array_equal(first, bits.take([1], axis)) and bool((bits == first).all()):
            bits, values = first, values.take([0], axis)
    return values
