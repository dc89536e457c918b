"""Choosing where ranges migrate between layers: kept where that lowers noise on samples that were not used for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.accuracy.effort import Accuracy
from onnxq.encoding.channel_shares import Setting, factors_of, migration_of, shares
from onnxq.encoding.migration import NOTHING, Migration
from onnxq.encoding.parameters import activation_parameters, requests_for
from onnxq.encoding.range_choice import worst
from onnxq.encoding.recipe import Recipe
from onnxq.encoding.sites import Site, sites
from onnxq.evidence.channel_ranges import ChannelRanges
from onnxq.evidence.evidence import Evidence
from onnxq.evidence.requests import Request
from onnxq.execution.channel_taps import ChannelTap, with_channel_taps
from onnxq.execution.runner import collect
from onnxq.graph import Constant, nodes
from onnxq.planning.plan import Plan
from onnxq.samples.inputs import Sample, SampleSource
from onnxq.trials import Trials
from onnxq.workbench import Workbench

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Chosen:
    """A migration and what it is worth.

    Attributes:
        migration: the factors, from all samples.
        before: noise-to-signal ratio of the worst output without it, on samples that were not used for its factors.
        after: with it.
        sites: how many sites have factors, of how many.
        models: how many were built and run.
        seconds: that it took.
    """

    migration: Migration = NOTHING
    before: float = 0.0
    after: float = 0.0
    sites: tuple[int, int] = (0, 0)
    models: int = 0
    seconds: float = 0.0


_SETTINGS = (
    Setting(0.0),
    Setting(0.5),
    Setting(0.5, 0.5, 0.5),
    Setting(0.3, 0.5, 0.9),
    Setting(1.0, 0.5, 0.5),
    Setting(0.5, 0.7, 0.0),
)
# For one site at a time: none, little, and much.
_OF_SITES = (None, Setting(0.3, 0.5), Setting(0.5, 1.0, 0.5), Setting(1.0, 1.0))
# Parts of the samples whose differences tell how far new ones may go beyond them.
_PARTS = 8
_MOST_SAMPLES = 256
_MOST_JUDGES = 64
# What does not lower noise by so much may be luck.
_WORTH_A_SITE = 0.995
_WORTH = 0.977


def choose_migration(bench: Workbench, plan: Plan, samples: SampleSource, recipe: Recipe, accuracy: Accuracy) -> Chosen:
    """Choose the factors of a plan's tensors, or none where they make nothing better.

    Half of the samples set the factors and the other half judges them, and the other way round; those that are taken in
    the end are set by all.

    Args:
        bench: builds the models.
        plan: the one in which every node is static that can be.
        samples: for calibration; a single one is not enough.
        recipe: how codes are chosen otherwise.
        accuracy: whether sites are tried one by one as well, and how long.
    """
    start = time.monotonic()
    found = sites(bench.graph, plan).found
    if not found or len(samples) < 2:
        return Chosen()
    judge = _Judge(bench, plan, recipe, found, samples)
    off = judge.noise({})
    candidates: list[dict[Site, Setting]] = [dict.fromkeys(found, setting) for setting in _SETTINGS]
    # One half chooses, and both say what the choice is worth.
    best = min(candidates, key=partial(judge.noise_of_half, 0))
    if judge.noise(best) > _WORTH * off:
        best = {}
    if accuracy.one_by_one:
        finer = judge.by_site(best, start + accuracy.seconds)
        if judge.noise(finer) < _WORTH * judge.noise(best):
            best = finer
    after = judge.noise(best)
    worth = after < _WORTH * off
    migration = judge.migration(best, judge.all_parts) if worth else NOTHING
    using = sum(any(name in migration.factors for name in site.tensors) for site in found)
    spent = time.monotonic() - start
    return Chosen(migration, off, after if worth else off, (using, len(found)), judge.models, spent)


class _Judge:
    """Builds and runs models with factors from one half of the samples on the other half."""

    def __init__(
        self, bench: Workbench, plan: Plan, recipe: Recipe, found: Sequence[Site], samples: SampleSource
    ) -> None:
        self._plan, self._recipe, self._found = plan, recipe, found
        step = -(-len(samples) // _MOST_SAMPLES)
        kept = list(islice(samples, 0, None, step))
        halves = kept[::2], kept[1::2]
        watch = _Watch(bench, plan, recipe, found)
        seen = [[watch.evidence(half[at::_PARTS]) for at in range(min(_PARTS, len(half)))] for half in halves]
        totals = [reduce(Evidence.plus, parts) for parts in seen]
        self._sides = [
            (Trials.of(bench, bench.prepared, _even(other, _MOST_JUDGES), total), watch.shares(parts, total))
            for other, parts, total in zip(halves[::-1], seen, totals, strict=True)
        ]
        self.all_parts = watch.shares([part for parts in seen for part in parts], totals[0].plus(totals[1]))

    @property
    def models(self) -> int:
        """How many models were built and run."""
        return sum(len(trials.measured) for trials, _ in self._sides)

    def noise(self, chosen: Mapping[Site, Setting]) -> float:
        """Return the noise-to-signal ratio of both halves."""
        return sum(self.noise_of_half(side, chosen) for side in range(2)) / 2

    def by_site(self, chosen: Mapping[Site, Setting], deadline: float) -> dict[Site, Setting]:
        """Return what becomes of a choice when each site is tried with others, the largest first, on one half."""
        best, least = dict(chosen), self.noise_of_half(0, chosen)
        for site in sorted(self._found, key=self._size, reverse=True):
            for setting in _OF_SITES:
                if time.monotonic() > deadline:
                    return best
                other = {one: own for one, own in best.items() if one is not site}
                if setting is not None:
                    other[site] = setting
                noise = self.noise_of_half(0, other)
                if noise < _WORTH_A_SITE * least:
                    best, least = other, noise
        return best

    def migration(self, chosen: Mapping[Site, Setting], parts: Mapping[Site, Sequence[Array]]) -> Migration:
        """Return the migration of a choice with factors from some of the samples."""
        return migration_of({site: factors_of(site, parts[site], setting) for site, setting in chosen.items()})

    def noise_of_half(self, side: int, chosen: Mapping[Site, Setting]) -> float:
        """Return the noise-to-signal ratio of one half of the samples, with factors from the other."""
        trials, parts = self._sides[side]
        return worst(trials.noise(self._plan, replace(self._recipe, migration=self.migration(chosen, parts))))

    def _size(self, site: Site) -> float:
        """Return how much finer the codes of a site could be, in bits, over all its channels."""
        used = factors_of(site, self.all_parts[site], Setting(1.0, cover=0.0))
        return float(-np.log2(used).mean())


class _Watch:
    """Collects what the channels of sites use of their ranges."""

    def __init__(self, bench: Workbench, plan: Plan, recipe: Recipe, found: Sequence[Site]) -> None:
        self._plan, self._recipe, self._found = plan, recipe, found
        self._constants = {
            tensor.name: tensor
            for _, node in nodes(bench.graph)
            for tensor in node.inputs
            if isinstance(tensor, Constant)
        }
        channels = {
            name: (own, name in site.inside)
            for site in found
            for name, own in site.tensors.items()
            if name not in self._constants
        }
        inside = {
            name: ChannelTap(own.axis, own.rank, len(own.places)) for name, (own, within) in channels.items() if within
        }
        proto, matrices = with_channel_taps(onnx.load(bench.prepared, load_external_data=False), inside)
        self._model = bench.prepared.with_name("channels.onnx")
        self._model.write_bytes(proto.SerializeToString())
        self._requests = {
            name: Request(matrices.get(name, name), "channel-ranges", 1 if within else own.axis)
            for name, (own, within) in channels.items()
        }

    def evidence(self, samples: list[Sample]) -> Evidence:
        """Run the float model."""
        requests = requests_for(self._plan, self._recipe.methods)
        return collect(self._model, samples, (*requests, *self._requests.values()))

    def shares(self, parts: Sequence[Evidence], total: Evidence) -> dict[Site, list[Array]]:
        """Return what each channel of each site used in each part of the samples."""
        parameters = activation_parameters(self._plan, total, self._recipe.ranges, self._recipe.own_ranges)
        return {
            site: [
                shares(site, self._plan, parameters, {name: self._ends(name, part) for name in site.tensors})
                if self._knows(site, total)
                else np.ones(len(site.free))
                for part in parts
            ]
            for site in self._found
        }

    def _knows(self, site: Site, total: Evidence) -> bool:
        """Whether all tensors of a site had values in any sample, as those of a body that did not run have not."""
        return all(len(self._ends(name, total)) for name in site.tensors)

    def _ends(self, name: str, part: Evidence) -> Array:
        constant = self._constants.get(name)
        if constant is None:
            request = self._requests[name]
            seen = part.of(request.tensor).find(ChannelRanges, request.axis)
            return seen.ends if seen is not None else np.zeros((0, 2))
        axis = next(site.tensors[name].axis for site in self._found if name in site.tensors)
        others = tuple(place for place in range(constant.values.ndim) if place != axis)
        return np.stack([constant.values.min(others), constant.values.max(others)], 1).astype(np.float64)


def _even(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    return samples[:: -(-len(samples) // most)]
