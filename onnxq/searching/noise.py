"""Where the noise comes from: each node alone, or groups of nodes of which the noisiest are split further."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxq.planning.plan import Demotion, Plan
from onnxq.scheme import Mode
from onnxq.searching.costs import Noise
from onnxq.searching.measures import Effort, Measures
from onnxq.searching.search import FINER, Demotions, small_nodes

# Groups whose noise is this part of what is allowed are not looked into.
_NEGLIGIBLE = 1 / 64
# Part of the noise allowed that stored weights may make; beyond it some of them get finer codes.
_STORED_SHARE = 0.6
# Stands for outputs that are not finite, or integers that differ: noise has to be a number to be weighed.
_LOWEST_SQNR = -100.0


def spread_noise(
    units: Sequence[str], measure: Callable[[Sequence[str]], float], *, whole: float, most: int, negligible: float
) -> dict[str, float]:
    """Tell how much noise each unit adds, from measuring it alone, or, where that is too much, groups of neighbours.

    A quiet group has quiet members and is not looked at further; its noise is spread over them evenly. The noisiest
    group is split in two first, and what the halves make alone says how its noise is divided among them.

    Args:
        units: in the order in which data flows, so that neighbours share borders.
        measure: a group to its noise-to-signal ratio with everything else silent.
        whole: noise-to-signal ratio of all units together.
        most: measurements to make at most.
        negligible: a ratio below which a group is not split.

    Returns:
        Noise-to-signal ratio by unit.

    >>> found = spread_noise("abcdefgh", lambda group: float("c" in group), whole=1.0, most=6, negligible=0.1)
    >>> [unit for unit in found if found[unit]]
    ['c']
    """
    if most >= len(units):
        return {unit: measure([unit]) for unit in units}
    heap = [(-whole, 0, len(units))]
    found: dict[str, float] = {}
    measured = 0
    while heap:
        ratio, start, stop = heapq.heappop(heap)
        if stop - start <= 1 or -ratio <= negligible or measured + 2 > most:
            found.update(dict.fromkeys(units[start:stop], -ratio / (stop - start)))
            continue
        middle = (start + stop) // 2
        halves = ((start, middle), (middle, stop))
        ratios = [measure(units[first:last]) for first, last in halves]
        measured += 2
        total = sum(ratios)
        for (first, last), half in zip(halves, ratios, strict=True):
            # Together they make what the group makes: errors that point the same way add up to more than their sum.
            share = half / total if total else 0.5
            heapq.heappush(heap, (ratio * share, first, last))
    return found


@dataclass(frozen=True, eq=False)
class NoiseMeter:
    """Measures where the noise of a plan comes from.

    Attributes:
        laboratory: builds and measures.
        full: the plan in which every node is an integer kernel that can be.
        goal: SQNR in decibels to reach.
        effort: how much to measure.
    """

    laboratory: Measures
    full: Plan
    goal: float
    effort: Effort

    def of_integers(self, dynamic: Plan | None) -> Noise:
        """Return the noise of each node as a static and as a dynamic kernel; that of stored weights is spread evenly.

        Args:
            dynamic: the plan in which every node is dynamic that can be; None when none can.
        """
        weighted = [one.node for one in self.full.decisions if one.weights]
        return Noise(
            self._spread(self._nodes(self.full, Mode.STATIC), self.full),
            self._spread(self._nodes(dynamic, Mode.DYNAMIC), dynamic),
            dict.fromkeys(weighted, self._stored_noise / max(len(weighted), 1)),
        )

    def of_stored(self) -> Mapping[str, float]:
        """Return the noise of each node's weights alone."""
        return self._spread([one.node for one in self.full.decisions if one.weights], self._stored)

    @property
    def stored_too_coarse(self) -> bool:
        """Whether weights as codes leave little noise to integer kernels, or none."""
        return self._stored_noise > _STORED_SHARE * self._allowed

    def instead_of_coarse(self, stored: Mapping[str, float]) -> Mapping[str, Demotion]:
        """Return what becomes of weights whose codes are too coarse, most noise for their size first.

        They get codes of finer scales, or stay float where they are small, or where even those are too coarse.

        Args:
            stored: noise of each node's weights alone.
        """
        weighted = {one.node: one for one in self.full.decisions if one.weights}
        sizes = {node: sum(weight.elements for weight in one.weights) for node, one in weighted.items()}
        order = sorted(stored, key=lambda node: -stored[node] / (sizes[node] + 1))
        floats = dict.fromkeys(order, Demotion(Mode.FLOAT, "its weights as codes would hurt the worst output too much"))
        small = small_nodes(self.full)
        reason = "its weights as coarser codes would hurt the worst output too much"
        finer = {
            node: floats[node] if node in small else Demotion(_storing(weighted[node].mode), reason, weight=FINER)
            for node in order
        }
        goal = -10 * math.log10(_STORED_SHARE * self._allowed)

        def sqnr(demotions: Demotions) -> float:
            return self.laboratory.sqnr(self.laboratory.plan({**self._stores, **demotions}))

        def fewest(better: Demotions, base: Demotions) -> Demotions:
            low, high = 0, len(order)
            while high - low > 1:
                middle = (low + high) // 2
                taken = {node: better[node] for node in order[:middle]}
                low, high = (low, middle) if sqnr({**base, **taken}) >= goal else (middle, high)
            return {**base, **{node: better[node] for node in order[:high]}}

        with_finer = sqnr(finer)
        if with_finer >= goal:
            return fewest(finer, {})
        # Float weights are four times as large, so they are for what would not be faithful otherwise.
        return finer if with_finer >= self.goal else fewest(floats, finer)

    @cached_property
    def _allowed(self) -> float:
        """The noise-to-signal ratio that reaches the goal."""
        return _ratio(self.goal)

    @cached_property
    def _stores(self) -> Demotions:
        reason = "stores its weights"
        return {one.node: Demotion(Mode.STORAGE, reason) for one in self.full.decisions if one.mode is Mode.STATIC}

    @cached_property
    def _stored(self) -> Plan:
        return self.laboratory.plan(self._stores)

    @cached_property
    def _stored_noise(self) -> float:
        return _ratio(self.laboratory.sqnr(self._stored))

    def _nodes(self, plan: Plan | None, mode: Mode) -> list[str]:
        return [one.node for one in plan.decisions if one.weights and one.mode is mode] if plan is not None else []

    def _spread(self, units: Sequence[str], plan: Plan | None) -> dict[str, float]:
        """Measure units with all other weights in float."""
        if plan is None or not units:
            return {}
        modes = {one.node: one.mode for one in plan.decisions}
        silence = Demotion(Mode.FLOAT, "left in float to measure other nodes")
        weighted = [one.node for one in plan.decisions if one.weights]

        def measure(group: Iterable[str]) -> float:
            kept = set(group)
            demotions = {node: silence for node in weighted if node not in kept}
            demotions |= {
                node: Demotion(modes[node], "measured alone") for node in kept if modes[node] is not Mode.STATIC
            }
            return _ratio(self.laboratory.sqnr(self.laboratory.plan(demotions)))

        start = time.monotonic()
        measure(units[:1])
        affordable = int(self.effort.noise_seconds / max(time.monotonic() - start, 1e-6))
        return spread_noise(
            units, measure, whole=measure(units), most=affordable, negligible=_NEGLIGIBLE * self._allowed
        )


def _ratio(decibels: float) -> float:
    return float(10 ** (-max(decibels, _LOWEST_SQNR) / 10))


def _storing(mode: Mode) -> Mode:
    """Return the mode in which a node only has other weights."""
    return Mode.WEIGHT_ONLY if mode is Mode.WEIGHT_ONLY else Mode.STORAGE
