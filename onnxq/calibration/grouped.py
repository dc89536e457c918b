"""Groups of samples that run once: what each has shown, and what some of them have shown together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from onnxq.calibration.evidence import Evidence, EvidenceTotal
from onnxq.calibration.requests import Request
from onnxq.calibration.runner import collect, collect_apart
from onnxq.data.dataset import Selection
from onnxq.data.inputs import SampleSource

# Parts of a group of samples, whose differences tell how far new samples may go beyond them.
_PARTS = 6
# To add up what a few samples of a small model show takes as long as to run as many.
_ENOUGH = 4


def parts_of(samples: Selection) -> list[Selection]:
    """Return parts of some samples, none of them empty."""
    return [replace(samples, places=samples.places[at::_PARTS]) for at in range(min(_PARTS, len(samples)))]


def _runs(parts: Sequence[Selection]) -> list[Sequence[Selection]]:
    """Return parts of one group in stretches of enough samples that adding up what these show takes little."""
    each = math.ceil(_ENOUGH / max(map(len, parts), default=1))
    return [parts[start : start + each] for start in range(0, len(parts), each)]


class _Group(NamedTuple):
    """What a group of samples has shown, and of what was wanted apart, what each of its parts has."""

    samples: Selection
    seen: Evidence
    parts: tuple[Evidence, ...]


class Grouped:
    """What groups of the samples of a model have shown, so that whoever asks for some of them need not run these again.

    Samples are known by their places in the very source that was given.
    """

    def __init__(self) -> None:
        self._groups: tuple[_Group, ...] = ()

    def observe(
        self,
        model: Path,
        groups: Sequence[Selection],
        requests: Sequence[Request],
        apart: Sequence[Request],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run every sample of some groups once, whose evidence takes the place of what there was.

        Args:
            model: the file of the float model.
            groups: of one source, with no sample in common.
            requests: what is wanted of all samples.
            apart: what is wanted of each part of each group, see `parts_of`.
            progress: see `collect`.
        """
        runs = [(place, run) for place, group in enumerate(groups) for run in _runs(parts_of(group))]
        totals = [EvidenceTotal(Evidence()) for _ in groups]
        kept: list[list[Evidence]] = [[] for _ in groups]
        shown = collect_apart(model, [run for _, run in runs], requests, apart, progress=progress)
        for (place, _), (together, each) in zip(runs, shown, strict=True):
            totals[place].add(together.select(requests))
            kept[place] += each
        self._groups = tuple(
            _Group(group, total.evidence, tuple(own)) for group, total, own in zip(groups, totals, kept, strict=True)
        )

    def collected(
        self,
        model: Path,
        samples: SampleSource,
        requests: Sequence[Request],
        *,
        progress: Callable[[int, int], None] | None = None,
        others: Sequence[str] = (),
    ) -> Evidence:
        """Return what samples show, see `collect`, from groups of which they are made up where that is known."""
        within = self._made_up_of(samples)
        if within and all(request in one.seen.statistics for one in within for request in requests):
            return reduce(Evidence.plus, (one.seen for one in within)).select(dict.fromkeys(requests))
        return collect(model, samples, requests, progress=progress, others=others)

    def parts(self, groups: Sequence[Selection], requests: Sequence[Request]) -> dict[int, tuple[Evidence, ...]]:
        """Return what each part of some groups has shown, by the place of the group, of those where that is known."""
        within = {place: self._made_up_of(samples) for place, samples in enumerate(groups) if samples.places}
        known = {place: found[0].parts for place, found in within.items() if len(found) == 1}
        return {
            place: parts
            for place, parts in known.items()
            if all(one in part.statistics for part in parts for one in requests)
        }

    def _made_up_of(self, samples: SampleSource) -> list[_Group]:
        """Return the groups that some samples consist of; none where they consist of others."""
        source = self._groups[0].samples.samples if self._groups else None
        if samples is source:
            places = set(range(len(samples)))
        elif isinstance(samples, Selection) and samples.samples is source:
            places = set(samples.places)
        else:
            return []
        within = [one for one in self._groups if one.samples.places and places.issuperset(one.samples.places)]
        return within if sum(len(one.samples) for one in within) == len(places) else []
