"""The search finds the fastest plan that is faithful enough, given what a laboratory measures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, read_model
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search import frontier, tradeoff
from onnxq.search.assignment import Problem, cheapest
from onnxq.search.cost_model import CostModel
from onnxq.search.frontier import (
    WeighedPlan,
    distinct,
    fastest,
    fastest_uniform_plan,
    halfway,
    is_worth_trying,
    points,
    summarize_search,
)
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.search import FINEST
from onnxq.search.sensitivity import QuantizerId, Sensitivities
from onnxq.search.tradeoff import UNMEASURED, Assignment, CostTradeoff, OptionSensitivities
from search.table_laboratory import NODES, Table, by_kind, products_of, search, static
from search.timed_models import TARGET


@pytest.fixture
def chain(build: Callable[..., ModelProto]) -> Graph:
    names = ["x", "t0", "t1", "t2", "t3", "t4", "y"]
    nodes = " ".join(
        f"[{name}] {names[i + 1]} = Conv <pads = [1,1,1,1]> ({names[i]}, w{i})" for i, name in enumerate(NODES)
    )
    weights = {f"w{i}": (8, 8, 3, 3) for i in range(len(NODES))}
    return prepare(read_model(build(f"(float[1,8,8,8] x) => (float[1,8,8,8] y) {{ {nodes} }}", **weights)))


@pytest.fixture
def products(build: Callable[..., ModelProto]) -> Graph:
    return products_of(build)


def test_what_is_faster_and_quiet_is_all_taken(chain: Graph) -> None:
    table = Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), {})
    outcome = search(table)
    assert static(outcome) == list(NODES)
    assert [(point.chosen, point.is_float) for point in outcome.frontier] == [(True, False), (False, True)]
    assert outcome.frontier[0].speed == pytest.approx(2.97, abs=0.05)
    assert outcome.sensitivities == ()
    assert outcome.measured == 1
    (region,) = outcome.regions
    assert (region.first, region.nodes, region.mode) == ("c0", 6, Mode.STATIC)
    assert region.float_milliseconds == pytest.approx(5.4)
    assert region.milliseconds == pytest.approx(1.82)


def test_nothing_is_taken_where_integers_are_slower(chain: Graph) -> None:
    table = Table(chain, dict.fromkeys(NODES, 3e5), dict.fromkeys(NODES, 9e5), {})
    outcome = search(table)
    assert static(outcome) == []
    decision = outcome.plan.by_node["c0"]
    assert decision.mode is Mode.STORAGE
    assert "with integers the model is hardly faster than in float on this machine" in decision.reason


def test_a_slow_node_stays_float_only_where_that_pays_for_the_borders(chain: Graph) -> None:
    times = dict.fromkeys(NODES, 3e5)
    table = Table(chain, dict.fromkeys(NODES, 9e5), {**times, "c0": 2e6}, {})
    assert static(search(table)) == list(NODES[1:])
    table = Table(chain, dict.fromkeys(NODES, 9e5), {**times, "c2": 9e5 + 5e3}, {})
    assert static(search(table)) == list(NODES)


def test_the_noisy_node_stays_float_and_the_others_do_not(products: Graph) -> None:
    sensitivities = {**dict.fromkeys(NODES, 1e-4), "c2": 0.5}
    table = Table(products, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), sensitivities)
    outcome = search(table)
    assert static(outcome) == ["c0", "c1", "c3", "c4", "c5"]
    assert table.sqnr(outcome.plan) >= 20
    assert outcome.sensitivities[0].node == "c2"
    assert outcome.sensitivities[0].sqnr == pytest.approx(3.0, abs=0.1)
    assert outcome.plan.by_node["c2"].figures.endswith("3.0 dB as integers alone")


def test_of_two_noisy_nodes_the_one_that_gains_less_time_goes(chain: Graph) -> None:
    sensitivities = {**dict.fromkeys(NODES, 1e-5), "c0": 6e-3, "c5": 6e-3}
    times = {**dict.fromkeys(NODES, 3e5), "c0": 8.5e5}
    outcome = search(Table(chain, dict.fromkeys(NODES, 9e5), times, sensitivities))
    assert static(outcome) == ["c1", "c2", "c3", "c4", "c5"]


def test_weights_whose_codes_are_too_coarse_get_16_bits(chain: Graph) -> None:
    sensitivities = dict.fromkeys(NODES, 0.5)
    stored = {**dict.fromkeys(NODES, 1e-6), "c3": 0.4}
    table = Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), sensitivities, stored)
    outcome = search(table)
    assert [one.node for one in outcome.plan.decisions if one.weights[0].spec == FINEST] == ["c3"]
    assert outcome.plan.count(Mode.STORAGE) == 6
    assert table.sqnr(outcome.plan) >= 20


def test_when_nothing_is_faithful_the_most_faithful_is_returned(chain: Graph) -> None:
    sensitivities = dict.fromkeys(NODES, 0.5)
    table = Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), sensitivities)
    outcome = search(table, goal=500.0)
    assert static(outcome) == []


def test_the_same_measurements_give_the_same_plan(chain: Graph) -> None:
    sensitivities = {name: 1e-3 * (index + 1) for index, name in enumerate(NODES)}
    table = Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), sensitivities)
    assert search(table).plan == search(table).plan


def test_integers_that_hardly_gain_are_not_worth_their_bytes(chain: Graph) -> None:
    table = Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 8.8e5), {})
    outcome = search(table)
    assert static(outcome) == []
    assert outcome.plan.count(Mode.STORAGE) == 6
    assert "hardly faster than in float" in outcome.plan.by_node["c0"].reason


def test_codes_that_float_data_multiplies_are_taken_where_they_are_fastest(products: Graph) -> None:
    same = dict.fromkeys(NODES, 9e5)
    table = Table(products, same, same, {}, alternatives={"int8-narrow": (5e5, 0.0), "int4": (3e5, 0.0)})
    outcome = search(table)
    assert by_kind(outcome) == {"int4": 6}
    assert outcome.frontier[0].speed == pytest.approx(3.0, abs=0.05)
    assert outcome.plan.by_node["c0"].figures.startswith("0.900 ms in float, 0.900 ms as integers, 0.900 ms with dyn")
    assert [region.mode for region in outcome.regions] == [Mode.WEIGHT_ONLY] * 6


def test_time_is_weighed_against_noise_among_all_alternatives(products: Graph) -> None:
    same = dict.fromkeys(NODES, 9e5)
    offered = {"dynamic": (8e5, 1e-4), "int8-narrow": (5e5, 1e-5), "int4": (3e5, 3.2e-3)}
    table = Table(products, same, same, {}, alternatives=offered)
    outcome = search(table)
    # Three nodes of 4 bits and three of 8 stay just below the noise of 20 dB.
    assert by_kind(outcome) == {"int4": 3, "int8-narrow": 3}
    assert table.sqnr(outcome.plan) >= 20
    assert Counter((one.mode, round(one.sqnr)) for one in outcome.sensitivities if one.sqnr < 60) == {
        (Mode.WEIGHT_ONLY, 25): 6,
        (Mode.DYNAMIC, 40): 6,
        (Mode.WEIGHT_ONLY, 50): 6,
    }
    assert [one.sqnr for one in outcome.sensitivities] == sorted(one.sqnr for one in outcome.sensitivities)


def test_the_noise_of_what_is_slower_than_float_is_not_measured(products: Graph) -> None:
    same = dict.fromkeys(NODES, 9e5)
    offered = {"dynamic": (2e6, 1e-4), "int8-narrow": (9.5e5, 1e-4), "int4": (3e5, 1e-1)}
    outcome = search(Table(products, same, same, {}, alternatives=offered))
    assert {round(one.sqnr) for one in outcome.sensitivities if one.sqnr < 60} == {10}
    assert by_kind(outcome) == {"storage": 6}


def test_what_the_scheme_wants_dynamic_is_stored_where_that_hardly_gains(products: Graph) -> None:
    same = dict.fromkeys(NODES, 9e5)
    table = Table(products, same, same, {}, alternatives={"dynamic": (8.9e5, 0.0)}, scheme="int8-dynamic")
    assert by_kind(search(table)) == {"storage": 6}


def noisy(chain: Graph) -> Table:
    sensitivities = {name: 2e-3 * (index + 1) for index, name in enumerate(NODES)}
    return Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), sensitivities)


def test_no_plan_is_timed_twice(products: Graph) -> None:
    sensitivities = {name: 2e-3 * (index + 1) for index, name in enumerate(NODES)}
    table = Table(products, dict.fromkeys(NODES, 9e5), {**dict.fromkeys(NODES, 3e5), "c0": 2e6}, sensitivities)
    search(table)
    assert len(table.compared) > 1
    assert len(set(table.compared)) == len(table.compared)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the assignments that are solved for, as they come."""
    solved: list[int] = []

    def counted(problem: Problem) -> frozenset[str]:
        found = cheapest(problem)
        solved.append(len(found))
        return found

    monkeypatch.setattr(tradeoff, "cheapest", counted)
    return solved


def test_only_the_assignments_are_solved_that_are_looked_at(chain: Graph, cuts: list[int]) -> None:
    table = noisy(chain)
    assert table.sqnr(search(table, grown=0).plan) >= 20
    # The fastest; of 24 weights the last and those of a bisection; likewise of the six nodes that may stay float.
    assert len(cuts) <= 1 + (1 + 5) + (1 + 3)


@pytest.mark.parametrize("limit", ["seconds", "processes"])
def test_when_time_is_up_the_quietest_plans_are_still_tried_and_nothing_else(
    chain: Graph, cuts: list[int], limit: str
) -> None:
    table = noisy(chain)
    assert table.sqnr(search(table, **{limit: 0.0}).plan) >= 20
    assert len(cuts) == 3
    assert len(table.compared) == 1


def test_when_profiling_is_late_noisy_nodes_that_the_scheme_wants_dynamic_are_still_stored(
    products: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uneven(Table):
        """One of the products is too noisy with dynamic scales."""

        def sqnr(self, plan: Plan) -> float:
            found = super().sqnr(plan)
            return 3.0 if plan.by_node["c2"].mode is Mode.DYNAMIC else found

    monkeypatch.setattr(frontier, "_PROFILING_SHARE", -1.0)
    floats = dict.fromkeys(NODES, 9e5)
    table = Uneven(products, floats, floats, {}, alternatives={"dynamic": (3e5, 1e-5)}, scheme="int8-dynamic")
    outcome = search(table)
    assert by_kind(outcome) == {"dynamic": 5, "storage": 1}
    assert outcome.plan.by_node["c2"].mode is Mode.STORAGE


def test_the_step_back_to_storage_keeps_what_is_finer_where_codes_are_too_coarse(chain: Graph) -> None:
    sensitivities = {"c0": 0.5, "c1": 0.5, "c2": 0.5}
    table = Table(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 8.8e5), sensitivities, {"c3": 0.4})
    outcome = search(table)
    assert by_kind(outcome) == {"storage": 6}
    assert outcome.plan.by_node["c3"].weights[0].spec == FINEST
    assert table.sqnr(outcome.plan) >= 20


def test_the_plan_of_the_scheme_is_expected_to_take_what_its_own_modes_take(products: Graph) -> None:
    floats = dict.fromkeys(NODES, 9e5)
    table = Table(products, floats, floats, {}, alternatives={"dynamic": (9.5e5, 0.0)}, scheme="int8-dynamic")
    assert {point.dynamic: point.milliseconds for point in search(table).frontier} == pytest.approx({0: 5.4, 6: 5.7})


@pytest.mark.parametrize(("speed", "taken"), [(3.0, 6), (1.01, 0)])
def test_a_model_too_long_to_profile_is_all_integers_where_timing_says_so(
    chain: Graph, speed: float, taken: int
) -> None:
    class Long(Table):
        """Runs of models with integers make too many events for a profile."""

        def times(self, plan: Plan | None) -> NodeTimes:
            return super().times(None) if plan is None else NodeTimes({}, {}, {}, 0.0)

        def speeds(self, plans: Sequence[Plan]) -> list[float]:
            return [speed if plan.count(Mode.STATIC) else 1.0 for plan in plans]

    outcome = search(Long(chain, dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), {}))
    assert len(static(outcome)) == taken
    assert outcome.plan.count(Mode.STORAGE) == 6 - taken


def test_what_each_node_adds_in_noise_is_told_worst_first(products: Graph) -> None:
    outcome = search(noisy(products))
    reported = [(one.node, round(one.sqnr, 1)) for one in outcome.sensitivities]
    assert reported == [("c5", 19.2), ("c4", 20.0), ("c3", 21.0), ("c2", 22.2), ("c1", 24.0), ("c0", 27.0)]


def test_what_was_expected_of_a_plan_is_told_beside_what_was_measured(products: Graph) -> None:
    expected = {point.static: (point.predicted, point.sqnr) for point in search(noisy(products)).frontier}
    assert expected[6][0] is None
    assert len(expected) > 1
    assert all(found == pytest.approx(known, abs=0.01) for found, known in expected.values() if found is not None)


# The search where the profile of single nodes says little of whole models.


@dataclass
class Misprofiled(Table):
    """Where models are the faster the more of their nodes are integers, whatever the profile says of single nodes."""

    timed: list[int] = field(default_factory=list)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        self.timed += [plan.count(Mode.STATIC) for plan in plans]
        return [1.0 + plan.count(Mode.STATIC) for plan in plans]


@pytest.mark.parametrize(("time", "tried"), [(16e5, True), (25e5, False)])
def test_integers_that_take_much_longer_than_floats_throughout_are_not_tried(
    build: Callable[..., ModelProto], time: float, tried: bool
) -> None:
    table = Misprofiled(products_of(build), dict.fromkeys(NODES, 9e5), {**dict.fromkeys(NODES, time), "c0": 3e5}, {})
    assert static(search(table)) == list(NODES if tried else NODES[:1])


@pytest.mark.parametrize(("longest", "timed"), [(1e6, [6]), (2e6, [5, 6])])
def test_a_plan_with_all_stands_in_for_one_that_is_expected_to_take_hardly_less(
    build: Callable[..., ModelProto], longest: float, timed: list[int]
) -> None:
    times = {**dict.fromkeys(NODES, 3e5), "c4": longest}
    table = Misprofiled(products_of(build), dict.fromkeys(NODES, 9e5), times, {})
    assert static(search(table)) == list(NODES)
    assert table.timed == timed


@pytest.mark.parametrize(("gain", "left"), [(1.02, []), (1.05, ["c4"])])
def test_the_plan_of_the_scheme_is_taken_unless_another_is_plainly_faster(
    build: Callable[..., ModelProto], gain: float, left: list[str]
) -> None:
    class Near(Table):
        """Another choice of nodes is a little faster than the plan of the scheme, and more faithful."""

        def speeds(self, plans: Sequence[Plan]) -> list[float]:
            return [2.0 if plan.count(Mode.STATIC) == len(NODES) else 2.0 * gain for plan in plans]

    times = {**dict.fromkeys(NODES, 3e5), "c4": 2e6}
    table = Near(products_of(build), dict.fromkeys(NODES, 9e5), times, dict.fromkeys(NODES, 1e-4))
    assert static(search(table)) == [name for name in NODES if name not in left]


def test_the_plan_of_the_scheme_is_timed_beside_another_when_time_is_up(build: Callable[..., ModelProto]) -> None:
    times = {**dict.fromkeys(NODES, 3e5), "c4": 2e6}
    table = Misprofiled(products_of(build), dict.fromkeys(NODES, 9e5), times, {})
    assert static(search(table, seconds=0.0)) == list(NODES)
    assert sorted(table.timed) == [5, 6]


@dataclass
class Asked(Table):
    """Remembers how many nodes were integers in each plan that it was asked the fidelity of."""

    requested: list[int] = field(default_factory=list)

    def sqnr(self, plan: Plan) -> float:
        self.requested.append(plan.count(Mode.STATIC))
        return super().sqnr(plan)


def test_a_sweep_measures_few_plans(build: Callable[..., ModelProto]) -> None:
    sensitivities = dict.fromkeys(NODES, 0.5)
    table = Asked(products_of(build), dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), sensitivities)
    assert static(search(table)) == []
    assert len(table.requested) < 15


@pytest.mark.parametrize(("integers", "taken"), [(8e5, 0), (3e5, len(NODES))])
def test_integers_that_gain_little_are_timed_beside_what_only_stores_weights(
    build: Callable[..., ModelProto], integers: float, taken: int
) -> None:
    class Simpler(Table):
        """What is made of the float model is 1.4 times as fast as that, as nobody knows before it is timed."""

        def speeds(self, plans: Sequence[Plan]) -> list[float]:
            return [
                1.4 if not plan.count(Mode.STATIC) else speed
                for plan, speed in zip(plans, super().speeds(plans), strict=True)
            ]

    floats, times = dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, integers)
    table = Simpler(products_of(build), floats, times, {})
    assert len(static(search(table))) == taken
    assert len(table.compared) == (1 if taken else 2)
    # Where the float model itself is as fast as what stores weights, integers are taken that gain a little.
    assert len(static(search(Table(products_of(build), floats, times, {})))) == len(NODES)


# Who makes a noisy tensor quantized values is left in float, or keeps float weights.

RESIDUAL = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [c0] a = Conv <pads = [1,1,1,1]> (x, w0) [c1] b = Conv <pads = [1,1,1,1]> (a, w1)
    [mixed] s = Add(b, a) [c2] y = Conv <pads = [1,1,1,1]> (s, w2) }"""
SILU = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [c0] a = Conv <pads = [1,1,1,1]> (x, w0) [gate] g = Sigmoid(a)
    [mixed] s = Mul(a, g) [c1] y = Conv <pads = [1,1,1,1]> (s, w1) }"""
SQUEEZE = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [c0] a = Conv <pads = [1,1,1,1]> (x, w0) [pool] p = GlobalAveragePool(a) [c1] e = Conv(p, w1)
    [gate] g = Sigmoid(e) [mixed] s = Mul(a, g) [c2] y = Conv <pads = [1,1,1,1]> (s, w2) }"""


class Blocks(Table):
    """Noise by tensor, and none of weights."""

    @property
    def read(self) -> Mapping[str, float]:
        return self.sensitivities


@pytest.mark.parametrize(
    ("text", "loud", "floats"),
    [
        (RESIDUAL, "s", {"mixed", "c2"}),
        (SILU, "g", {"gate", "mixed"}),
        (SILU, "s", {"gate", "mixed", "c1"}),
        (SQUEEZE, "g", {"gate", "mixed"}),
        (SQUEEZE, "s", {"gate", "mixed", "c2"}),
        (SQUEEZE, "p", {"pool", "c1", "gate", "mixed"}),
    ],
)
def test_who_would_make_a_noisy_tensor_codes_is_left_in_float_weights_or_none(
    build: Callable[..., ModelProto], text: str, loud: str, floats: set[str]
) -> None:
    shapes = {f"w{i}": (8, 8, 1, 1) if "Conv(p, w1)" in text and i == 1 else (8, 8, 3, 3) for i in range(3)}
    graph = prepare(read_model(build(text, **{name: shape for name, shape in shapes.items() if f"{name})" in text})))
    names = [node.name for node in graph.nodes]
    quiet = {tensor.name: 1e-4 for node in graph.nodes for tensor in (*node.inputs, *node.outputs)}
    table = Blocks(graph, dict.fromkeys(names, 9e5), dict.fromkeys(names, 3e5), {**quiet, loud: 0.5})
    outcome = search(table)
    assert {one.node for one in outcome.plan.decisions if one.mode is not Mode.STATIC} == floats
    assert table.sqnr(outcome.plan) >= 20
    # No other choice that is faithful is as fast.
    every = (
        table.plan({name: Demotion(Mode.STORAGE, "why") for name, left in zip(names, kept, strict=True) if left})
        for kept in itertools.product((False, True), repeat=len(names))
    )
    assert table.times(outcome.plan).total == min(table.times(one).total for one in every if table.sqnr(one) >= 20)


# What is expected of plans, and which of those that were measured are told.


def candidate(
    sensitivities: float, sqnr: float | None = None, speed: float | None = None, mode: Mode = Mode.STATIC
) -> WeighedPlan:
    plan = Plan((Decision("a", "Conv", mode, "why"),), (), "int8", "onnxruntime-cpu")
    return WeighedPlan(Assignment(frozenset(), {}, 1e6, sensitivities), plan, sqnr=sqnr, speed=speed)


@pytest.mark.parametrize(("nanoseconds", "is_tried"), [(0.9e6, True), (0.995e6, False), (1.1e6, False)])
def test_a_plan_that_hardly_gains_time_is_not_worth_trying(nanoseconds: float, is_tried: bool) -> None:
    accurate = candidate(0.1, 20.0)
    one = replace(accurate.assignment, nanoseconds=nanoseconds)
    assert is_worth_trying(one, accurate.assignment) is is_tried


def test_of_plans_as_fast_the_most_faithful_is_taken() -> None:
    quick, quiet = candidate(0.1, 20.0, 2.0), candidate(0.1, 30.0, 1.97)
    assert fastest([quick, quiet, candidate(0.1, 40.0, 1.5)]) is quiet


def test_plans_of_one_effect_are_told_once_as_they_were_measured_last() -> None:
    first, again, other = candidate(0.1, 20.0), candidate(0.1, 20.0, 2.0), candidate(0.1, 30.0, mode=Mode.FLOAT)
    assert list(distinct([first, again, other])) == [first, other]
    found = points([first, again, other], other)
    assert {(point.static, point.speed, point.chosen) for point in found} == {(1, 2.0, False), (0, None, True)}


@pytest.mark.parametrize(("low", "high", "found"), [(0, 5, 3), (0, 3, 2), (3, 5, 4), (1, 2, 1)])
def test_halfway_is_told_by_time_and_not_by_how_many_there_are(low: int, high: int, found: int) -> None:
    times = [10.0, 11.0, 12.0, 19.0, 20.0, 21.0]
    assert halfway(lambda index: Assignment(frozenset(), {}, times[index], 0.0), low, high) == found


# What is told of a search is what was measured in it.


def test_times_are_told_where_they_were_taken(build: Callable[..., ModelProto]) -> None:
    table = Table(products_of(build), dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), {})
    full = table.plan({})
    costs = CostModel(table.graph, target_named("onnxruntime-cpu"), full, table.times(None), table.times(full))
    prices = CostTradeoff(costs)
    best = WeighedPlan(prices.planned(full, UNMEASURED), full, sqnr=30.0, speed=2.0)
    sensitivities = OptionSensitivities(
        Sensitivities(
            {QuantizerId("c0", is_node=True): np.array([0.01]), QuantizerId("c1", is_node=True): np.array([0.1])}
        )
    )
    reported = summarize_search(best, [best], prices, sensitivities, table)
    assert [(point.sqnr, point.is_float) for point in reported.frontier] == [(30.0, False), (math.inf, True)]
    assert [one.node for one in reported.sensitivities[:2]] == ["c1", "c0"]
    assert len(reported.regions) == 1
    assert len(reported.times) == len(NODES)


# Where a runtime does not tell of nodes, the fastest of whole models is taken.


@dataclass
class Clocked:
    """A laboratory in which dynamic plans have a known speed and fidelity."""

    graph: Graph
    speed: float
    accuracy: float

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named("int8"), TARGET, demotions)

    def expresses(self, plan: Plan) -> bool:
        return True

    def sqnr(self, plan: Plan) -> float:
        return self.accuracy

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        return [self.speed if _modes(plan) == {Mode.DYNAMIC} else 1.0 for plan in plans]


def _modes(plan: Plan) -> set[Mode]:
    return {one.mode for one in plan.decisions if one.weights}


@pytest.mark.parametrize(
    ("speed", "accuracy", "taken"),
    [
        (2.0, 30.0, Mode.DYNAMIC),
        (2.0, 10.0, Mode.STATIC),
        (0.5, 30.0, Mode.STATIC),
        (math.nan, 30.0, Mode.STATIC),
    ],
)
def test_the_fastest_faithful_one_is_taken(perceptron: ModelProto, speed: float, accuracy: float, taken: Mode) -> None:
    profiler = Clocked(prepare(read_model(perceptron)), speed, accuracy)
    found = fastest_uniform_plan(profiler, TARGET, profiler.plan({}), goal=20.0)  # type: ignore[arg-type]
    assert _modes(found) == {taken}
