"""Where the noise comes from: each node alone, or groups of nodes of which the noisiest are split further."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from onnxq.planning.plan import Demotion, Plan
from onnxq.scheme import Mode
from onnxq.searching.alternatives import Alternative
from onnxq.searching.measures import Effort, Measures
from onnxq.searching.prices import Noise
from onnxq.searching.search import FINER, FINEST, Demotions, Sensitivity, small_nodes

# Part of the measurements that goes to groups of one size.
_FIRST_LOOK = 4 / 5
# Groups whose noise is this part of what is allowed are not looked into.
_NEGLIGIBLE = 1 / 64
# Part of the noise allowed that stored weights may make; beyond it some of them get finer codes.
_STORED_SHARE = 0.6
# Stands for outputs that are not finite, or integers that differ: noise has to be a number to be weighed.
_LARGEST_NOISE = 1e10
# No model is built and run in less; clocks of some machines tick no finer.
_SHORTEST = 1e-6
_ALONE = "measured alone"


def spread_noise(
    units: Sequence[str], measure: Callable[[Sequence[str]], float], *, whole: float, most: int, negligible: float
) -> dict[str, float]:
    """Tell how much noise each unit adds, from measuring it alone, or, where that is too much, groups of neighbours.

    Four fifths of the measurements go to groups of one size, two units at least, so that quiet units can be told apart
    too; with the rest the noisiest group is split in two each time, and what the halves make alone says how its noise
    is divided among them. The noise of a group that is not split is spread over its units evenly.

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
    count = max(min(int(_FIRST_LOOK * most), len(units) // 2), 1)
    bounds = [round(index * len(units) / count) for index in range(count + 1)]
    heap = _shared(-whole, pairwise(bounds), lambda first, last: measure(units[first:last]))
    measured = count if count > 1 else 0
    heapq.heapify(heap)
    found: dict[str, float] = {}
    while heap:
        ratio, start, stop = heapq.heappop(heap)
        if stop - start <= 1 or -ratio <= negligible or measured + 2 > most:
            found.update(dict.fromkeys(units[start:stop], -ratio / (stop - start)))
            continue
        middle = (start + stop) // 2
        for half in _shared(ratio, ((start, middle), (middle, stop)), lambda first, last: measure(units[first:last])):
            heapq.heappush(heap, half)
        measured += 2
    return found


def _shared(
    whole: float, parts: Iterable[tuple[int, int]], measure: Callable[[int, int], float]
) -> list[tuple[float, int, int]]:
    """Return parts with their shares of the noise of the whole; the only part has all of it.

    Together they make what the whole makes: errors that point the same way add up to more than their sum.
    """
    parts = tuple(parts)
    ratios = [measure(*part) for part in parts] if len(parts) > 1 else [whole]
    total = sum(ratios)
    shares = [ratio / total if total else 1 / len(parts) for ratio in ratios]
    return [(whole * share, *part) for share, part in zip(shares, parts, strict=True)]


@dataclass(frozen=True)
class Measured:
    """What nodes add in one mode, told from measuring some of them together.

    Attributes:
        ratios: noise-to-signal ratio by node: its own, or its share of what its group makes.
        alone: those that were measured with everything else silent.
    """

    ratios: Mapping[str, float] = field(default_factory=dict)
    alone: tuple[Sensitivity, ...] = ()


@dataclass(frozen=True, eq=False)
class NoiseMeter:
    """Measures where the noise of a plan comes from.

    Attributes:
        laboratory: builds and measures.
        full: the plan in which every node is an integer kernel that can be.
        goal: SQNR in decibels to reach.
        effort: how much to measure.
        deadline: value of the monotonic clock after which only the static nodes are measured, all together; what is
            offered instead is taken as too noisy then.
    """

    laboratory: Measures
    full: Plan
    goal: float
    effort: Effort
    deadline: float = math.inf

    def of_integers(self, offered: Mapping[Alternative, Collection[str]]) -> Noise:
        """Return the noise of each node as a static kernel and in what it is offered instead.

        That of stored weights is spread evenly.

        Args:
            offered: the nodes that can be something else, by what that is.
        """
        integers = {one.node: None for one in self.full.decisions if one.weights and one.mode is Mode.STATIC}
        asked = {alternative: set(nodes) for alternative, nodes in offered.items() if nodes}
        seconds = self.effort.noise_seconds / max(1 + len(asked), 2)
        static = self._spread(Mode.STATIC, integers, seconds)
        alternatives = {}
        for alternative, nodes in asked.items():
            wish = alternative.demotion(_ALONE)
            wanted: dict[str, Demotion | None] = {node: wish for node in self._weighted if node in nodes}
            late = time.monotonic() > self.deadline
            unknown = Measured(dict.fromkeys(wanted, _LARGEST_NOISE))
            alternatives[alternative] = unknown if late else self._spread(alternative.mode, wanted, seconds)
        return Noise(
            static.ratios,
            {alternative: found.ratios for alternative, found in alternatives.items()},
            dict.fromkeys(self._weighted, self._stored_noise / max(len(self._weighted), 1)),
            tuple(one for found in (static, *alternatives.values()) for one in found.alone),
        )

    def of_stored(self) -> Measured:
        """Return the noise of each node's weights alone."""
        modes = {one.node: one.mode for one in self._stored.decisions}
        wanted = {node: Demotion(modes[node], _ALONE) for node in self._weighted}
        return self._spread(Mode.STORAGE, wanted, self.effort.noise_seconds / 2)

    @property
    def stored_too_coarse(self) -> bool:
        """Whether weights as codes leave little noise to integer kernels, or none."""
        return self._stored_noise > _STORED_SHARE * self._allowed

    def instead_of_coarse(self, stored: Mapping[str, float]) -> Mapping[str, Demotion]:
        """Return what becomes of weights whose codes are too coarse, most noise for their size first.

        They get codes of finer scales, or of 16 bits where they are small, or where even those are too coarse; where
        nothing else is faithful, they stay float.

        Args:
            stored: noise of each node's weights alone.
        """
        weighted = {one.node: one for one in self.full.decisions if one.weights}
        sizes = {node: sum(weight.elements for weight in one.weights) for node, one in weighted.items()}
        order = sorted(stored, key=lambda node: -stored[node] / (sizes[node] + 1))
        hurts = "its weights as codes would hurt the worst output too much"
        floats = dict.fromkeys(order, Demotion(Mode.FLOAT, hurts))
        finest = dict.fromkeys(order, Demotion(Mode.STORAGE, hurts.replace("codes", "8-bit codes"), weight=FINEST))
        small = small_nodes(self.full)
        reason = "its weights as coarser codes would hurt the worst output too much"
        finer = {
            node: finest[node] if node in small else Demotion(_storing(weighted[node].mode), reason, weight=FINER)
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
        # Codes of 16 bits are twice as large, and floats four times, so they are for what is not faithful otherwise.
        if with_finer >= self.goal:
            return finer
        return fewest(finest if sqnr(finest) >= self.goal else floats, finer)

    @cached_property
    def _allowed(self) -> float:
        """The noise-to-signal ratio that reaches the goal."""
        return _ratio(self.goal)

    @cached_property
    def _stores(self) -> Demotions:
        reason = "stores its weights"
        integers = (Mode.STATIC, Mode.DYNAMIC)
        return {one.node: Demotion(Mode.STORAGE, reason) for one in self.full.decisions if one.mode in integers}

    @cached_property
    def _stored(self) -> Plan:
        return self.laboratory.plan(self._stores)

    @cached_property
    def _stored_noise(self) -> float:
        return _ratio(self.laboratory.sqnr(self._stored))

    @cached_property
    def _weighted(self) -> tuple[str, ...]:
        return tuple(one.node for one in self.full.decisions if one.weights)

    def _spread(self, mode: Mode, wanted: Mapping[str, Demotion | None], seconds: float) -> Measured:
        """Measure nodes, each in the mode that is wanted or as the full plan has it, with all other weights in float.

        Args:
            mode: what they are then.
            wanted: by node, in the order in which data flows.
            seconds: time to spend.
        """
        if not wanted:
            return Measured()
        alone: dict[str, float] = {}
        silence = Demotion(Mode.FLOAT, "left in float to measure other nodes")

        def measure(group: Sequence[str]) -> float:
            kept = {node: wanted[node] for node in group}
            demotions = {node: silence for node in self._weighted if node not in kept}
            demotions |= {node: demotion for node, demotion in kept.items() if demotion is not None}
            found = min(self.laboratory.expected_noise(self.laboratory.plan(demotions)), _LARGEST_NOISE)
            alone.update(dict.fromkeys(group if len(group) == 1 else (), found))
            return found

        units = tuple(wanted)
        late = time.monotonic() > self.deadline
        each = 0.0 if late else self._seconds_each(units, measure)
        ratios = spread_noise(
            units,
            measure,
            whole=measure(units),
            most=0 if late else int(seconds / each) if each else len(units),
            negligible=_NEGLIGIBLE * self._allowed,
        )
        known = {node: -10 * math.log10(ratio) for node, ratio in alone.items() if ratio > 0}
        return Measured(ratios, tuple(Sensitivity(node, mode, sqnr) for node, sqnr in known.items()))

    def _seconds_each(self, units: Sequence[str], measure: Callable[[Sequence[str]], float]) -> float:
        """Return what it takes to measure the first unit that is not remembered; 0 when all are."""
        for unit in units:
            before, start = self.laboratory.measured, time.monotonic()
            measure([unit])
            if self.laboratory.measured > before:
                return max(time.monotonic() - start, _SHORTEST)
        return 0.0


def _ratio(decibels: float) -> float:
    return min(10 ** (-decibels / 10), _LARGEST_NOISE)


def _storing(mode: Mode) -> Mode:
    """Return the mode in which a node only has other weights."""
    return Mode.WEIGHT_ONLY if mode is Mode.WEIGHT_ONLY else Mode.STORAGE
