"""Answers of workers elsewhere: whether what came back is evidence of what was asked for."""

from __future__ import annotations

from onnxq.evidence.evidence import Evidence
from onnxq.evidence.histogram import Bins, Histogram
from onnxq.evidence.kinds import kind_named
from onnxq.evidence.value_range import Range
from onnxq.execution.shards import Tapped


def fits(found: object, tapped: Tapped, count: int) -> bool:
    """Return whether a worker gave back evidence of so many samples of what is requested, which may be true.

    Equal samples are there as often as they were run, so digests need not differ.
    """
    try:
        return (
            isinstance(found, Evidence)
            and len(found.samples) == count
            and all(isinstance(digest, str) for digest in found.samples)
            and set(found.statistics) == set(tapped.requests)
            and found.provenance.model == tapped.model
            and _are_sound(found)
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
    """Return whether the ranges and histograms of each tensor have the same ends: both were shown the same arrays."""
    ends: dict[str, tuple[float, float]] = {}
    for request, statistic in found.statistics.items():
        whole = statistic.whole if isinstance(statistic, Histogram) else statistic
        if isinstance(whole, (Range, Bins)):
            own = whole.minimum, whole.maximum
            if ends.setdefault(request.tensor, own) != own:
                return False
    return True
