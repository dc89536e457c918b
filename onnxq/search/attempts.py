"""From a plan to a verified model: repeated attempts until one is accurate and fast enough."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.range_search import pooled
from onnxq.config.effort import Effort
from onnxq.config.scheme import QuantSpec
from onnxq.errors import tolerate
from onnxq.evaluation.goal import Goal, aim_of, lacking_bound
from onnxq.evaluation.latency import NOT_SLOWER
from onnxq.evaluation.verification import Verification
from onnxq.ir import all_nodes
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.numerics.formats import format_named
from onnxq.ops import operator_of
from onnxq.planning.plan import Demotion, Plan
from onnxq.search.context import SEARCH_RUNS, SearchContext, SearchResult
from onnxq.search.cross_validation import WORTH
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.refinement import MethodGain
from onnxq.search.search import FINER, Demotions, PlanSearch, as_stored, slower, without_integers

# How often a plan is searched again if the one before misses the goal on the holdout set.
_REPEATED_SEARCHES = 2
_UNFAITHFUL = "with integers the model is not accurate enough on samples that did not choose it"
# A metric falls as the error rises, so the lowest SQNR is tried first.
_METRIC_AIMS_DB = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)
# Bits of weights reach more than integers do, and each step is a larger file.
_BITS_AIMS_DB = (*_METRIC_AIMS_DB, 45.0, 50.0, 55.0)

# Weight compression aims this far above the last metric aim, and above the SQNR of the last plan.
_STORED_MARGIN_DB = 20.0


def search_plan(
    context: SearchContext,
    plan: Plan,
    config: EncodingConfig,
    effort: Effort,
    goal: Goal,
    *,
    is_stored: bool = False,
) -> SearchResult:
    """Search for the fastest plan by measuring; fall back if the model is slower than float or not accurate enough.

    `plan` is the plan of the scheme. With `is_stored`, weights are only compressed. If the goal is a metric, the first
    plan whose loss is small enough is taken.
    """
    choice = _Attempts(context, plan, config, effort, goal, is_stored)
    return choice.reach_decibels() if goal.metric is None else choice.reach_metric()


@dataclass(frozen=True, eq=False)
class _Attempts:
    """The arguments of `search_plan`."""

    context: SearchContext
    plan: Plan
    config: EncodingConfig
    effort: Effort
    goal: Goal
    is_stored: bool = False

    def reach_metric(self) -> SearchResult:
        """Raise the SQNR aim step by step until the metric is trusted to lose little enough.

        Skip aims that the last plan reached already. If no plan passes, only compress weights, as accurately as
        possible, and return that last plan.
        """
        evaluator = self.context.evaluator
        reached, number = -math.inf, 0
        for aim in _BITS_AIMS_DB if self._chooses_bits else _METRIC_AIMS_DB:
            if aim <= reached:
                continue
            number += 1
            found = self._attempt(evaluator, aim, number)
            is_enough = found.scores is None or found.scores.is_trusted(self.goal.max_drop)
            if is_enough or self._most_bytes is not None:
                return found
            if self._is_spent:
                break
            found = replace(found, verification=found.verification.closed)
            reached = evaluator.sqnr(found.outcome.plan, self.config)
        if not any(one.weights for one in found.outcome.plan.decisions):
            return found
        return self._attempt(evaluator, max(reached, _METRIC_AIMS_DB[-1]) + _STORED_MARGIN_DB, number + 1, stored=True)

    def reach_decibels(self) -> SearchResult:
        """Return a plan that passes on the holdout set, or the last one tried.

        If a plan misses the goal there, raise the search's aim by the missing decibels. The last attempt only
        compresses weights.
        """
        evaluator, aim = self.context.evaluator, self.context.aim(self.goal)
        found = self._attempt(evaluator, aim)
        if self._most_bytes is not None:
            return found
        for number in range(_REPEATED_SEARCHES + 1):
            lacking = found.lacks(self.goal) or self._lacking_promise(evaluator, found)
            if not lacking or not any(one.weights for one in found.outcome.plan.decisions):
                break
            spent = self._is_spent
            # Plans are tried on onnxruntime, so another search could not see a difference of another engine.
            last = number == _REPEATED_SEARCHES or spent or found.verification.disputed
            if last and found.verification.floats_miss(self.goal.min_sqnr):
                # Compressed weights compute in the engine's floats, which already miss the goal.
                break
            found = replace(found, verification=found.verification.closed)
            reached = evaluator.sqnr(found.outcome.plan, self.config)
            aim = lacking + (max(aim, reached) if math.isfinite(reached) else aim)
            found = self._next_attempt(found, aim, stored=last)
            if last:
                break
        if (missing := self._missing_bound(found)) and not self._is_spent:
            found = replace(found, verification=found.verification.closed)
            return self._next_attempt(found, aim + missing, stored=True)
        return found

    def _missing_bound(self, found: SearchResult) -> float:
        """Return the decibels that the bound of stored weights lacks to half of the goal, if finer ones may help."""
        plan, lacks = found.outcome.plan, lacking_bound(found.verification.agreement, self.goal)
        if lacks is None or plan.decodes or not any(one.weights for one in plan.decisions):
            return 0.0
        return lacks[1] if math.isfinite(lacks[1]) else 0.0

    def _next_attempt(self, before: SearchResult, aim: float, *, stored: bool) -> SearchResult:
        """Try again, and remember if time ran out before."""
        rounds, spent = before.rounds + 1, before.outcome.spent
        found = self._attempt(self.context.evaluator, aim, rounds, stored=stored)
        return replace(found, rounds=rounds, outcome=replace(found.outcome, spent=spent or found.outcome.spent))

    @property
    def _is_spent(self) -> bool:
        return not self.context.has_time(SEARCH_RUNS)

    def _lacking_promise(self, evaluator: PlanEvaluator, found: SearchResult) -> float:
        """Return the decibels that both the search samples and the holdout set lack to promise the goal.

        The best of several plans that missed on the search samples may pass a small holdout set by luck.
        """
        wanted, outputs = self.goal.min_sqnr, found.verification.agreement.outputs
        if evaluator.sqnr(found.outcome.plan, self.config) >= wanted:
            return 0.0
        # For labels, `decibels` is a bound itself.
        by_verification = min((one.decibels if one.bound is None else one.bound for one in outputs), default=-math.inf)
        return max(wanted - max(evaluator.sqnr(found.outcome.plan, self.config), by_verification), 0.0)

    def _attempt(self, evaluator: PlanEvaluator, aim: float, number: int = 1, *, stored: bool = False) -> SearchResult:
        context = self.context
        if self._chooses_bits:
            outcome = self._with_chosen_bits(evaluator, aim)
        elif stored or self.is_stored:
            planner = without_integers(context.bench.plan, self.plan, _UNFAITHFUL)
            outcome = context.lowest_error(evaluator, self.config, planner, aim)
        else:
            outcome = self._search(evaluator, aim)
        # The time to build and verify from here on is reserved.
        spent = not context.has_time(0)
        verification = context.built(outcome, self.config, number)
        speed = self._speed(verification)
        if outcome.plan.decodes and (speed < 1 or not self._keeps_up(verification)):
            weighed = tuple(replace(point, chosen=False) for point in outcome.frontier)
            verification = verification.closed
            outcome = replace(self._store_weights(evaluator, outcome, speed, aim), frontier=weighed)
            verification = context.built(outcome, self.config, number)
        scores = context.verifier.scores(context.files.staged, number)
        outcome, tried_on = replace(outcome, spent=spent or outcome.spent), evaluator.answered.samples
        keeps_up = self._keeps_up(verification)
        return SearchResult(self.config, outcome, verification, scores, tried_on=tried_on, keeps_up=keeps_up)

    @property
    def _chooses_bits(self) -> bool:
        """Whether each weight gets bits of its own."""
        return self.goal.max_size is not None or self.goal.prefers_size

    @property
    def _most_bytes(self) -> int | None:
        """The size to fill with the least error; None if a goal is to be reached in the fewest bytes."""
        most = self.goal.max_size
        return most if isinstance(most, int) and not self.goal.prefers_size else None

    def _with_chosen_bits(self, evaluator: PlanEvaluator, aim: float) -> PlanSearch:
        with tolerate("the choice of bits"):
            return self.context.with_chosen_bits(evaluator, self.config, self.effort, aim, self._most_bytes)
        return self.context.lowest_error(evaluator, self.config, self.context.bench.plan, aim)

    def _search(self, evaluator: PlanEvaluator, aim: float) -> PlanSearch:
        context = self.context
        with tolerate("the search for the fastest plan"):
            return context.search(evaluator, self.config, self.effort, aim)
        return context.lowest_error(evaluator, self.config, context.bench.plan, aim)

    def _store_weights(self, evaluator: PlanEvaluator, outcome: PlanSearch, speed: float, aim: float) -> PlanSearch:
        """Keep the same weights if they are accurate enough in float; otherwise search again."""
        reason = slower(speed, integers=self.context.bench.scheme.multiplies_integers)
        same = self.context.bench.plan(as_stored(outcome.plan, self.plan, reason))
        if self._chooses_bits or evaluator.sqnr(same, self.config) >= aim:
            return replace(outcome, plan=same, regions=(), times=())
        planner = without_integers(self.context.bench.plan, self.plan, reason)
        return self.context.lowest_error(evaluator, self.config, planner, aim)

    def _keeps_up(self, verification: Verification) -> bool:
        return not self.context.measurable or verification.keeps_up

    def _speed(self, verification: Verification) -> float:
        """Return the speed relative to float that was measured first, so that repeated runs choose the same plan."""
        if verification.latency is None or not self.context.measurable:
            # The time of another runtime says nothing about the target.
            return 1.0
        speed = verification.latency.speed
        if not verification.keeps_up:
            speed = min(speed, NOT_SLOWER)
        elif verification.kernels.computes_in_float:
            # The kernels compute in float, so a lower figure is chance.
            speed = max(speed, 1.0)
        return self.context.profiler(self.config).found_speed(self.context.files.staged, speed)


# Without a search: the plan of the scheme, with embeddings of as many bits as the goal needs

_REASON = "a row that is looked up adds nothing up, so errors of fewer bits would not cancel"
_BITS = 8
_BYTES_PER_MEGABYTE = 1e6


def apply_scheme(
    context: SearchContext, plan: Plan, config: EncodingConfig, goal: Goal, *, tables: bool
) -> SearchResult:
    """Build and verify the plan of the scheme without a search, or the bits of weights by their values alone.

    `tables` allows embeddings more bits than the scheme asks for; nothing else may change.
    """
    gains: tuple[MethodGain, ...] = ()
    if isinstance(goal.max_size, int):
        with tolerate("the choice of bits"):
            chosen = context.with_chosen_bits(context.evaluator, config, None, aim_of(goal.min_sqnr), goal.max_size)
            return context.verified(chosen, config)
    if tables and goal.metric is None and len(context.samples) > 1 and context.has_time(SEARCH_RUNS):
        with tolerate("lookup tables of more bits"):
            plan, gains = with_finer_tables(context.evaluator, plan, config, aim_of(goal.min_sqnr))
    return replace(context.follow(plan, config), gains=gains)


def with_finer_tables(
    evaluator: PlanEvaluator, plan: Plan, config: EncodingConfig, aim: float
) -> tuple[Plan, tuple[MethodGain, ...]]:
    """Give embeddings 8 bits, as many as the aim needs, and return the plan and the gains of the method.

    Rounding errors of a matrix multiplication cancel in its sums. An error of an embedding does not, so extra bits are
    worth most there. Embeddings with the largest error reduction per added byte come first.

    `aim` is an SQNR in decibels.
    """
    finer = _finer(evaluator, plan)
    if not finer or evaluator.sqnr(plan, config) >= aim:
        return plan, ()
    start, before = time.monotonic(), pooled(evaluator.nsr(plan, config))

    def planned(demotions: Demotions) -> Plan:
        return evaluator.bench.plan(demotions)

    def nsr(demotions: Demotions) -> float:
        return pooled(evaluator.nsr(planned(demotions), config))

    alone = {node: nsr({node: one}) for node, one in finer.items()}
    added = {node: _added_bytes(plan, node) for node in finer}
    worth = sorted(
        (node for node in finer if alone[node] < WORTH * before),
        key=lambda node: (alone[node] - before) / added[node],
    )
    taken: dict[str, Demotion] = {}
    for node in worth:
        if taken and evaluator.sqnr(planned(taken), config) >= aim:
            break
        taken[node] = finer[node]
    kept = f"{len(taken)} of {_BITS} bits, {sum(added[node] for node in taken) / _BYTES_PER_MEGABYTE:.2f} MB more"
    gain = MethodGain(
        "embeddings",
        sqnr_of_ratio(before),
        sqnr_of_ratio(nsr(taken)),
        kept,
        time.monotonic() - start,
        where=tuple(taken),
    )
    if not taken or gain.after <= gain.before:
        return plan, (MethodGain("embeddings", gain.before, gain.before, "", gain.seconds, "no lower error"),)
    return planned(taken), (gain,)


def _finer(evaluator: PlanEvaluator, plan: Plan) -> dict[str, Demotion]:
    return {
        node.name: Demotion(decision.mode, _REASON, weight=FINER, finer=_REASON)
        for _, node in all_nodes(evaluator.bench.graph)
        if (operator := operator_of(node)) is not None and operator.looks_up
        for decision in (plan.by_node[node.name],)
        if decision.weights and len(set(node.inputs[0].outputs)) == 1 and _is_coarse(decision.weights[0].spec)
    }


def _is_coarse(spec: QuantSpec) -> bool:
    return format_named(spec.format).bits < _BITS and not spec.is_followed


def _added_bytes(plan: Plan, node: str) -> float:
    weights = plan.by_node[node].weights
    return sum(one.elements * (_BITS - format_named(one.spec.format).bits) / 8 for one in weights)
