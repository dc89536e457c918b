"""Attention-mask constants in activations, told apart from data."""

from __future__ import annotations

from onnxq.evidence.statistic import MASK
from onnxq.evidence.value_range import Range

# Fewer than 1 in so many elements are outliers, and therefore data.
_RARE = 4096
# Beyond this magnitude nothing is data.
_NEVER_DATA = 1e30


def sentinels(found: Range) -> tuple[float, ...]:
    """Return the extremes that are attention-mask constants such as -1e4 or -3.4e38 rather than data.

    They are recognised by a wide gap: every element of at least `MASK` in magnitude lies within 1/8 of an extreme, and
    the others, of which there are some, within `MASK` / 8 of zero. Fewer than 1 in 4096 elements, below 1e30 in
    magnitude, are outliers and therefore data.
    """
    far = found.count - found.core_count
    if not far or not found.core_count or max(-found.core_minimum, found.core_maximum) > MASK / 8:
        return ()
    masks = tuple(value for value in (found.minimum, found.maximum) if abs(value) >= MASK)
    if far < found.count / _RARE and min(map(abs, masks)) < _NEVER_DATA:
        return ()
    near = (found.below <= found.minimum * 7 / 8, found.above >= found.maximum * 7 / 8)
    return masks if all(near) else ()


def data_range(found: Range) -> tuple[float, float]:
    """Return the least and the greatest element that is no mask constant."""
    return (found.core_minimum, found.core_maximum) if sentinels(found) else (found.minimum, found.maximum)
