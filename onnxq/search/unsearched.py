"""What is taken where there is no search: the scheme's plan, with tables as fine as the goal takes."""

from __future__ import annotations

import time
from dataclasses import replace

from onnxq.algorithms.range_choice import pooled
from onnxq.algorithms.recipe import Recipe
from onnxq.config.scheme import Spec
from onnxq.errors import tolerate
from onnxq.evaluation.goal import Goal, aim_of, enough_of
from onnxq.ir import nodes
from onnxq.numerics.affine import decibels
from onnxq.numerics.formats import format_named
from onnxq.ops import operator_of
from onnxq.planning.plan import Demotion, Plan
from onnxq.search.choosing import SEARCH_RUNS, Chooser, Chosen
from onnxq.search.effort import Accuracy
from onnxq.search.folds import WORTH
from onnxq.search.refining import Gain
from onnxq.search.search import FINER, Demotions
from onnxq.search.trials import Trials

_REASON = "a row that is looked up adds nothing up, so errors of coarser codes would not cancel"
_BITS = 8
_MEGABYTE = 1e6


def unsearched(chooser: Chooser, plan: Plan, recipe: Recipe, goal: Goal, last: Accuracy, *, tables: bool) -> Chosen:
    """Build and judge a plan as it is, but for its tables.

    Args:
        chooser: builds and judges.
        plan: what the scheme wants.
        recipe: how codes are chosen.
        goal: how faithful the model has to be.
        last: what is tried for the accuracy of the plan.
        tables: whether tables may have more bits than the scheme wants.
    """
    gains: tuple[Gain, ...] = ()
    if tables and goal.metric is None and len(chooser.samples) > 1 and chooser.has_time(SEARCH_RUNS):
        with tolerate("lookup tables of more bits"):
            plan, gains = with_finer_tables(chooser.trials, plan, recipe, aim_of(goal.min_sqnr))
    # What is found for one plan costs most, so that with little effort only what is lacking is made up for.
    refined = chooser.refined(plan, recipe, last, enough_of(goal))
    return replace(chooser.follow(plan, refined.basis.recipe), gains=(*gains, *refined.gains))


def with_finer_tables(trials: Trials, plan: Plan, recipe: Recipe, aim: float) -> tuple[Plan, tuple[Gain, ...]]:
    """Return a plan with as many tables of 8 bits as an aim takes, and what they did, where any were tried.

    What a product multiplies is rounded so that its errors cancel in sums; of a table each error stands as it is, so it
    is worth most bits for its bytes. First come those that take off most noise for the bytes that they add.

    Args:
        trials: try plans.
        plan: the one without.
        recipe: how codes are chosen.
        aim: decibels to reach.
    """
    finer = _finer(trials, plan)
    if not finer or trials.sqnr(plan, recipe) >= aim:
        return plan, ()
    start, before = time.monotonic(), pooled(trials.noise(plan, recipe))

    def planned(demotions: Demotions) -> Plan:
        return trials.bench.plan(demotions)

    def noise(demotions: Demotions) -> float:
        return pooled(trials.noise(planned(demotions), recipe))

    alone = {node: noise({node: one}) for node, one in finer.items()}
    added = {node: _added_bytes(plan, node) for node in finer}
    worth = sorted(
        (node for node in finer if alone[node] < WORTH * before),
        key=lambda node: (alone[node] - before) / added[node],
    )
    taken: dict[str, Demotion] = {}
    for node in worth:
        if taken and trials.sqnr(planned(taken), recipe) >= aim:
            break
        taken[node] = finer[node]
    kept = f"{len(taken)} of {_BITS} bits, {sum(added[node] for node in taken) / _MEGABYTE:.2f} MB more"
    gain = Gain("tables", decibels(before), decibels(noise(taken)), kept, time.monotonic() - start, where=tuple(taken))
    if not taken or gain.after <= gain.before:
        return plan, (Gain("tables", gain.before, gain.before, "", gain.seconds, "no less noise"),)
    return planned(taken), (gain,)


def _finer(trials: Trials, plan: Plan) -> dict[str, Demotion]:
    """Return what tables of fewer bits than 8 may become, by node."""
    return {
        node.name: Demotion(decision.mode, _REASON, weight=FINER, finer=_REASON)
        for _, node in nodes(trials.bench.graph)
        if (operator := operator_of(node)) is not None and operator.looks_up
        for decision in (plan.by_node[node.name],)
        if decision.weights and len(set(node.inputs[0].outputs)) == 1 and _is_coarse(decision.weights[0].spec)
    }


def _is_coarse(spec: Spec) -> bool:
    return format_named(spec.format).bits < _BITS and not spec.is_followed


def _added_bytes(plan: Plan, node: str) -> float:
    weights = plan.by_node[node].weights
    return sum(one.elements * (_BITS - format_named(one.spec.format).bits) / 8 for one in weights)
