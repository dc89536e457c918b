"""Leave in float what hurts: a greedy search over measured noise. Plans in, a plan out; edits no graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from onnxq.planning.plan import DECODING, Decision, Demotion, Plan
from onnxq.progress import Progress
from onnxq.scheme import Granularity, Mode, Spec
from onnxq.searching.regions import NodeTime, Region

_SMALL_SHARE = 0.01
# Into so many parts nodes are divided whose noise was measured in groups: to tell a part further is not worth a model.
_PARTS = 12

FINER = Spec("int8-narrow", per=(32,), scale="float16")
"""For weights whose codes of fewer bits, or with one scale a channel, are too coarse: a sixteenth larger than int8."""

FINEST = Spec("int16-narrow", per=Granularity.CHANNEL)
"""For weights that 8 bits are too few for: half of their floats, and hardly any noise."""

Demotions = Mapping[str, Demotion]
Planner = Callable[[Demotions], Plan]
Measure = Callable[[Plan], float | None]
"""Builds a plan's model, runs it and gives the SQNR in decibels that its worst output can be trusted to have.

It gives None for what is not measured any more.
"""


@dataclass(frozen=True)
class NodeNoise:
    """What one node adds in noise as codes.

    Attributes:
        node: its name.
        mode: how it was quantized when measured.
        sqnr: SQNR in decibels of the worst output with this node quantized and nothing else.
    """

    node: str
    mode: Mode
    sqnr: float


NodeNoises = Callable[[Plan, Set[Mode]], Sequence[NodeNoise]]
"""Tells the noise of a plan's weighted nodes that have one of some modes."""


@dataclass(frozen=True)
class Point:
    """A plan on the frontier of latency and fidelity.

    Attributes:
        static: how many nodes run as integer kernels with fixed scales.
        dynamic: how many multiply integers whose scale each run computes.
        milliseconds: expected time of a run.
        sqnr: measured SQNR in decibels of the worst output, or None.
        speed: measured speed beside the float model, or None.
        chosen: whether it is the one that was taken.
        weight_only: how many multiply the codes of their weights with float data.
        predicted: SQNR in decibels that was expected before it was measured, or None.
        is_float: whether it is the float model, beside which the others are timed.
    """

    static: int
    dynamic: int
    milliseconds: float
    sqnr: float | None = None
    speed: float | None = None
    chosen: bool = False
    weight_only: int = 0
    predicted: float | None = None
    is_float: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    Attributes:
        plan: the plan to build.
        sensitivities: the nodes whose noise was measured, worst first; empty when nothing had to be left.
        measured: how many models were built and run.
        frontier: the plans that were weighed, by expected time; empty when latency was not measured.
        regions: the plan's integer regions beside float, empty likewise.
        times: of the plan's nodes beside float, empty likewise.
    """

    plan: Plan
    sensitivities: tuple[NodeNoise, ...]
    measured: int
    frontier: tuple[Point, ...] = ()
    regions: tuple[Region, ...] = ()
    times: tuple[NodeTime, ...] = ()


def leave_what_hurts(
    planner: Planner, measure: Measure, goal: float, progress: Progress, *, told: NodeNoises | None = None
) -> Outcome:
    """Find a plan that reaches ``goal`` by taking the noisiest nodes out of integer arithmetic first.

    Each weighted static node is measured alone; then the shortest prefix of the worst is sought, by bisection, whose
    demotion reaches the goal. Demoted nodes store their weights as codes, of 16 bits when they are among the smallest
    nodes, which together hold a hundredth of all weights; only when that is still too noisy do other stored weights get
    16 bits, most noise for their size first, and then the rest is tried as integers once more. Where even these are too
    coarse, weights are left in float.

    Args:
        planner: demotions to plan.
        measure: plan to the worst output's SQNR.
        goal: SQNR in decibels to reach.
        progress: told of the stage ``search``.
        told: noise of nodes that is known without measuring each alone, as a large model takes long to write; of
            those that are equally noisy the smallest go first.

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
        sizes = _sizes(full)
        return sorted(told(planner(demoted), modes), key=lambda one: (one.sqnr, sizes[one.node]))

    static = ranked({Mode.STATIC}, {})
    demotions = {one.node: _demotion(one, small) for one in static}
    plan, sqnr = best = _shortest_prefix(planner, counter, demotions, {}, goal)
    stored: list[NodeNoise] = []
    if sqnr < goal:
        stored = ranked({Mode.STORAGE, Mode.WEIGHT_ONLY}, demotions)
        sizes = _sizes(full)
        # Float weights are four times as large, so those go first that take away most noise for their size.
        worth = sorted(stored, key=lambda one: one.sqnr + 10 * math.log10(sizes[one.node] + 1))
        lefts = {one.node: _demotion(one, small) for one in worth}
        plan, sqnr = best = _shortest_prefix(planner, counter, lefts, demotions, goal)
        if sqnr < goal:
            lefts = {node: Demotion(Mode.FLOAT, demotion.reason) for node, demotion in lefts.items()}
            plan, sqnr = best = max(best, _shortest_prefix(planner, counter, lefts, demotions, goal), key=_sqnr)
        if sqnr >= goal:
            # With the few left whose 8-bit codes alone are too coarse, others may be integers after all.
            left = {node: demotion for node, demotion in lefts.items() if _follows(plan.by_node[node], demotion)}
            others = {node: demotion for node, demotion in demotions.items() if node not in left}
            best = _shortest_prefix(planner, counter, others, left, goal)
            best = best if best[1] >= goal else (plan, sqnr)
    seen = (one for one in (*static, *stored) if told is None or one.sqnr < math.inf)
    sensitivities = sorted(seen, key=lambda one: one.sqnr)
    return Outcome(best[0] if best[1] > full_sqnr else full, tuple(sensitivities), counter.calls)


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


def _sizes(plan: Plan) -> Mapping[str, int]:
    """Return how many weights each weighted node holds."""
    return {one.node: sum(weight.elements for weight in one.weights) for one in plan.decisions if one.weights}


def small_nodes(plan: Plan) -> set[str]:
    """Return the smallest nodes, whose few weights the file hardly feels when they stay float."""
    sizes = _sizes(plan)
    ascending = sorted(sizes, key=lambda node: sizes[node])
    share = accumulate(sizes[node] for node in ascending)
    return {node for node, held in zip(ascending, share, strict=True) if held <= _SMALL_SHARE * sum(sizes.values())}


def _demotion(one: NodeNoise, small: set[str]) -> Demotion:
    if one.mode is Mode.WEIGHT_ONLY and one.node not in small:
        return Demotion(Mode.WEIGHT_ONLY, "its weights as coarser codes hurt the worst output too much", weight=FINER)
    plenty = one.mode is Mode.STATIC and one.node not in small
    reason = f"{one.mode} quantization of it hurts the worst output too much"
    return Demotion(Mode.STORAGE, reason, weight=None if plenty else FINEST)


def _follows(decision: Decision, demotion: Demotion) -> bool:
    """Whether a decision is what a demotion asked for."""
    wanted = demotion.weight is None or (decision.weights and decision.weights[0].spec == demotion.weight)
    return decision.mode is demotion.mode and bool(wanted)


def _sqnr(found: tuple[Plan, float]) -> float:
    return found[1]


class _Counter:
    """A measure that counts its calls and tells of them, and into how many parts it tells nodes apart."""

    def __init__(self, measure: Measure, progress: Progress, parts: float = math.inf) -> None:
        self._measure, self._progress, self.parts = measure, progress, parts
        self.calls = 0
        self._expected = 1

    def expect(self, more: int) -> None:
        self._expected += more + max(more, 1).bit_length()

    def measured(self, plan: Plan) -> float | None:
        sqnr = self._measure(plan)
        if sqnr is not None:
            self.calls += 1
            self._progress("search", self.calls, max(self._expected, self.calls))
        return sqnr

    def __call__(self, plan: Plan) -> float:
        """Return what was measured; what was not reaches no goal."""
        sqnr = self.measured(plan)
        return -math.inf if sqnr is None else sqnr


def as_stored(plan: Plan, full: Plan, reason: str) -> Demotions:
    """Return what makes of a plan one with the same codes that are decoded when the model is loaded.

    Args:
        plan: whose model was slower than float.
        full: what the planner wants without demotions.
        reason: why the codes are not worked on.
    """
    found = {}
    for one in plan.decisions:
        if one.weights and one.mode is not Mode.FLOAT:
            found[one.node] = Demotion(Mode.STORAGE, reason, weight=one.weights[0].spec)
        elif full.by_node[one.node].weights:
            # Codes were too coarse for it.
            found[one.node] = Demotion(Mode.FLOAT, one.reason, one.figures)
    return found


def slower(speed: float) -> str:
    """Return the reason for storing what was worked on, given how many times as fast as float it ran."""
    return f"with codes in each run the model ran {speed:.2f} times as fast as the float model"


def without_integers(planner: Planner, plan: Plan, reason: str) -> Planner:
    """Return a planner for a model that integers do no good: its weights are stored, and it computes in float.

    Args:
        planner: plans with some nodes demoted.
        plan: what the planner wants without demotions, so that no node becomes an integer kernel again.
        reason: why nothing becomes an integer kernel.
    """
    slow = {
        decision.node: Demotion(Mode.STORAGE, reason)
        for decision in plan.decisions
        if decision.mode in DECODING and decision.weights
    }
    return lambda demotions: planner({**slow, **demotions})
