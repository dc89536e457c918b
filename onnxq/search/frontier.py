"""The fastest accurate plan: latency traded against error along their frontier."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.config.effort import Effort
from onnxq.config.scheme import Mode
from onnxq.ir import Graph
from onnxq.numerics.affine import ratio_of_sqnr, sqnr_of_ratio
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.greedy import WeightPrecisionSearch
from onnxq.search.kernel_times import find_regions, node_times
from onnxq.search.profiling import Profiler, measure_option_sensitivities, offered_options, profile_costs
from onnxq.search.search import PlanSearch, Point
from onnxq.search.tradeoff import AS_LONG, UNMEASURED, Assignment, CostTradeoff, OptionSensitivities
from onnxq.system.resources import Progress

# A smaller difference between short timings is chance.
_SAME_SPEED = 0.98
# A plan that is expected to take more than this share of an accurate plan's time is not worth a model.
_HARDLY_FASTER = 0.98


@dataclass(frozen=True)
class WeighedPlan:
    """An assignment with its plan and its measurements.

    Attributes:
        predicted: SQNR in decibels expected of the worst output; None if no sensitivities were known.
        sqnr: SQNR estimate in decibels of the worst output.
        speed: speed relative to the float model.
    """

    assignment: Assignment
    plan: Plan
    predicted: float | None = None
    sqnr: float | None = None
    speed: float | None = None


def is_worth_trying(one: Assignment, accurate: Assignment) -> bool:
    """Return whether an assignment is expected to be measurably faster than an accurate one."""
    return one.nanoseconds < _HARDLY_FASTER * accurate.nanoseconds


def halfway(assigned: Callable[[int], Assignment], low: int, high: int) -> int:
    """Return the index between `low` and `high` of the assignment whose time is nearest to halfway, from above."""
    middle = (assigned(low).nanoseconds + assigned(high).nanoseconds) / 2
    found = bisect_left(range(low + 1, high), middle, key=lambda index: assigned(index).nanoseconds) + low + 1
    return min(found, high - 1)


def fastest(timed: Sequence[WeighedPlan]) -> WeighedPlan:
    """Return the most accurate of the plans whose speed cannot be told from the highest."""
    most = max(one.speed or 0.0 for one in timed)
    alike = (one for one in timed if (one.speed or 0.0) >= _SAME_SPEED * most)
    return max(alike, key=lambda one: one.sqnr or -math.inf)


def distinct(tried: Iterable[WeighedPlan]) -> Iterator[WeighedPlan]:
    """Yield the plans without later duplicates of the same model."""
    seen = set()
    for one in tried:
        if one.plan.effect not in seen:
            seen.add(one.plan.effect)
            yield one


def points(tried: Iterable[WeighedPlan], best: WeighedPlan) -> tuple[Point, ...]:
    """Return the points of the frontier by expected time; of plans that make the same model, the last counts."""
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
            one.predicted,
        )
    return tuple(sorted(known.values(), key=lambda point: point.milliseconds))


# The summary of a search


def summarize_search(
    best: WeighedPlan,
    weighed: Sequence[WeighedPlan],
    prices: CostTradeoff,
    sensitivities: OptionSensitivities,
    profiler: Profiler,
) -> PlanSearch:
    """Return the result of a search.

    `weighed` has all plans that were tried, at the costs `prices`. `sensitivities` is `UNMEASURED` if no sensitivities
    were needed.
    """
    costs = prices.costs
    alone = (
        ()
        if sensitivities is UNMEASURED
        else tuple(sorted(prices.sensitivities(sensitivities), key=lambda one: one.sqnr))
    )
    measured = costs.floats, profiler.times(best.plan)
    regions, times = find_regions(costs.graph, best.plan, *measured), node_times(best.plan, *measured)
    floats = Point(0, 0, costs.floats.total / 1e6, math.inf, 1.0, is_float=True)
    frontier = tuple(sorted((*points(weighed, best), floats), key=lambda one: one.milliseconds))
    return PlanSearch(best.plan, alone, profiler.measured, frontier, regions, times)


# The search for the fastest accurate plan

# Number of Lagrange multipliers and the ratio between two. At the first, the allowed error is worth a hundredth of a
# run.
_MULTIPLIERS, _MULTIPLIER_STEP = 48, math.sqrt(2)
# Assignments that are solved for each one that is tried.
_SOLVED_PER_TRIAL = 6
# Plans that are expected to miss the goal by more are not tried.
_UNCERTAINTY_DB = 1.0
# Share of the search's time after which no more options are profiled.
_PROFILING_SHARE = 1 / 4
# A plan that is expected to take this many times as long as float is not tried; other load on the machine slows
# profiles.
_HOPELESS = 2.0
_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})
# A plan must be this many times as fast as a simpler one: a choice of nodes as the plan of the scheme, and integers as
# floats, because scales and zero points take bytes. Less is within what runs of one model differ. If integers are
# expected to take most of the float time, they must also be as fast as the plan that only compresses weights.
_WORTH, _LITTLE = 1.03, 0.8


def find_fastest(
    profiler: Profiler, graph: Graph, target: Target, goal: float, effort: Effort, progress: Progress
) -> PlanSearch:
    """Find the fastest plan whose worst output reaches ``goal``.

    The plan of the scheme itself is always a candidate: a search that does not beat it plainly returns it (`_WORTH`).

    1. Profile one model per option: float, static integers, and each option with fast kernels. This gives the time of
    each node and boundary.
    2. Take the assignment of least time, an exact minimum cut, if it is accurate enough.
    3. Otherwise measure the error of each quantizer, and minimize time plus weighted error for rising weights.
    4. Find the fastest of these plans that reaches the goal, by bisection of their times.
    5. Time the best few beside the float model.

    `goal` is an SQNR in decibels.
    """
    effort = replace(effort, seconds=min(effort.seconds, effort.processes * profiler.process))
    search = _Search(profiler, graph, target, goal, effort, progress, time.monotonic() + effort.seconds)
    return search.run(search.tradeoff())


@dataclass(frozen=True, eq=False)
class _Search:
    profiler: Profiler
    graph: Graph
    target: Target
    goal: float
    effort: Effort
    progress: Progress
    deadline: float

    def run(self, prices: CostTradeoff) -> PlanSearch:
        sensitivities, simple = UNMEASURED, self._plan_of_scheme(prices)
        tried = [self._measure(self._plan(prices, sensitivities, prices.quickest))]
        if not self._is_accurate(tried[0]):
            sensitivities = self._measure_sensitivities(prices)
            tried = self._sweep_multiplier(prices, sensitivities)
            weights = WeightPrecisionSearch(self.profiler, self._full, self._stores, self.goal, lambda: self._is_late)
            if not self._is_enough(prices, tried) and weights.are_needed(sensitivities.static.share_of_nodes):
                prices = replace(prices, left=weights.found(sensitivities.static.nodes))
                tried += self._sweep_multiplier(prices, sensitivities)
        accurate = sorted(filter(self._is_accurate, tried), key=lambda one: one.assignment.nanoseconds)
        if accurate and sensitivities is not UNMEASURED:
            accurate.insert(0, self._greedy_add_back(prices, sensitivities, accurate[0]))
        candidates = list(distinct(accurate))[: self.effort.timed]
        spent, timed = self._is_late, self._time(candidates, simple)
        best = fastest(timed) if timed else max(tried, key=lambda one: one.sqnr or -math.inf)
        best = self._simplest(best, timed)
        if best.speed:
            little = best.assignment.nanoseconds >= _LITTLE * prices.costs.floats.total
            if best.speed < _WORTH or (little and len(timed) < self.effort.timed):
                stored = self._store_all(prices)
                if self._is_accurate(stored):
                    [stored] = self._time([stored]) if best.speed >= _WORTH else [stored]
                    best = fastest([best, stored]) if best.speed >= _WORTH else stored
                tried.append(stored)
        found = summarize_search(best, [*simple, *tried, *timed], prices, sensitivities, self.profiler)
        return replace(found, spent=spent)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    @cached_property
    def _full(self) -> Plan:
        return self.profiler.plan({})

    @cached_property
    def _stores(self) -> Mapping[str, Demotion]:
        """Demotions that leave no node an integer kernel."""
        reason = "with integers the model is hardly faster than in float on this machine"
        return {one.node: Demotion(Mode.STORAGE, reason) for one in self._full.decisions if one.mode in _INTEGERS}

    def tradeoff(self) -> CostTradeoff:
        latest = self.deadline - (1 - _PROFILING_SHARE) * self.effort.seconds
        given = (self.profiler, self.graph, self.target, self._stores)
        costs = profile_costs(*given, latest=latest, progress=self.progress)
        return CostTradeoff(costs)

    def _measure_sensitivities(self, prices: CostTradeoff) -> OptionSensitivities:
        rest = max(self.deadline - time.monotonic(), 0.0)
        requested = {offer: frozenset(prices.costs.worthwhile[offer.alternative]) for offer in prices.costs.offers}
        requested = {offer: nodes for offer, nodes in requested.items() if nodes and not self._is_late}
        runs = math.ceil(min(self.effort.sensitivity * self.profiler.process, rest / 2) / self.profiler.run)
        return measure_option_sensitivities(self.profiler, self._full, self._stores, requested, runs)

    def _measure(self, one: WeighedPlan) -> WeighedPlan:
        return replace(one, sqnr=self.profiler.sqnr(one.plan))

    def _plan_of_scheme(self, prices: CostTradeoff) -> list[WeighedPlan]:
        """Return the plan of the scheme if it is accurate enough, and not expected to be far slower than float."""
        assignment = prices.planned(self._full, UNMEASURED)
        if assignment.nanoseconds > _HOPELESS * prices.costs.floats.total:
            return []
        return [*filter(self._is_accurate, [self._measure(WeighedPlan(assignment, self._full))])]

    def _simplest(self, best: WeighedPlan, timed: Sequence[WeighedPlan]) -> WeighedPlan:
        """Return the plan of the scheme where it was timed and another one is not plainly faster."""
        simple = next((one for one in timed if one.plan.effect == self._full.effect and one.speed), best)
        return simple if (best.speed or 0.0) < _WORTH * (simple.speed or 0.0) else best

    def _time(self, candidates: Sequence[WeighedPlan], simple: Sequence[WeighedPlan] = ()) -> list[WeighedPlan]:
        """Time plans beside that of the scheme; when time is up, only the first of them."""
        given = list(distinct([*(candidates[:1] if self._is_late else candidates), *simple]))
        if candidates and simple and simple[0].assignment.nanoseconds < AS_LONG * candidates[0].assignment.nanoseconds:
            given = [one for one in given if one.plan.effect == self._full.effect]
        speeds = self.profiler.speeds([one.plan for one in given]) if given else []
        known = (None if math.isnan(speed) else speed for speed in speeds)
        return [replace(one, speed=speed) for one, speed in zip(given, known, strict=True)]

    def _store_all(self, prices: CostTradeoff) -> WeighedPlan:
        """Return the plan that only compresses weights, with finer specs as needed."""
        assignment = Assignment(frozenset(), {}, prices.costs.floats.total, 0.0)
        plan = self.profiler.plan({**self._stores, **prices.left})
        return self._measure(WeighedPlan(assignment, plan))

    def _plan(self, prices: CostTradeoff, sensitivities: OptionSensitivities, assignment: Assignment) -> WeighedPlan:
        plan = self.profiler.plan(prices.demotions(assignment, sensitivities))
        return WeighedPlan(assignment, plan)

    def _is_accurate(self, one: WeighedPlan) -> bool:
        return one.sqnr is not None and one.sqnr >= self.goal

    def _is_enough(self, prices: CostTradeoff, tried: Sequence[WeighedPlan]) -> bool:
        """Return whether an accurate plan gains half of the possible time, or time is up and there is one."""
        floats = prices.assignment(frozenset(), UNMEASURED, 0.0).nanoseconds
        least = tried[0].assignment.nanoseconds
        found = min((one.assignment.nanoseconds for one in tried if self._is_accurate(one)), default=math.inf)
        return found <= (floats + least) / 2 or (self._is_late and found < math.inf)

    def _sweep_multiplier(self, prices: CostTradeoff, sensitivities: OptionSensitivities) -> list[WeighedPlan]:
        """Search the plans of rising Lagrange multipliers for the first accurate one, fastest plan first.

        The plan of lowest error is measured even when time is up.
        """
        first = prices.costs.floats.total / ratio_of_sqnr(self.goal) / 100
        weights = (0.0, *(first * _MULTIPLIER_STEP**index for index in range(_MULTIPLIERS)))
        assigned = prices.by_weight(sensitivities, weights)
        tried = [self._measure(self._plan(prices, sensitivities, assigned(0)))]
        low, high = 0, len(weights)
        while high - low > 1 and len(tried) <= self.effort.tried:
            if high < len(weights) and (self._is_late or not is_worth_trying(assigned(low), assigned(high))):
                break
            middle = halfway(assigned, low, high) if high < len(weights) else (low + high) // 2
            index = high - 1 if self._is_late else middle
            one = self._plan(prices, sensitivities, assigned(index))
            one = self._measure(replace(one, predicted=sqnr_of_ratio(one.assignment.nsr)))
            tried = list(distinct([*tried, one]))
            low, high = (low, index) if self._is_accurate(one) else (index, high)
        return tried

    def _greedy_add_back(
        self, prices: CostTradeoff, sensitivities: OptionSensitivities, start: WeighedPlan
    ) -> WeighedPlan:
        """Add options back that an accurate plan left out: groups, lowest error first, split in two if they fail.

        The error of nodes together is not the sum of their errors alone, so a bisection stops too early.
        """
        options = prices.options(sensitivities)
        out = [option for option in options if option not in start.assignment.options]
        groups = [sorted(out, key=lambda option: options[option])]
        best, tried, kept_out = start, 0, frozenset(out)
        for _ in range(_SOLVED_PER_TRIAL * self.effort.grown):
            if not groups or tried == self.effort.grown or self._is_late:
                break
            group = groups.pop(0)
            assignment = (fewer := prices.without(kept_out - set(group))).best(sensitivities, 0.0)
            if not is_worth_trying(assignment, best.assignment):
                continue  # Nor is any part of the group.
            if (expected := sqnr_of_ratio(assignment.nsr)) >= self.goal - _UNCERTAINTY_DB:
                one = self._plan(fewer, sensitivities, assignment)
                one, tried = self._measure(replace(one, predicted=expected)), tried + 1
                if self._is_accurate(one):
                    best, kept_out = one, kept_out - set(group)
                    continue
            if len(group) > 1:
                middle = (len(group) + 1) // 2
                groups += [group[:middle], group[middle:]]
        return best


# The fastest of a few plans by the time of whole models, for runtimes that cannot profile single nodes


def fastest_uniform_plan(profiler: Profiler, target: Target, low_error: Plan, goal: float) -> Plan:
    """Return the fastest of the plans that reach a goal, by the time of their whole models.

    The candidates are `low_error` and one plan per option of the target, taken by all possible nodes.

    `low_error` has as many integer nodes as the goal (in decibels) allows. It is the result if no other plan is faster.
    """
    full = profiler.plan({})
    stored = Demotion(Mode.STORAGE, "as integers it was not timed alone")
    stores = {one.node: stored for one in full.decisions if one.mode in DECODING}
    offered = (offer.plan for offer in offered_options(profiler, full, target, stores))
    plans = [low_error, *(plan for plan in offered if profiler.expresses(plan) and profiler.sqnr(plan) >= goal)]
    speeds = profiler.speeds(plans) if len(plans) > 1 else [1.0]
    known = (0.0 if math.isnan(speed) else speed for speed in speeds)
    return max(zip(plans, known, strict=True), key=lambda one: one[1])[0]
