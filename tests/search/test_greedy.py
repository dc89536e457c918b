"""The search for what to leave in float, on plans whose noise is known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.ir import Graph
from onnxq.planning.plan import Decision, Demotion, Plan, Weight
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search.greedy import WeightPrecisionSearch, greedy_fallback
from onnxq.search.search import FINER, FINEST, NodeSensitivity, PlanSearch
from onnxq.system.resources import silent
from search.timed_models import planned

# Noise of each node as an integer kernel, and with its weight stored.
NOISE = {"a": (1.0, 0.1), "b": (100.0, 0.2), "c": (10.0, 8.0), "d": (0.5, 0.1)}
WEIGHT = (Weight(1, "w", QuantSpec("int8"), 0, elements=100),)


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


def nsr(plan: Plan) -> float:
    """Return minus the noise of all nodes, as if it were decibels."""
    costs = {Mode.STATIC: 0, Mode.STORAGE: 1}
    weighted = (one for one in plan.decisions if one.weights and one.weights[0].spec != FINEST)
    return -sum(NOISE[one.node][costs[one.mode]] for one in weighted)


def search(goal: float) -> PlanSearch:
    return greedy_fallback(planner, nsr, goal, silent)


def modes(outcome: PlanSearch) -> str:
    return "".join(one.mode[:2] + " " for one in outcome.plan.decisions if one.node in NOISE).strip()


def test_a_plan_that_is_good_enough_is_measured_once() -> None:
    outcome = search(goal=-200)
    assert outcome == PlanSearch(planner({}), (), 1)


def test_only_the_noisiest_node_is_demoted_when_that_is_enough() -> None:
    outcome = search(goal=-12)
    assert modes(outcome) == "st st st st"
    assert [one.mode for one in outcome.plan.decisions] == [Mode.STATIC, Mode.STORAGE] + [Mode.STATIC] * 3
    assert nsr(outcome.plan) >= -12
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
    assert nsr(outcome.plan) == 0


def test_weights_stay_float_where_16_bits_are_too_coarse() -> None:
    def measure(plan: Plan) -> float:
        return nsr(plan) - sum(0.5 for one in plan.decisions if one.weights and one.weights[0].spec == FINEST)

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
        return nsr(plan)

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
        return nsr(plan)

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
    reported: list[tuple[str, int, int]] = []
    outcome = greedy_fallback(planner, nsr, -1.0, lambda *what: reported.append(what))
    assert [done for _, done, _ in reported] == list(range(1, outcome.measured + 1))
    assert all(stage == "search" and done <= total for stage, done, total in reported)


def test_a_small_node_that_hurts_stores_its_weights_with_16_bits() -> None:
    def with_a_large_node(demotions: Mapping[str, Demotion]) -> Plan:
        plan = planner(demotions)
        large = Decision(
            "large", "MatMul", Mode.STATIC, "integer kernel", (Weight(1, "v", QuantSpec("int8"), 0, 50_000),)
        )
        return Plan((*plan.decisions, large), (), "int8", "onnxruntime-cpu")

    outcome = greedy_fallback(with_a_large_node, lambda plan: nsr(Plan(plan.decisions[:-1], (), "", "")), -12, silent)
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
        return nsr(plan)

    def alike(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        return [NodeSensitivity(one.node, one.mode, 9.0) for one in plan.decisions if one.mode in modes and one.weights]

    outcome = greedy_fallback(sized, measure, -12, silent, known=alike)

    assert modes(outcome) == "st st st st"
    assert [one.node for one in outcome.plan.decisions if one.mode is Mode.STORAGE] == ["b"]
    assert len(seen) == outcome.measured <= 5


def test_what_is_told_to_be_noisiest_goes_first() -> None:
    def reported(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        wanted = (one for one in plan.decisions if one.mode in modes and one.weights)
        return [NodeSensitivity(one.node, one.mode, -NOISE[one.node][one.mode is not Mode.STATIC]) for one in wanted]

    outcome = greedy_fallback(planner, nsr, -9.8, silent, known=reported)
    assert {one.node for one in outcome.plan.decisions if one.mode is Mode.STORAGE} == {"b", "c"}
    assert [(one.node, one.sqnr) for one in outcome.sensitivities] == [("b", -100), ("c", -10), ("a", -1), ("d", -0.5)]


@pytest.mark.parametrize(("reported", "most"), [(True, 6), (False, 9 + 64)])
def test_nodes_that_were_measured_in_groups_are_told_apart_in_parts(reported: bool, most: int) -> None:
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

    outcome = greedy_fallback(wide, measure, -20, silent, known=known if reported else None)
    assert 44 <= outcome.plan.count(Mode.STORAGE) < 44 + (64 / 12 if reported else 1)
    assert outcome.measured <= most


# The search for what to leave in float, where stored weights of few bits are too coarse and become finer.

Demoted = Callable[[Mapping[str, Demotion]], Plan]


@pytest.fixture
def products(build: Callable[..., ModelProto], plan_of: Callable[..., Plan]) -> Demoted:
    """Plans three products of weights of 4 bits."""
    nodes = "[a] s = MatMul(x, u) [b] t = MatMul(s, v) [c] y = MatMul(t, w)"
    model = build(f"(float[4,256] x) => (float[4,256] y) {{ {nodes} }}", **dict.fromkeys("uvw", (256, 256)))
    return lambda demotions: plan_of(model, scheme="int4-block32", demotions=demotions)


def is_coarse(decision: Decision) -> bool:
    return any(weight.spec.format == "int4" for weight in decision.weights)


def is_of_blocks(decision: Decision) -> bool:
    return any(weight.spec.granularity != Granularity.CHANNEL for weight in decision.weights)


def test_codes_that_stay_too_coarse_as_finer_ones_get_16_bits_before_they_are_left_float(products: Demoted) -> None:
    def measure(plan: Plan) -> float:
        specs = {weight.spec for one in plan.decisions for weight in one.weights}
        return 40.0 if specs == {FINEST} else 30.0

    found = greedy_fallback(products, measure, 35.0, silent).plan
    assert {one.mode for one in found.decisions if one.weights} == {Mode.STORAGE}
    assert measure(found) == 40.0


def test_codes_that_are_decoded_before_are_tried_where_those_that_are_multiplied_are_too_coarse(
    products: Demoted,
) -> None:
    def measure(plan: Plan) -> float:
        return 30.0 if plan.count(Mode.WEIGHT_ONLY) or any(map(is_coarse, plan.decisions)) else 40.0

    found = greedy_fallback(products, measure, 35.0, silent).plan
    assert measure(found) == 40.0
    assert {weight.spec.format for one in found.decisions for weight in one.weights} == {"int8-narrow"}


def test_finer_codes_that_turn_out_not_to_be_needed_are_handed_back(products: Demoted) -> None:
    def measure(plan: Plan) -> float:
        return 10.0 + 20.0 * (not is_coarse(plan.by_node["b"]))

    found = greedy_fallback(products, measure, 20.0, silent).plan
    assert [one.node for one in found.decisions if one.weights and not is_coarse(one)] == ["b"]
    assert found.by_node["b"].weights[0].spec.granularity == (128,)


@pytest.mark.parametrize(("larger", "granularity"), [(True, Granularity.CHANNEL), (False, (128,))])
def test_codes_of_few_bits_end_no_larger_than_8_bit_storage(
    products: Demoted, larger: bool, granularity: object
) -> None:
    def size(plan: Plan) -> float:
        return 8.125 if any(is_of_blocks(one) for one in plan.decisions) else 8.0 if larger else 9.0

    def measure(plan: Plan) -> float:
        return 10.0 if any(map(is_coarse, plan.decisions)) else 30.0

    found = greedy_fallback(products, measure, 20.0, silent, size=size).plan
    assert {weight.spec.granularity for one in found.decisions for weight in one.weights} == {granularity}


# Finer quantized values go to as few weights as will do.


@dataclass
class Weights:
    """A laboratory in which only weights make noise: less where they are finer, none where they are finest."""

    graph: Graph
    nsr: Mapping[str, float]
    finer: float = 0.01
    scheme: str = "int8"
    of_bits: Mapping[str, float] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named(self.scheme), target_named("onnxruntime-cpu"), demotions)

    def sqnr(self, plan: Plan) -> float:
        self.seen.add(plan.effect)
        weighted = [one for one in plan.decisions if one.weights]
        ratio = sum(self.nsr.get(one.node, 0.0) * self.left(one.weights[0].spec) for one in weighted)
        return -10 * math.log10(ratio + 1e-9)

    def left(self, spec: QuantSpec) -> float:
        """The part of its noise that a weight has left with finer quantized values."""
        return {FINER: self.finer, FINEST: 0.0}.get(spec, self.of_bits.get(spec.format, 1.0))


def finer(
    build: Callable[..., ModelProto], nsr: Mapping[str, float], goal: float = 20.0, **known: Any
) -> WeightPrecisionSearch:
    nodes = " ".join(f"[c{i}] t{i + 1} = MatMul(t{i}, w{i})" for i in range(8))
    made = build(f"(float[4,64] t0) => (float[4,64] t8) {{ {nodes} }}", **{f"w{i}": (64, 64) for i in range(8)})
    graph, full = planned(made, known.get("scheme", "int8"))
    integers = (one.node for one in full.decisions if one.mode is Mode.STATIC)
    stores = {node: Demotion(Mode.STORAGE, "why") for node in integers}
    return WeightPrecisionSearch(Weights(graph, nsr, **known), full, stores, goal)


def test_quiet_weights_need_nothing(build: Callable[..., ModelProto]) -> None:
    assert not finer(build, dict.fromkeys(("c0", "c1"), 1e-3)).are_needed(1.0)


@pytest.mark.parametrize(
    ("nsr", "share", "needed"),
    [(0.008, 0.5, True), (0.008, 0.1, False), (0.012, 0.1, True), (0.004, 0.5, False)],
    ids=["little is left to integers", "which hardly gain by it", "too coarse for the goal", "quiet"],
)
def test_weights_that_make_little_of_all_noise_stay_as_they_are(
    build: Callable[..., ModelProto], nsr: float, share: float, needed: bool
) -> None:
    assert finer(build, {"c3": nsr}).are_needed(share) is needed


@pytest.mark.parametrize(("share", "spec"), [(0.001, FINER), (0.5, FINEST)], ids=["scales of blocks", "sixteen bits"])
def test_the_noisiest_weights_alone_get_finer_codes(
    build: Callable[..., ModelProto], share: float, spec: object
) -> None:
    nsr = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    found = finer(build, nsr, finer=share)
    assert found.are_needed(1.0)
    better = found.found(nsr)
    assert {node for node, one in better.items() if one.weight == spec} == {"c3", "c5"}
    assert found.profiler.sqnr(found.profiler.plan({**found.stores, **better})) >= 20
    assert len(found.profiler.seen) <= 16


def test_when_time_is_up_only_weights_of_a_large_error_have_scales_of_blocks(build: Callable[..., ModelProto]) -> None:
    nsr = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    found = replace(finer(build, nsr, finer=0.001), is_late=lambda: True)
    assert set(found.found(nsr)) == {"c3", "c5"}
    assert len(found.profiler.seen) <= 3


def test_when_time_is_up_no_weight_has_sixteen_bits_because_nothing_was_measured(
    build: Callable[..., ModelProto],
) -> None:
    nsr = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    found = replace(finer(build, nsr, finer=0.5), is_late=lambda: True)
    assert {one.weight for one in found.found(dict.fromkeys(nsr, 0.3)).values()} == {FINER}


def test_weights_whose_turn_did_not_come_say_so(build: Callable[..., ModelProto]) -> None:
    nsr = {"c3": 0.5, "c5": 0.4, "c0": 0.3}
    search = finer(build, nsr, finer=0.5)
    # Only one weight was measured alone, and time is up when all of them are known to be enough.
    late = replace(search, is_late=lambda: len(search.profiler.seen) > 2)
    found = [one for one in late.found({"c3": 0.5}).values() if one.weight == FINEST]
    assert len(found) > 3
    assert {one.reason for one in found[2:]} == {"time ran out before its weights were tried in fewer bits"}


def test_where_no_codes_are_fine_enough_weights_stay_float(build: Callable[..., ModelProto]) -> None:
    found = finer(build, {"c3": 0.5}, goal=200.0)
    assert {one.mode for one in found.found({"c3": 0.5}).values()} == {Mode.FLOAT}


def test_a_large_quiet_weight_is_not_finer_because_a_small_noisy_one_is(build: Callable[..., ModelProto]) -> None:
    # By noise for its size c0 comes last, and without it the others are not quiet enough.
    nsr = {"c0": 0.009, **{f"c{index}": 0.0005 for index in range(1, 8)}}
    found = finer(build, nsr, goal=21.0)
    better = found.found({**nsr, "c0": 0.0001})
    assert set(better) == {"c0"}


@pytest.mark.parametrize(("goal", "spec"), [(14.0, "int4"), (19.0, "int8-narrow")], ids=["four bits", "eight"])
def test_weights_of_two_bits_become_no_finer_than_need_be(
    build: Callable[..., ModelProto], goal: float, spec: str
) -> None:
    nsr = {"c3": 0.5, "c5": 0.01}
    of_bits = {"int4": 0.05, "int8-narrow": 0.001}
    found = finer(build, nsr, goal=goal, scheme="int2-block32", of_bits=of_bits, finer=5e-4)
    better = found.found(nsr)
    assert {node: one.weight.format for node, one in better.items() if one.weight} == {"c3": spec}
    assert better["c3"].weight.granularity == ((32,) if spec == "int4" else (128,))
    # The reason speaks of quantized values that were tried, not of those that are taken.
    assert (
        better["c3"].reason
        == "its weights as int2 values in blocks of 32 would lower the SQNR of the worst output too much"
    )
    assert better["c3"].finer == better["c3"].reason


@pytest.mark.parametrize(
    ("share", "coarse"),
    [(0.001, "int8-narrow values with one scale per channel"), (0.5, "int8-narrow values in blocks of 32")],
)
def test_the_reason_names_the_codes_that_are_too_coarse(
    build: Callable[..., ModelProto], share: float, coarse: str
) -> None:
    nsr = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    reasons = {one.reason for one in finer(build, nsr, finer=share).found(nsr).values() if one.weight}
    assert f"its weights as {coarse} would lower the SQNR of the worst output too much" in reasons
