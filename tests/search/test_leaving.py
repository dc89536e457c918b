"""The search for what to leave in float, on plans whose noise is known exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace

import pytest
from onnx import ModelProto

from onnxq.config.scheme import Mode, Spec
from onnxq.planning.plan import Decision, Demotion, Plan, Weight
from onnxq.search.fallback import greedy_fallback
from onnxq.search.search import FINER, FINEST, NodeSensitivity, PlanSearch
from onnxq.system.resources import silent

# Noise of each node as an integer kernel, and with its weight stored.
NOISE = {"a": (1.0, 0.1), "b": (100.0, 0.2), "c": (10.0, 8.0), "d": (0.5, 0.1)}
WEIGHT = (Weight(1, "w", Spec("int8"), 0, elements=100),)


def weights_of(demotion: Demotion | None) -> tuple[Weight, ...]:
    if demotion is not None and demotion.mode is Mode.FLOAT:
        return ()
    return (replace(WEIGHT[0], spec=demotion.weight),) if demotion is not None and demotion.weight else WEIGHT


def planner(demotions: Mapping[str, Demotion]) -> Plan:
    """Return a plan of four weighted nodes and one without weights."""
    decisions = [
        Decision(
            name,
            "Conv",
            demotions[name].mode if name in demotions else Mode.STATIC,
            demotions[name].reason if name in demotions else "integer kernel",
            weights_of(demotions.get(name)),
        )
        for name in NOISE
    ]
    return Plan((*decisions, Decision("relu", "Relu", Mode.STATIC, "vanishes")), (), "int8", "onnxruntime-cpu")


def noise(plan: Plan) -> float:
    """Return minus the noise of all nodes, as if it were decibels."""
    costs = {Mode.STATIC: 0, Mode.STORAGE: 1}
    weighted = (one for one in plan.decisions if one.weights and one.weights[0].spec != FINEST)
    return -sum(NOISE[one.node][costs[one.mode]] for one in weighted)


def search(goal: float) -> PlanSearch:
    return greedy_fallback(planner, noise, goal, silent)


def modes(outcome: PlanSearch) -> str:
    return "".join(one.mode[:2] + " " for one in outcome.plan.decisions if one.node in NOISE).strip()


def test_a_plan_that_is_good_enough_is_measured_once() -> None:
    outcome = search(goal=-200)
    assert outcome == PlanSearch(planner({}), (), 1)


def test_only_the_noisiest_node_is_demoted_when_that_is_enough() -> None:
    outcome = search(goal=-12)
    assert modes(outcome) == "st st st st"
    assert [one.mode for one in outcome.plan.decisions] == [Mode.STATIC, Mode.STORAGE] + [Mode.STATIC] * 3
    assert noise(outcome.plan) >= -12
    assert [(one.node, one.sqnr) for one in outcome.sensitivities] == [("b", -100), ("c", -10), ("a", -1), ("d", -0.5)]


def test_a_demotion_has_a_reason() -> None:
    demoted = search(goal=-12).plan.by_node["b"]
    assert demoted.mode is Mode.STORAGE
    assert "static" in demoted.reason


def test_the_shortest_prefix_of_the_noisiest_is_demoted() -> None:
    outcome = search(goal=-9.8)
    assert {one.node for one in outcome.plan.decisions if one.mode is Mode.STORAGE} == {"b", "c"}


def test_coarse_codes_get_16_bits_and_what_is_quiet_enough_stays_integer() -> None:
    outcome = search(goal=-1.0)
    assert {one.node: (one.mode, one.weights[0].spec) for one in outcome.plan.decisions if one.node in NOISE} == {
        "a": (Mode.STORAGE, WEIGHT[0].spec),
        "b": (Mode.STORAGE, WEIGHT[0].spec),
        "c": (Mode.STORAGE, FINEST),
        "d": (Mode.STATIC, WEIGHT[0].spec),
    }
    assert {one.mode for one in outcome.sensitivities} == {Mode.STATIC, Mode.STORAGE}
    assert [one.sqnr for one in outcome.sensitivities] == sorted(one.sqnr for one in outcome.sensitivities)


def test_the_most_faithful_plan_is_kept_when_the_goal_is_out_of_reach() -> None:
    outcome = search(goal=1.0)
    assert {one.weights[0].spec for one in outcome.plan.decisions if one.node in NOISE} == {FINEST}
    assert noise(outcome.plan) == 0


def test_weights_stay_float_where_16_bits_are_too_coarse() -> None:
    def measure(plan: Plan) -> float:
        return noise(plan) - sum(0.5 for one in plan.decisions if one.weights and one.weights[0].spec == FINEST)

    outcome = greedy_fallback(planner, measure, -0.2, silent)
    assert [one.mode for one in outcome.plan.decisions if one.node in "bc"] == [Mode.FLOAT] * 2
    assert measure(outcome.plan) >= -0.2


def test_the_first_plan_is_kept_when_demoting_makes_it_worse() -> None:
    outcome = greedy_fallback(
        planner, lambda plan: -float(plan.count(Mode.STORAGE) + plan.count(Mode.FLOAT)), 1, silent
    )
    assert outcome.plan == planner({})


@pytest.mark.parametrize("goal", [-12, -9.8, -1.0])
def test_a_node_is_measured_with_every_other_weight_in_float(goal: float) -> None:
    seen: list[Plan] = []

    def measure(plan: Plan) -> float:
        seen.append(plan)
        return noise(plan)

    outcome = greedy_fallback(planner, measure, goal, silent)
    assert outcome.measured == len(seen)
    for index, name in enumerate(NOISE):
        alone = seen[1 + index]
        assert [one.node for one in alone.decisions if one.weights] == [name]


@pytest.mark.parametrize("most", [1, 3])
def test_nodes_that_were_not_measured_any_more_are_not_said_to_hurt(most: int) -> None:
    seen: list[Plan] = []

    def measure(plan: Plan) -> float | None:
        if len(seen) == most:
            return None
        seen.append(plan)
        return noise(plan)

    outcome = greedy_fallback(planner, measure, 1.0, silent)
    assert outcome.plan == planner({})
    assert (outcome.measured, len(outcome.sensitivities)) == (most, most - 1)
    assert all(one.sqnr > -math.inf for one in outcome.sensitivities)


def test_the_number_of_trials_grows_with_the_nodes_and_not_with_their_square() -> None:
    names = [f"n{index}" for index in range(64)]

    def wide(demotions: Mapping[str, Demotion]) -> Plan:
        found = [demotions.get(name, Demotion(Mode.STATIC, "")) for name in names]
        decisions = [
            Decision(name, "Conv", one.mode, "why", () if one.mode is Mode.FLOAT else WEIGHT)
            for name, one in zip(names, found, strict=True)
        ]
        return Plan(tuple(decisions), (), "", "")

    outcome = greedy_fallback(wide, lambda plan: -float(plan.count(Mode.STATIC)), -20, silent)
    assert outcome.plan.count(Mode.STATIC) == 20
    assert outcome.measured <= 1 + len(names) + 1 + 7


def test_progress_never_goes_beyond_its_end() -> None:
    told: list[tuple[str, int, int]] = []
    outcome = greedy_fallback(planner, noise, -1.0, lambda *what: told.append(what))
    assert [done for _, done, _ in told] == list(range(1, outcome.measured + 1))
    assert all(stage == "search" and done <= total for stage, done, total in told)


def test_a_small_node_that_hurts_stores_its_weights_with_16_bits() -> None:
    def with_a_large_node(demotions: Mapping[str, Demotion]) -> Plan:
        plan = planner(demotions)
        large = Decision("large", "MatMul", Mode.STATIC, "integer kernel", (Weight(1, "v", Spec("int8"), 0, 50_000),))
        return Plan((*plan.decisions, large), (), "int8", "onnxruntime-cpu")

    outcome = greedy_fallback(with_a_large_node, lambda plan: noise(Plan(plan.decisions[:-1], (), "", "")), -12, silent)
    assert {one.node: one.weights for one in outcome.plan.decisions}["b"][0].spec == FINEST


def test_coarse_codes_become_finer_where_nothing_is_timed(residual: ModelProto, plan_of) -> None:
    def planner(demotions):
        return plan_of(residual, scheme="int4-block32", demotions=demotions)

    def measure(plan) -> float:
        return 30.0 if all(weight.spec == FINER for one in plan.decisions for weight in one.weights) else 10.0

    found = greedy_fallback(planner, measure, 20.0, silent).plan
    assert measure(found) == 30.0


def test_nodes_that_are_not_measured_alone_go_by_their_size() -> None:
    sizes = {"a": 30, "b": 10, "c": 40, "d": 20}

    def sized(demotions: Mapping[str, Demotion]) -> Plan:
        plan = planner(demotions)
        weights = {name: (replace(WEIGHT[0], elements=size),) for name, size in sizes.items()}
        return replace(
            plan, decisions=tuple(replace(one, weights=one.weights and weights[one.node]) for one in plan.decisions)
        )

    seen = []

    def measure(plan: Plan) -> float:
        seen.append(plan)
        return noise(plan)

    def alike(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        return [NodeSensitivity(one.node, one.mode, 9.0) for one in plan.decisions if one.mode in modes and one.weights]

    outcome = greedy_fallback(sized, measure, -12, silent, told=alike)

    assert modes(outcome) == "st st st st"
    assert [one.node for one in outcome.plan.decisions if one.mode is Mode.STORAGE] == ["b"]
    assert len(seen) == outcome.measured <= 5


def test_what_is_told_to_be_noisiest_goes_first() -> None:
    def told(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        wanted = (one for one in plan.decisions if one.mode in modes and one.weights)
        return [NodeSensitivity(one.node, one.mode, -NOISE[one.node][one.mode is not Mode.STATIC]) for one in wanted]

    outcome = greedy_fallback(planner, noise, -9.8, silent, told=told)
    assert {one.node for one in outcome.plan.decisions if one.mode is Mode.STORAGE} == {"b", "c"}
    assert [(one.node, one.sqnr) for one in outcome.sensitivities] == [("b", -100), ("c", -10), ("a", -1), ("d", -0.5)]


@pytest.mark.parametrize(("told", "most"), [(True, 6), (False, 9 + 64)])
def test_nodes_that_were_measured_in_groups_are_told_apart_in_parts(told: bool, most: int) -> None:
    names = [f"n{index:02}" for index in range(64)]

    def wide(demotions: Mapping[str, Demotion]) -> Plan:
        modes = [demotions[name].mode if name in demotions else Mode.STATIC for name in names]
        weights = [() if mode is Mode.FLOAT else WEIGHT for mode in modes]
        decisions = (Decision(name, "Conv", *rest) for name, *rest in zip(names, modes, names, weights, strict=True))
        return Plan(tuple(decisions), (), "", "")

    def known(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        return [NodeSensitivity(one.node, one.mode, 0.0) for one in plan.decisions if one.mode in modes]

    def measure(plan: Plan) -> float:
        return -float(plan.count(Mode.STATIC))

    outcome = greedy_fallback(wide, measure, -20, silent, told=known if told else None)
    assert 44 <= outcome.plan.count(Mode.STORAGE) < 44 + (64 / 12 if told else 1)
    assert outcome.measured <= most
