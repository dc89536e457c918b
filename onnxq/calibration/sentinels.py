"""Attention-mask constants in activations, told apart from data."""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.calibration.statistic import MASK
from onnxq.calibration.value_range import Range

# Fewer than 1 in so many elements are outliers, and therefore data.
_RARE = 4096
# Half floats have so many bits.
_ROUNDING = 2.0**-10
# Beyond this magnitude nothing is data.
_NEVER_DATA = 1e30


def sentinels(found: Range) -> tuple[float, ...]:
    """Return the extremes that are attention-mask constants such as -1e4 or -3.4e38 rather than data.

    They are recognised by a wide gap and a narrow spread: the elements below `MASK` in magnitude, of which there are
    some, lie within `MASK` / 8 of zero, and those on either side of them spread no more than twice as far as they do,
    as constants with scores added to them would, rounding of large numbers allowed for. Fewer than 1 in 4096 elements,
    below 1e30 in magnitude, are outliers and therefore data. A constant of data that looks the same is taken for a mask
    too; `doubtful_masks` says of which tensors something was.
    """
    far = found.count - found.core_count
    if not far or not found.core_count or max(-found.core_minimum, found.core_maximum) > MASK / 8:
        return ()
    masks = tuple(value for value in (found.minimum, found.maximum) if abs(value) >= MASK)
    if far < found.count / _RARE and min(map(abs, masks)) < _NEVER_DATA:
        return ()
    spread = 2 * (found.core_maximum - found.core_minimum)
    below = found.below - found.minimum if found.minimum <= -MASK else 0.0
    above = found.maximum - found.above if found.maximum >= MASK else 0.0
    narrow = below <= max(spread, -found.minimum * _ROUNDING) and above <= max(spread, found.maximum * _ROUNDING)
    return masks if narrow else ()


def data_range(found: Range) -> tuple[float, float]:
    """Return the least and the greatest element that is no mask constant."""
    return (found.core_minimum, found.core_maximum) if sentinels(found) else (found.minimum, found.maximum)


def doubtful_masks(seen: Mapping[str, Range]) -> dict[str, float]:
    """Return by tensor the largest value that is taken for a mask constant and may be data all the same.

    Args:
        seen: what was seen of tensors, by name.
    """
    found = {tensor: sentinels(one) for tensor, one in seen.items()}
    largest = {tensor: max(masks, key=abs) for tensor, masks in found.items() if masks}
    return {tensor: value for tensor, value in largest.items() if abs(value) < _NEVER_DATA}
