"""Statistics of groups of samples that run once: of each group, and of groups together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import Progress, collect, collect_apart
from onnxq.calibration.statistics import CalibrationStatistics, StatisticsSum
from onnxq.data.dataset import Subset
from onnxq.data.inputs import SampleSource

# Parts of a group of samples, whose differences show how far new samples may exceed the ranges.
_PARTS = 6
# For a small model, adding up the statistics of this many samples takes as long as running them.
_ENOUGH = 4


def parts_of(samples: Subset) -> list[Subset]:
    """Split samples into at most 6 parts, none of them empty."""
    return [replace(samples, places=samples.places[at::_PARTS]) for at in range(min(_PARTS, len(samples)))]


def _runs(parts: Sequence[Subset]) -> list[Sequence[Subset]]:
    """Return parts of one group in runs of enough samples that adding up their statistics takes little time."""
    each = math.ceil(_ENOUGH / max(map(len, parts), default=1))
    return [parts[start : start + each] for start in range(0, len(parts), each)]


class _Group(NamedTuple):
    samples: Subset
    seen: CalibrationStatistics
    parts: tuple[CalibrationStatistics, ...]


class Grouped:
    """Statistics of groups of samples, which later requests reuse instead of running the samples again.

    Samples are identified by their positions in the given source object.
    """

    def __init__(self) -> None:
        self._groups: tuple[_Group, ...] = ()

    def observe(
        self,
        model: Path,
        groups: Sequence[Subset],
        requests: Sequence[Request],
        apart: Sequence[Request],
        progress: Progress | None = None,
    ) -> None:
        """Run every sample of some groups once, and replace the statistics.

        Groups are disjoint and of one source. `requests` applies to each group, and `apart` to each of its parts, see
        `parts_of`.
        """
        runs = [(place, run) for place, group in enumerate(groups) for run in _runs(parts_of(group))]
        totals = [StatisticsSum() for _ in groups]
        kept: list[list[CalibrationStatistics]] = [[] for _ in groups]
        shown = collect_apart(model, [run for _, run in runs], requests, apart, progress=progress)
        for (place, _), (together, each) in zip(runs, shown, strict=True):
            totals[place].add(together.select(requests))
            kept[place] += each
        self._groups = tuple(
            _Group(group, total.statistics, tuple(own)) for group, total, own in zip(groups, totals, kept, strict=True)
        )

    def collected(
        self,
        model: Path,
        samples: SampleSource,
        requests: Sequence[Request],
        *,
        progress: Progress | None = None,
        others: Sequence[str] = (),
    ) -> CalibrationStatistics:
        """Return the statistics of samples, see `collect`; from groups if the samples consist of known ones."""
        within = self._made_up_of(samples)
        if within and all(request in one.seen.statistics for one in within for request in requests):
            return reduce(CalibrationStatistics.plus, (one.seen for one in within)).select(dict.fromkeys(requests))
        return collect(model, samples, requests, progress=progress, others=others)

    def parts(
        self, groups: Sequence[Subset], requests: Sequence[Request]
    ) -> dict[int, tuple[CalibrationStatistics, ...]]:
        """Return the statistics of the parts of some groups, by index of the group; unknown groups are left out."""
        within = {place: self._made_up_of(samples) for place, samples in enumerate(groups) if samples.places}
        known = {place: found[0].parts for place, found in within.items() if len(found) == 1}
        return {
            place: parts
            for place, parts in known.items()
            if all(one in part.statistics for part in parts for one in requests)
        }

    def _made_up_of(self, samples: SampleSource) -> list[_Group]:
        """Return the groups that samples consist of; empty if they do not."""
        source = self._groups[0].samples.samples if self._groups else None
        if samples is source:
            places = set(range(len(samples)))
        elif isinstance(samples, Subset) and samples.samples is source:
            places = set(samples.places)
        else:
            return []
        within = [one for one in self._groups if one.samples.places and places.issuperset(one.samples.places)]
        return within if sum(len(one.samples) for one in within) == len(places) else []
