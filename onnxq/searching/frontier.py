"""The fastest plan that is faithful enough: latency weighed against noise along the frontier of the two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.graph import Graph
from onnxq.planning.plan import Demotion, Plan
from onnxq.progress import Progress
from onnxq.scheme import Mode
from onnxq.searching.alternatives import Way
from onnxq.searching.assignment import cheapest
from onnxq.searching.measures import Effort, Measures
from onnxq.searching.noise import NoiseMeter
from onnxq.searching.prices import SILENT, Assignment, Noise, Prices
from onnxq.searching.profiling import profile_costs
from onnxq.searching.regions import find_regions
from onnxq.searching.search import Outcome, Point
from onnxq.targets import Target

# Weights of noise, from where the noise allowed is worth a hundredth of a run, each twice the one before.
_WEIGHTS = 24
_LOOKED_AT = 5
# Part of the search's time after which no more alternatives are profiled.
_PROFILED = 1 / 4
# Part of what is left then after which the noise of no more alternatives is measured.
_MEASURED = 2 / 3
# Of short timings, a difference of so little says nothing.
_SAME_SPEED = 0.98
# A plan with integers has to be this many times as fast as float to be worth the bytes.
_WORTH = 1.03


@dataclass(frozen=True)
class _Tried:
    """An assignment with its plan, how it was found, and what was measured of it."""

    assignment: Assignment
    plan: Plan
    weight: float
    without: frozenset[Way]
    sqnr: float | None = None
    speed: float | None = None


def find_fastest(
    laboratory: Measures, graph: Graph, target: Target, goal: float, effort: Effort, progress: Progress
) -> Outcome:
    """Find the fastest plan whose worst output reaches ``goal``.

    Each node's time as float, as static integers, and in each alternative that the runtime has kernels for, and each
    border's, are read off the runtime's profile of a model of each. The assignment of least time, an exact minimum cut,
    is taken when it is faithful enough. Otherwise the noise of the nodes is measured in groups, and time plus weighted
    noise is minimised for rising weights; the fastest of these plans that reaches the goal is sought by bisection. The
    best few are timed beside the float model, and the profile of the winner, whose borders lie elsewhere than the first
    model's, corrects the costs for another try.

    Args:
        laboratory: builds and measures.
        graph: the prepared graph.
        target: the runtime.
        goal: SQNR in decibels to reach.
        effort: how much to measure.
        progress: told of the stage ``search``.

    Returns:
        The plan, what was measured, and the frontier.
    """
    return _Search(laboratory, graph, target, goal, effort, progress, time.monotonic() + effort.seconds).run()


@dataclass(frozen=True, eq=False)
class _Search:
    laboratory: Measures
    graph: Graph
    target: Target
    goal: float
    effort: Effort
    progress: Progress
    deadline: float

    def run(self) -> Outcome:
        prices = self._prices()
        noise = SILENT
        tried = [self._tried(prices, noise, 0.0)]
        if not self._is_faithful(tried[0]):
            least = tried[0].assignment.nanoseconds
            meter = self._noise_meter()
            noise = meter.of_integers(prices.costs.worthwhile)
            tried = self._sweep(prices, noise)
            if meter.stored_too_coarse and not self._is_enough(prices, tried, least):
                coarse = meter.of_stored()
                noise = replace(noise, stored=coarse.ratios, alone=(*noise.alone, *coarse.alone))
                prices = replace(prices, left=meter.instead_of_coarse(noise.stored))
                tried += self._sweep(prices, noise)
        faithful = sorted(
            (one for one in tried if self._is_faithful(one)),
            key=lambda one: one.assignment.nanoseconds,
        )
        if faithful and noise.ways:
            faithful.insert(0, self._grown(prices, noise, faithful[0]))
        promising = list(_distinct(faithful))[: self.effort.timed]
        # Costs add up to a model of the machine that may be wrong where everything is integer, which is easily tried.
        if not promising or not self._is_late:
            promising = list(_distinct([*promising, *filter(self._is_faithful, [self._whole(prices)])]))
        timed = list(self._timed(promising))
        best = _fastest(timed) if timed else max(tried, key=lambda one: one.sqnr or -math.inf)
        corrected = prices
        for _ in range(self.effort.refinements):
            if self._is_late or best.speed is None:
                break
            corrected = corrected.corrected(best.assignment, self.laboratory.times(best.plan))
            again = self._refined(corrected, noise, best, {one.plan.effect for one in timed})
            if again is None:
                break
            timed.append(again)
            if _fastest(timed) is not again:
                break
            best = again
        if 0 < (best.speed or 0.0) < _WORTH:
            # Integers cost bytes of their own: scales, zero points and wider biases.
            stored = self._stored(prices)
            tried.append(stored)
            best = stored if self._is_faithful(stored) else best
        regions = find_regions(self.graph, best.plan, prices.costs.floats, self.laboratory.times(best.plan))
        frontier = tuple(_frontier([*tried, *timed], best))
        alone = tuple(sorted(noise.alone, key=lambda one: one.sqnr))
        return Outcome(best.plan, alone, self.laboratory.measured, frontier, regions)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    @cached_property
    def _full(self) -> Plan:
        return self.laboratory.plan({})

    @cached_property
    def _stores(self) -> Mapping[str, Demotion]:
        """Demotions that leave no node an integer kernel."""
        reason = "with integers the model is hardly faster than in float on this machine"
        integers = (Mode.STATIC, Mode.DYNAMIC)
        return {one.node: Demotion(Mode.STORAGE, reason) for one in self._full.decisions if one.mode in integers}

    def _prices(self) -> Prices:
        latest = self.deadline - (1 - _PROFILED) * self.effort.seconds
        given = (self.laboratory, self.graph, self.target, self._stores)
        return Prices(profile_costs(*given, latest=latest, progress=self.progress))

    def _noise_meter(self) -> NoiseMeter:
        now = time.monotonic()
        rest = max(self.deadline - now, 0.0)
        effort = replace(self.effort, noise_seconds=min(self.effort.noise_seconds, rest / 2))
        return NoiseMeter(self.laboratory, self._full, self.goal, effort, now + _MEASURED * rest)

    def _tried(self, prices: Prices, noise: Noise, weight: float) -> _Tried:
        """Solve for a weight, and measure how faithful the solution is."""
        one = self._solved(prices, noise, weight)
        return replace(one, sqnr=self.laboratory.sqnr(one.plan))

    def _timed(self, promising: Sequence[_Tried]) -> Iterator[_Tried]:
        """Time plans beside the float model, at least one even when time is up."""
        for number, one in enumerate(promising):
            if number and self._is_late:
                return
            yield replace(one, speed=self.laboratory.speed(one.plan))

    def _whole(self, prices: Prices) -> _Tried:
        """Return the plan in which all is as the scheme wants it."""
        return _Tried(prices.planned(self._full), self._full, 0.0, frozenset(), self.laboratory.sqnr(self._full))

    def _stored(self, prices: Prices) -> _Tried:
        """Return the plan in which nodes store their weights that could be integer kernels, finer where need be."""
        assignment = Assignment(frozenset(), {}, prices.costs.floats.total, 0.0)
        plan = self.laboratory.plan({**self._stores, **prices.left})
        return _Tried(assignment, plan, 0.0, frozenset(), self.laboratory.sqnr(plan))

    def _solved(self, prices: Prices, noise: Noise, weight: float) -> _Tried:
        problem = prices.problem(noise, weight)
        assignment = prices.assignment(cheapest(problem), noise, weight)
        plan = self.laboratory.plan(prices.demotions(assignment, noise))
        return _Tried(assignment, plan, weight, prices.excluded)

    @cached_property
    def _allowed(self) -> float:
        """The noise-to-signal ratio that reaches the goal."""
        return 10 ** (-self.goal / 10)

    def _is_faithful(self, one: _Tried) -> bool:
        return one.sqnr is not None and one.sqnr >= self.goal

    def _is_enough(self, prices: Prices, tried: Sequence[_Tried], least: float) -> bool:
        """Return whether a faithful plan gains half of what there is to gain, or time is up and there is one."""
        floats = prices.assignment(frozenset(), SILENT, 0.0).nanoseconds
        found = min((one.assignment.nanoseconds for one in tried if self._is_faithful(one)), default=math.inf)
        return found <= (floats + least) / 2 or (self._is_late and found < math.inf)

    def _sweep(self, prices: Prices, noise: Noise) -> list[_Tried]:
        """Return the plans around the point where time weighed against noise reaches the goal, fastest first.

        Weights of noise reach only the corners of the frontier, so the plans without the noisiest are tried too.
        """
        first = prices.costs.floats.total / self._allowed / 100
        ways = noise.ways
        noisiest = sorted(ways, key=lambda way: -ways[way])
        return [
            *self._crossing(_WEIGHTS, lambda index: self._solved(prices, noise, first * 2.0**index)),
            *self._crossing(
                len(noisiest) + 1,
                lambda index: self._solved(prices.without(frozenset(noisiest[:index])), noise, 0.0),
            ),
        ]

    def _crossing(self, count: int, solved: Callable[[int], _Tried]) -> list[_Tried]:
        """Return what was measured of plans that grow quieter with their number, to find the first that is faithful.

        The quietest is measured even when time is up.
        """
        known: dict[int, _Tried] = {}

        def faithful(index: int) -> bool:
            one = solved(index)
            known[index] = replace(one, sqnr=self.laboratory.sqnr(one.plan))
            return self._is_faithful(known[index])

        low, high = -1, count - 1
        if not faithful(high):
            # Noise does not always fall from one to the next, so some between are looked at.
            for index in range(0, high, max(high // _LOOKED_AT, 1)):
                if self._is_late:
                    break
                faithful(index)
            low = high
        while high - low > 1 and not self._is_late:
            middle = (low + high) // 2
            low, high = (low, middle) if faithful(middle) else (middle, high)
        return list(_distinct(known[index] for index in sorted(known)))

    def _grown(self, prices: Prices, noise: Noise, start: _Tried) -> _Tried:
        """Let nodes be what a faithful plan does not make of them after all: groups, quiet ones first, that are split.

        What nodes add in noise together is not what they add alone, so a bisection stops short of what can be had.
        """
        ways = noise.ways
        out = [way for way in ways if way not in start.assignment.ways]
        groups = [sorted(out, key=lambda way: ways[way])]
        best = start
        kept_out = frozenset(out)
        for _ in range(self.effort.grown):
            if not groups or self._is_late:
                break
            group = groups.pop(0)
            one = self._solved(prices.without(kept_out - set(group)), noise, 0.0)
            if one.assignment.nanoseconds < best.assignment.nanoseconds:
                one = replace(one, sqnr=self.laboratory.sqnr(one.plan))
                if self._is_faithful(one):
                    best, kept_out = one, kept_out - set(group)
                    continue
            if len(group) > 1:
                middle = (len(group) + 1) // 2
                groups += [group[:middle], group[middle:]]
        return best

    def _refined(self, prices: Prices, noise: Noise, best: _Tried, timed: Set[object]) -> _Tried | None:
        """Return what is best in the way that found the best plan, now that costs are what its kernels really took."""
        again = self._solved(prices.without(best.without), noise, best.weight)
        if again.plan.effect in timed:
            return None
        again = replace(again, sqnr=self.laboratory.sqnr(again.plan))
        if (again.sqnr or 0.0) < self.goal:
            return None
        return replace(again, speed=self.laboratory.speed(again.plan))


def _fastest(timed: Sequence[_Tried]) -> _Tried:
    """Return the fastest, or the most faithful one of those that are not told from it by their speed."""
    fastest = max(one.speed or 0.0 for one in timed)
    return max(
        (one for one in timed if (one.speed or 0.0) >= _SAME_SPEED * fastest), key=lambda one: one.sqnr or -math.inf
    )


def _distinct(tried: Iterable[_Tried]) -> Iterator[_Tried]:
    """Yield the first of each that make the same model."""
    seen = set()
    for one in tried:
        if one.plan.effect not in seen:
            seen.add(one.plan.effect)
            yield one


def _frontier(tried: Sequence[_Tried], best: _Tried) -> Iterator[Point]:
    known: dict[object, Point] = {}
    for one in tried:
        known[one.plan.effect] = Point(
            one.plan.count(Mode.STATIC),
            one.plan.count(Mode.DYNAMIC),
            one.assignment.nanoseconds / 1e6,
            one.sqnr,
            one.speed,
            one.plan.effect == best.plan.effect,
            one.plan.count(Mode.WEIGHT_ONLY),
        )
    yield from sorted(known.values(), key=lambda point: point.milliseconds)
