"""Leave in float what hurts: a greedy search over measured noise. Plans in, a plan out; edits no graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, replace

from onnxq.config.scheme import Granularity, Mode, Spec
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.search.finer import HANDED_BACK, FinerWeights
from onnxq.search.handing_back import handed_back
from onnxq.search.search import (
    FINEST,
    Demotions,
    Measure,
    NodeNoise,
    NodeNoises,
    Outcome,
    Planner,
    sizes_of,
    small_nodes,
)
from onnxq.system.resources import Progress

# Into so many parts nodes are divided whose noise was measured in groups: to tell a part further is not worth a model.
_PARTS = 12
# How often models that take long to write are built for handing finer codes back, for each step of coarseness.
_FEW_HANDED_BACK = 3
_STORED = frozenset({Mode.STORAGE, Mode.WEIGHT_ONLY})
# What 8-bit storage makes of weights.
_PLAIN, _PLAIN_BITS = Spec("int8-narrow", per=Granularity.CHANNEL), 8
# Decibels of noise above the signal that nothing has to be told apart beyond.
_LOUDEST = 100.0


def leave_what_hurts(
    planner: Planner,
    measure: Measure,
    goal: float,
    progress: Progress,
    *,
    told: NodeNoises | None = None,
    size: Callable[[Plan], float] | None = None,
) -> Outcome:
    """Find a plan that reaches ``goal`` by taking the noisiest nodes out of integer arithmetic first.

    Each weighted static node is measured alone; then the shortest prefix of the worst is sought, by bisection, whose
    demotion reaches the goal. Demoted nodes store their weights as codes, of 16 bits when they are among the smallest
    nodes, which together hold a hundredth of all weights; only when that is still too noisy do stored weights get finer
    codes, see `FinerWeights`, and then the rest is tried as integers once more.

    Args:
        planner: demotions to plan.
        measure: plan to the worst output's SQNR.
        goal: SQNR in decibels to reach.
        progress: told of the stage ``search``.
        told: noise of nodes that is known without measuring each alone, as a large model takes long to write; of
            those that are equally noisy the smallest go first.
        size: bytes of a plan's model. Where fewer bits than 8 end up larger than 8 bits everywhere, these are taken.

    Returns:
        The first plan that reaches the goal, or the most faithful one that was found.
    """
    counter = _Counter(measure, progress, math.inf if told is None else _PARTS)
    full = planner({})
    full_sqnr = counter(full)
    if full_sqnr >= goal:
        return Outcome(full, (), counter.calls)
    small = small_nodes(full)

    def ranked(modes: Set[Mode], demoted: Demotions) -> list[NodeNoise]:
        if told is None:
            return _alone(planner, counter, modes, demoted)
        counter.expect(0)
        sizes = sizes_of(full)
        return sorted(told(planner(demoted), modes), key=lambda one: (one.sqnr, sizes[one.node]))

    static = ranked({Mode.STATIC}, {})
    demotions = {one.node: _demotion(one, small) for one in static}
    best = _shortest_prefix(planner, counter, demotions, {}, goal)
    stored: list[NodeNoise] = []
    if best[1] < goal:
        stored = ranked(_STORED, demotions)
        tried = _Tried(planner, counter, demotions, [best])
        left = _finer(tried, {one.node: 10 ** (-max(one.sqnr, -_LOUDEST) / 10) for one in stored}, goal, size)
        best = max(tried.found, key=_sqnr)
        if (sqnr := tried.sqnr(plan := tried.plan(left))) >= goal:
            # With the few left whose 8-bit codes alone are too coarse, others may be integers after all.
            others = {node: demotion for node, demotion in demotions.items() if node not in left}
            best = _shortest_prefix(planner, counter, others, left, goal)
            best = best if best[1] >= goal else (plan, sqnr)
    seen = (one for one in (*static, *stored) if told is None or one.sqnr < math.inf)
    sensitivities = sorted(seen, key=lambda one: one.sqnr)
    return Outcome(best[0] if best[1] > full_sqnr else full, tuple(sensitivities), counter.calls)


@dataclass(frozen=True, eq=False)
class _Tried:
    """Plans that have some demotions and others besides, and what was found of them.

    Attributes:
        planner: demotions to plan.
        counter: plan to the worst output's SQNR.
        demoted: what all of them have.
        found: those that were measured.
    """

    planner: Planner
    counter: _Counter
    demoted: Demotions
    found: list[tuple[Plan, float]]

    def plan(self, demotions: Demotions) -> Plan:
        return self.planner({**self.demoted, **demotions})

    def sqnr(self, plan: Plan) -> float:
        self.found.append((plan, self.counter(plan)))
        return self.found[-1][1]


def _finer(
    tried: _Tried, noise: Mapping[str, float], goal: float, size: Callable[[Plan], float] | None
) -> dict[str, Demotion]:
    """Return what becomes of stored weights that are too coarse, so that they take no more bytes than need be."""
    plan, counter = tried.plan({}), tried.counter
    stored = replace(plan, decisions=tuple(one for one in plan.decisions if one.mode in _STORED))
    most = HANDED_BACK if counter.parts == math.inf else _FEW_HANDED_BACK
    weights = FinerWeights(tried, stored, {}, goal, lambda: counter.is_over, most, counter.parts)
    better = dict(weights.found(noise))
    coarse = {one.node for one in stored.decisions if _bits(one) < _PLAIN_BITS}
    if size is None or not coarse & better.keys() or tried.sqnr(tried.plan(better)) < goal:
        return better
    reason = "its weights as coarser codes would hurt the worst output too much, and finer ones take more bytes"
    plain = dict.fromkeys(coarse, Demotion(Mode.STORAGE, reason, weight=_PLAIN, finer=reason))
    if size(tried.plan(better)) <= size(tried.plan({**better, **plain})):
        return better

    def is_enough(demotions: Demotions) -> bool:
        return tried.sqnr(tried.plan(demotions)) >= goal

    if is_enough({**better, **plain}):
        return {**better, **plain}
    fewer = handed_back(better, {node: plain[node] for node in better if node in coarse}, is_enough, most=most)
    return min(better, dict(fewer), key=lambda one: size(tried.plan(one)))


def _alone(planner: Planner, measure: _Counter, modes: Set[Mode], demoted: Demotions) -> list[NodeNoise]:
    """Measure weighted nodes of ``modes``, each with every other weight in float, as long as may be; noisiest first."""
    plan = planner(demoted)
    units = [decision.node for decision in plan.decisions if decision.mode in modes and decision.weights]
    everything = [decision.node for decision in plan.decisions if decision.weights]
    measure.expect(len(units))
    silence = Demotion(Mode.FLOAT, "left in float to measure another node alone")
    found = []
    for unit in units:
        others = {node: silence for node in everything if node != unit}
        kept = {unit: demoted[unit]} if unit in demoted else {}
        sqnr = measure.measured(planner(others | kept))
        if sqnr is None:
            break
        found.append(NodeNoise(unit, plan.by_node[unit].mode, sqnr))
    return sorted(found, key=lambda one: one.sqnr)


def _shortest_prefix(
    planner: Planner, measure: _Counter, noisy: Demotions, demoted: Demotions, goal: float
) -> tuple[Plan, float]:
    """Return the plan with the fewest of ``noisy``, taken in order, that reaches the goal, or the one with all.

    Where nodes are told apart in parts, it is one with less than a part more.
    """
    nodes = tuple(noisy)
    near = max(int(len(nodes) / measure.parts), 1)

    def demote(count: int) -> tuple[Plan, float]:
        plan = planner({**demoted, **{node: noisy[node] for node in nodes[:count]}})
        return plan, measure(plan)

    low, high = -1, len(nodes)
    best = demote(high)
    while high - low > near and best[1] >= goal:
        middle = (low + high) // 2
        plan, sqnr = demote(middle)
        if sqnr >= goal:
            best, high = (plan, sqnr), middle
        else:
            low = middle
    return best


def _demotion(one: NodeNoise, small: set[str]) -> Demotion:
    reason = f"{one.mode} quantization of it hurts the worst output too much"
    stored = Demotion(Mode.STORAGE, reason)
    return replace(stored, weight=FINEST, finer=reason) if one.node in small else stored


def _bits(decision: Decision) -> int:
    """Return of how many bits the codes of a node's weights are."""
    return min((format_named(weight.spec.format).bits for weight in decision.weights), default=_PLAIN_BITS)


def _sqnr(found: tuple[Plan, float]) -> float:
    return found[1]


class _Counter:
    """A measure that counts its calls and tells of them, and into how many parts it tells nodes apart."""

    def __init__(self, measure: Measure, progress: Progress, parts: float = math.inf) -> None:
        self._measure, self._progress, self.parts = measure, progress, parts
        self.calls = 0
        self.is_over = False
        self._expected = 1
        self._known: dict[Hashable, float] = {}

    def expect(self, more: int) -> None:
        self._expected += more + max(more, 1).bit_length()

    def measured(self, plan: Plan) -> float | None:
        """Return what was measured, now or before; None where nothing is any more."""
        if plan.effect in self._known:
            return self._known[plan.effect]
        sqnr = self._measure(plan)
        self.is_over = sqnr is None
        if sqnr is not None:
            self.calls += 1
            self._progress("search", self.calls, max(self._expected, self.calls))
            self._known[plan.effect] = sqnr
        return sqnr

    def __call__(self, plan: Plan) -> float:
        """Return what was measured; what was not reaches no goal."""
        sqnr = self.measured(plan)
        return -math.inf if sqnr is None else sqnr
