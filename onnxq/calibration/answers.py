"""Answers of workers elsewhere: whether what came back is evidence of what was asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.channel_means import ChannelMeans
from onnxq.calibration.channel_ranges import ChannelRanges
from onnxq.calibration.evidence import Evidence
from onnxq.calibration.gram import Gram
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.kinds import kind_named
from onnxq.calibration.requests import Request
from onnxq.calibration.sample_extremes import SampleExtremes
from onnxq.calibration.shards import Tapped
from onnxq.calibration.statistic import Statistic
from onnxq.calibration.value_range import Range

# As `sample_digest` gives them.
_DIGEST = re.compile("[0-9a-f]{32}")


def fits(found: object, tapped: Tapped, count: int) -> bool:
    """Return whether a worker gave back evidence of so many samples of what is requested, which may be true.

    Equal samples are there as often as they were run, so digests need not differ.
    """
    try:
        return (
            isinstance(found, Evidence)
            and len(found.samples) == count
            and set(found.statistics) == set(tapped.requests)
            and found.provenance.model == tapped.model
            and _are_sound(found)
            and _know_their_samples(found)
            and _agree(found)
        )
    # What is no evidence fails in any way when it is looked at.
    except Exception:  # noqa: BLE001
        return False


def _are_sound(found: Evidence) -> bool:
    """Return whether every statistic is of the kind that was asked for; one that contradicts itself raises."""
    for request, statistic in found.statistics.items():
        if not isinstance(statistic, kind_named(request.kind)):
            return False
        statistic.check()
    return True


def _agree(found: Evidence) -> bool:
    """Return whether statistics of one tensor say the same of it: all were shown the same arrays."""
    said: dict[Hashable, Hashable] = {}
    return all(
        said.setdefault((request.tensor, what), value) == value
        for request, statistic in found.statistics.items()
        for what, value in _said(request, statistic)
    )


def _said(request: Request, statistic: Statistic) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield what a statistic says of its tensor: the ends, how many elements there are, how many channels."""
    if isinstance(statistic, Range):
        yield "elements", statistic.count
        yield "ends", (statistic.minimum, statistic.maximum)
    elif isinstance(statistic, Histogram):
        yield "ends", (statistic.whole.minimum, statistic.whole.maximum)
    elif isinstance(statistic, ChannelMeans):
        yield "elements", statistic.count
        # Where they are not known, nobody knows of how many channels.
        yield from _channels(request, len(statistic.sums))
    elif isinstance(statistic, ChannelRanges):
        yield "ends", _outermost(statistic.ends)
        yield from _channels(request, len(statistic.ends))
    elif isinstance(statistic, SampleExtremes):
        yield "ends", _outermost(statistic.ends)
    elif isinstance(statistic, Gram):
        kernel = math.prod(int(extent) for extent in str(request.option("kernel", "") or "1").split(","))
        yield from _channels(request, statistic.sums.size / kernel)


def _channels(request: Request, count: float) -> Iterator[tuple[Hashable, Hashable]]:
    if count:
        yield ("channels", request.axis), count


def _outermost(ends: NDArray[np.float64]) -> tuple[float, float]:
    return float(ends[:, 0].min(initial=math.inf)), float(ends[:, 1].max(initial=-math.inf))


def _know_their_samples(found: Evidence) -> bool:
    """Return whether the digests of samples are such, and what is kept of each sample is of one of them."""
    if not all(_DIGEST.fullmatch(digest) for digest in found.samples):
        return False
    known = {int(digest[:16], 16) for digest in found.samples}
    apart = (one for one in found.statistics.values() if isinstance(one, SampleExtremes))
    return all(known.issuperset(one.samples.tolist()) for one in apart)
