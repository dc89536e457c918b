"""Greedy choices by measured error: nodes that fall back to float, and weights with more or fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.numerics.affine import ratio_of_sqnr, sqnr_of_ratio
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.search.profiling import PlanTester
from onnxq.search.search import (
    FINER,
    FINEST,
    Demotions,
    Measure,
    NodeSensitivity,
    Planner,
    PlanSearch,
    SensitivitiesOfNodes,
    backward_elimination,
    sizes_of,
    small_nodes,
)
from onnxq.system.resources import Progress

# Share of the allowed error for compressed weights; beyond it some weights get more bits or smaller blocks.
_STORED_SHARE = 0.6
# If weights make no more than this share of the total error, finer weights help too little.
_LOW_ERROR_SHARE = 0.25
# Specs between fewer than 8 bits and FINER, coarsest first. The second takes hardly more bytes than one scale per
# channel.
_BETWEEN = (QuantSpec("int4", (32,)), QuantSpec("int8-narrow", (128,), scale="float16"))

HANDED_BACK = 8
"""Models that are built per step to take back finer weights that are not needed, if models are small."""


def stored_goal(full: Plan, goal: float) -> float:
    """Return the SQNR in decibels at which compressed weights use only their share of the allowed error."""
    integers = any(one.mode in (Mode.STATIC, Mode.DYNAMIC) for one in full.decisions)
    return goal + (sqnr_of_ratio(_STORED_SHARE) if integers else 0.0)


@dataclass(frozen=True, eq=False)
class WeightPrecisionSearch:
    """Finds the compressed weights that need more bits or smaller blocks.

    Attributes:
        full: the plan with all possible nodes as integer kernels.
        stores: demotions that leave no integer kernels.
        goal: SQNR in decibels to reach.
        is_late: True when time is up; then no finer weights are taken back.
        most: models to build at most per step to take back finer weights.
        parts: resolution of the search: nodes are only told apart in this many parts.
    """

    profiler: PlanTester
    full: Plan
    stores: Demotions
    goal: float
    is_late: Callable[[], bool] = lambda: False
    most: int = HANDED_BACK
    parts: float = math.inf

    def are_needed(self, share: float) -> bool:
        """Return whether the compressed weights alone use up too much of the allowed error.

        `share` is the share of weights in the error of all quantizers. If it is low, the weights need only reach the
        goal itself.
        """
        enough = self.goal if share <= _LOW_ERROR_SHARE else self._stored_goal
        return self._sqnr({}) < enough

    def found(self, nsr: Mapping[str, float]) -> Demotions:
        """Return demotions that give finer specs to weights that are too coarse, highest error per weight first.

        Weights get blocks with smaller scales (FINER). They get 16 bits if they are small, or if FINER is too coarse.
        If nothing else is accurate enough, they stay float. Finer specs that turn out not to be needed are taken back.

        `nsr` has the noise-to-signal ratio of each node's weights alone.
        """
        weighted = self._weighted
        sizes = {node: sum(weight.elements for weight in one.weights) for node, one in weighted.items()}
        order = sorted(weighted, key=lambda node: -nsr.get(node, 0.0) / (sizes[node] + 1))
        return self._hand_back(self._too_fine(order, nsr), order)

    def _too_fine(self, order: Sequence[str], nsr: Mapping[str, float]) -> Demotions:
        """Demote a prefix of the order, as short as the measurements find."""
        weighted = self._weighted
        floats = dict.fromkeys(order, Demotion(Mode.FLOAT, _too_coarse("codes")))
        small = small_nodes(self.full)
        finer = {
            node: _finer(Mode.STORAGE, self._own(node), FINEST)
            if node in small
            else _finer(_storing(weighted[node].mode), self._own(node), FINER)
            for node in order
        }
        # FINER was not tried for small nodes.
        finest = {node: finer[node] if node in small else _finer(Mode.STORAGE, FINER, FINEST) for node in order}
        with_finer = self._sqnr(finer)
        if with_finer >= self._stored_goal:
            return self._fewest(finer, {}, nsr) or finer
        if with_finer >= self.goal:
            return finer
        # Runtimes that multiply quantized weights may round the data too; weights that are dequantized first avoid
        # this.
        decoded = {node: replace(one, mode=Mode.STORAGE) for node, one in finer.items()}
        if decoded != finer:
            if self._sqnr(decoded) >= self.goal:
                return self._fewest(decoded, finer, nsr) or decoded
            finer = decoded
        # 16 bits take twice the bytes and floats four times, so only weights that need them get them, and none because
        # time ran out.
        for better in (finest, floats):
            if self.is_late():
                return finer
            if (fewest := self._fewest(better, finer, nsr)) is not None:
                return fewest
        return {**finer, **floats}

    def _hand_back(self, better: Demotions, order: Sequence[str]) -> Demotions:
        """Take finer specs back, or make them less fine; large weights with a low error come first."""

        def is_enough(demotions: Demotions) -> bool:
            return not self.is_late() and self._sqnr(demotions) >= min(self._stored_goal, reached)

        reached = self._sqnr(better)
        if reached < self.goal:
            return better
        by_error = [node for node in reversed(order) if node in better]
        kept = backward_elimination(better, dict.fromkeys(by_error), is_enough, most=self.most)
        for spec in _BETWEEN:
            finer = [node for node in by_error if node in kept and _is_between(self._weighted[node], spec, kept[node])]
            coarser = {node: _finer(kept[node].mode, self._own(node), spec) for node in finer}
            kept = backward_elimination(kept, coarser, is_enough, most=self.most)
        return kept

    @cached_property
    def _weighted(self) -> Mapping[str, Decision]:
        return {one.node: one for one in self.full.decisions if one.weights}

    def _own(self, node: str) -> QuantSpec:
        return self._weighted[node].weights[0].spec

    def _fewest(self, better: Demotions, base: Demotions, nsr: Mapping[str, float]) -> Demotions | None:
        """Bisect for the shortest prefix that reaches the goal; None if none is known that does.

        The errors of the weights alone tell where to begin.
        """
        order = tuple(better)

        def first(count: int) -> Demotions:
            return {**base, **{node: better[node] for node in order[:count]}}

        low, high = 0, self._expected_to_need(order, nsr)
        if self._sqnr(first(high)) < self._stored_goal:
            low, high = high, len(order)
            if self.is_late() or self._sqnr(first(high)) < self.goal:
                return None
        near = max(int(len(order) / self.parts), 1)
        while high - low > near and not self.is_late():
            middle = (low + high) // 2
            enough = self._sqnr(first(middle)) >= self._stored_goal
            low, high = (low, middle) if enough else (middle, high)
        untried = order[low + 1 : high] if high - low > near else ()
        return {**first(high), **{node: replace(better[node], reason=_UNTRIED, finer=_UNTRIED) for node in untried}}

    def _expected_to_need(self, order: Sequence[str], nsr: Mapping[str, float]) -> int:
        """Return the length of the shortest prefix whose demotion leaves errors that add up to less than is allowed."""
        rest, allowed = 0.0, ratio_of_sqnr(self._stored_goal)
        for count in range(len(order), 1, -1):
            rest += nsr.get(order[count - 1], 0.0)
            if rest > allowed:
                return count
        return 1

    @property
    def _stored_goal(self) -> float:
        return stored_goal(self.full, self.goal)

    def _sqnr(self, demotions: Demotions) -> float:
        return self.profiler.sqnr(self.profiler.plan({**self.stores, **demotions}))


_UNTRIED = "time ran out before its weights were tried in fewer bits"


def _finer(mode: Mode, coarse: QuantSpec, spec: QuantSpec) -> Demotion:
    if isinstance(coarse.granularity, Granularity):
        described = f"{coarse.format} values with one scale per {coarse.granularity}"
    else:
        described = f"{coarse.format} values in blocks of {'x'.join(map(str, coarse.granularity))}"
    reason = _too_coarse(described)
    return Demotion(mode, reason, weight=spec, finer=reason)


def _too_coarse(described: str) -> str:
    return f"its weights as {described} would lower the SQNR of the worst output too much"


def _storing(mode: Mode) -> Mode:
    return Mode.WEIGHT_ONLY if mode is Mode.WEIGHT_ONLY else Mode.STORAGE


def _is_between(decision: Decision, spec: QuantSpec, better: Demotion) -> bool:
    bits, own = format_named(spec.format).bits, format_named(decision.weights[0].spec.format).bits
    return own < bits and better.weight in (FINER, FINEST)


# Greedy fallback: nodes leave integer arithmetic in the order of their measured error

# Parts to tell nodes apart if their error was measured in groups; a finer answer is not worth a model.
_PARTS = 12
# Models built per step to take back finer weights, if models take long to write.
_FEW_HANDED_BACK = 3
_STORED = frozenset({Mode.STORAGE, Mode.WEIGHT_ONLY})
# The spec of 8-bit weight compression.
_PLAIN, _PLAIN_BITS = QuantSpec("int8-narrow", granularity=Granularity.CHANNEL), 8
# Error above the signal in decibels beyond which nodes need not be told apart.
_LOUDEST_DB = 100.0


def greedy_fallback(
    planner: Planner,
    measure: Measure,
    goal: float,
    progress: Progress,
    *,
    known: SensitivitiesOfNodes | None = None,
    size: Callable[[Plan], float] | None = None,
) -> PlanSearch:
    """Find a plan that reaches ``goal`` by demoting the nodes with the highest error first.

    1. Measure each static node with weights alone.
    2. Bisect for the shortest prefix of the worst nodes whose demotion reaches the goal. Demoted nodes keep compressed
    weights. The smallest nodes, with a hundredth of all weights together, get 16 bits.
    3. If the error is still too high, give compressed weights finer specs (`WeightPrecisionSearch`). Then try the other
    nodes as integers again.

    Args:
        planner: makes a plan from demotions.
        measure: returns the SQNR of a plan's worst output, or None when no more models may be built.
        goal: SQNR in decibels to reach.
        progress: called at the stage ``search``.
        known: known sensitivities, for large models; on equal error the smallest nodes go first. None measures each
            node.
        size: bytes of a plan's model. If weights below 8 bits end up larger than 8 bits everywhere, 8 bits are used.

    Returns:
        The first plan that reaches the goal, or the most accurate one found.
    """
    counter = _Counter(measure, progress, math.inf if known is None else _PARTS)
    full = planner({})
    full_sqnr = counter(full)
    if full_sqnr >= goal:
        return PlanSearch(full, (), counter.calls)
    small = small_nodes(full)

    def ranked(modes: Set[Mode], demoted: Demotions) -> list[NodeSensitivity]:
        if known is None:
            return _alone(planner, counter, modes, demoted)
        counter.expect(0)
        sizes = sizes_of(full)
        return sorted(known(planner(demoted), modes), key=lambda one: (one.sqnr, sizes[one.node]))

    static = ranked({Mode.STATIC}, {})
    demotions = {one.node: _demotion(one, small) for one in static}
    best = _shortest_prefix(planner, counter, demotions, {}, goal)
    stored: list[NodeSensitivity] = []
    if best[1] < goal:
        stored = ranked(_STORED, demotions)
        tried = _Tried(planner, counter, demotions, [best])
        left = _with_finer_weights(
            tried, {one.node: ratio_of_sqnr(max(one.sqnr, -_LOUDEST_DB)) for one in stored}, goal, size
        )
        best = max(tried.found, key=_sqnr)
        if (sqnr := tried.sqnr(plan := tried.plan(left))) >= goal:
            # Once the few weights that are too coarse at 8 bits are finer, other nodes may be integers again.
            others = {node: demotion for node, demotion in demotions.items() if node not in left}
            best = _shortest_prefix(planner, counter, others, left, goal)
            best = best if best[1] >= goal else (plan, sqnr)
    seen = (one for one in (*static, *stored) if known is None or one.sqnr < math.inf)
    sensitivities = sorted(seen, key=lambda one: one.sqnr)
    return PlanSearch(best[0] if best[1] > full_sqnr else full, tuple(sensitivities), counter.calls)


@dataclass(frozen=True, eq=False)
class _Tried:
    """Plans with common demotions, and what was measured of them."""

    planner: Planner
    counter: _Counter
    demoted: Demotions
    found: list[tuple[Plan, float]]

    def plan(self, demotions: Demotions) -> Plan:
        return self.planner({**self.demoted, **demotions})

    def sqnr(self, plan: Plan) -> float:
        self.found.append((plan, self.counter(plan)))
        return self.found[-1][1]


def _with_finer_weights(
    tried: _Tried, nsr: Mapping[str, float], goal: float, size: Callable[[Plan], float] | None
) -> dict[str, Demotion]:
    """Give compressed weights finer specs, and prefer plain 8 bits if these take fewer bytes."""
    plan, counter = tried.plan({}), tried.counter
    stored = replace(plan, decisions=tuple(one for one in plan.decisions if one.mode in _STORED))
    most = HANDED_BACK if counter.parts == math.inf else _FEW_HANDED_BACK
    weights = WeightPrecisionSearch(tried, stored, {}, goal, lambda: counter.is_over, most, counter.parts)
    better = dict(weights.found(nsr))
    coarse = {one.node for one in stored.decisions if _bits(one) < _PLAIN_BITS}
    if size is None or not coarse & better.keys() or tried.sqnr(tried.plan(better)) < goal:
        return better
    reason = (
        "its weights in fewer bits would lower the SQNR of the worst output too much, and finer ones take more bytes"
    )
    plain = dict.fromkeys(coarse, Demotion(Mode.STORAGE, reason, weight=_PLAIN, finer=reason))
    if size(tried.plan(better)) <= size(tried.plan({**better, **plain})):
        return better

    def is_enough(demotions: Demotions) -> bool:
        return tried.sqnr(tried.plan(demotions)) >= goal

    if is_enough({**better, **plain}):
        return {**better, **plain}
    fewer = backward_elimination(better, {node: plain[node] for node in better if node in coarse}, is_enough, most=most)
    return min(better, dict(fewer), key=lambda one: size(tried.plan(one)))


def _alone(planner: Planner, measure: _Counter, modes: Set[Mode], demoted: Demotions) -> list[NodeSensitivity]:
    """Measure nodes alone, with all other weights in float; stop when no more models may be built."""
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
        found.append(NodeSensitivity(unit, plan.by_node[unit].mode, sqnr))
    return sorted(found, key=lambda one: one.sqnr)


def _shortest_prefix(
    planner: Planner, measure: _Counter, high_error: Demotions, demoted: Demotions, goal: float
) -> tuple[Plan, float]:
    """Return the plan with the shortest prefix of ``high_error`` that reaches the goal, or with all.

    With a limited number of parts, the prefix is less than one part too long.
    """
    nodes = tuple(high_error)
    near = max(int(len(nodes) / measure.parts), 1)

    def demote(count: int) -> tuple[Plan, float]:
        plan = planner({**demoted, **{node: high_error[node] for node in nodes[:count]}})
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


def _demotion(one: NodeSensitivity, small: set[str]) -> Demotion:
    reason = f"{one.mode} quantization of it lowers the SQNR of the worst output too much"
    stored = Demotion(Mode.STORAGE, reason)
    return replace(stored, weight=FINEST, finer=reason) if one.node in small else stored


def _bits(decision: Decision) -> int:
    return min((format_named(weight.spec.format).bits for weight in decision.weights), default=_PLAIN_BITS)


def _sqnr(found: tuple[Plan, float]) -> float:
    return found[1]


class _Counter:
    """A measure that counts its calls, reports progress and caches results, with the resolution `parts`."""

    def __init__(self, measure: Measure, progress: Progress, parts: float = math.inf) -> None:
        self._measure, self._progress, self.parts = measure, progress, parts
        self.calls = 0
        self.is_over = False
        self._expected = 1
        self._known: dict[Hashable, float] = {}

    def expect(self, more: int) -> None:
        self._expected += more + max(more, 1).bit_length()

    def measured(self, plan: Plan) -> float | None:
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
        """Return the SQNR, or minus infinity if no more models may be built."""
        sqnr = self.measured(plan)
        return -math.inf if sqnr is None else sqnr
