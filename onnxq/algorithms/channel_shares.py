"""How much of its tensor's range each channel uses, and which factors follow from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.migration import Factors, Migration
from onnxq.algorithms.sites import Site
from onnxq.numerics.affine import Parameters
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Plan

Array = NDArray[np.float64]

SMALLEST = 0.25
"""The least factor before it is raised to a power: 2 bits of the codes of 8."""
# Channels that use less keep so far from the range's end that what they do beyond is no matter.
_QUIET = 0.02
# A channel that was seen in one part of the samples alone may become so many times as large in others.
_LARGEST_MARGIN = 4.0
# Channels that use less have no codes but zero's: nothing was seen of what they do in other samples.
_UNSEEN = 1 / 512
_TINY = 1e-9


@dataclass(frozen=True)
class Setting:
    """How factors follow from the shares of channels.

    Attributes:
        dense: power of a share where a reader adds up channels, so that fineness is taken from its weight; 0 leaves
            such sites as they are.
        lossless: power where no reader does.
        cover: the part of the channels for which the margin would have been enough on samples left out; 0 takes none.
    """

    dense: float
    lossless: float = 1.0
    cover: float = 0.98


def shares(site: Site, plan: Plan, parameters: Mapping[str, Parameters], ends: Mapping[str, Array]) -> Array:
    """Return which part of the range of its tensor each channel of a site uses, float64 of shape (factors,).

    Where several tensors share a factor it is the largest part of all; a channel that has to keep the factor 1 uses
    all, and one that had no values nothing.

    Args:
        site: the site.
        plan: says which format its tensors have.
        parameters: scale and zero point of each tensor by name.
        ends: by tensor name the least and greatest value of each channel, of shape (channels, 2), or (0, 2) without
            values.
    """
    found = np.zeros(len(site.free))
    for name, channels in site.tensors.items():
        format, own = format_named(plan.by_tensor[name].spec.format), parameters[name]
        zero = 0.0 if own.zero_point is None else float(own.zero_point)
        low, high = ((float(end) - zero) * float(own.scale) for end in (format.minimum, format.maximum))
        seen = ends[name]
        if not len(seen):
            continue
        if len(seen) != len(channels.places):
            return np.ones(len(site.free))
        below = np.where(seen[:, 0] < 0, seen[:, 0] / min(low, -_TINY), 0.0)
        above = np.where(seen[:, 1] > 0, seen[:, 1] / max(high, _TINY), 0.0)
        np.maximum.at(found, channels.places, np.maximum(below, above))
    return np.where(site.free, found, 1.0)


def expected_shares(parts: Sequence[Array], cover: float) -> Array:
    """Return which part of its range each channel may use in samples that were not seen.

    What a channel used in one part of the samples and in no other tells how far new samples may exceed what was seen:
    in most channels of a squeeze-and-excitation by little, in sparse ones by several times. The margin is one for all
    channels of a site, enough for a part of them, or the channel's own where that is more. A channel of which nothing
    was seen may use all.

    Args:
        parts: the shares in each part of the samples, each of shape (factors,).
        cover: see `Setting`.

    >>> expected_shares([np.array([0.2, 0.5]), np.array([0.1, 0.5])], 1.0)
    array([0.4, 1. ])
    """
    ordered = np.sort(np.stack(parts), axis=0)
    unseen = ordered[-1] < _UNSEEN
    largest = np.where(unseen, 1.0, ordered[-1])
    if not cover:
        return np.asarray(np.clip(largest, 0.0, 1.0))
    second = ordered[-2] if len(parts) > 1 else np.zeros_like(largest)
    margins = np.clip(largest / np.maximum(second, _TINY), 1.0, _LARGEST_MARGIN)
    heard = margins[~unseen & (largest > _QUIET)]
    common = float(np.quantile(heard, cover)) if len(heard) else 1.0
    return np.asarray(np.clip(largest * np.maximum(common, margins), 0.0, 1.0))


def factors_of(site: Site, parts: Sequence[Array], setting: Setting) -> Array:
    """Return the factors of a site, float64 of shape (factors,), all 1 where nothing is to be gained."""
    power = setting.dense if site.dense else setting.lossless
    # Shares that are no numbers come from samples that are none.
    used = np.nan_to_num(expected_shares(parts, setting.cover), nan=1.0)
    return np.where(site.free, np.clip(used, SMALLEST, 1.0) ** power, 1.0)


def migration_of(found: Mapping[Site, Array]) -> Migration:
    """Return the migration of sites by the factors of each."""
    return Migration(
        {
            name: Factors(channels.axis, factors[channels.places])
            for site, factors in found.items()
            if (factors < 1).any()
            for name, channels in site.tensors.items()
        }
    )
