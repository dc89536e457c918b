"""Costs of nodes and borders, and the reasons that rest on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from onnx import ModelProto

from onnxq.graph import read_model
from onnxq.planning.plan import Demotion
from onnxq.planning.planner import make_plan
from onnxq.preparation import prepare
from onnxq.presets import preset_named
from onnxq.scheme import Mode
from onnxq.searching.assignment import Border
from onnxq.searching.costs import Costs, Noise, Prices
from onnxq.searching.kernel_times import NodeTimes
from onnxq.targets import target_named

SILENT = Noise({}, {}, {})
TARGET = target_named("onnxruntime-cpu")


def times(nodes: Mapping[str, float], borders: Mapping[str, float] | None = None) -> NodeTimes:
    return NodeTimes(nodes, borders or {}, dict.fromkeys(nodes, 1_000.0), 0.0)


def priced(model: ModelProto, floats: NodeTimes, static: NodeTimes, dynamic: NodeTimes | None = None) -> Prices:
    graph = prepare(read_model(model))
    scheme = preset_named("int8")
    full = make_plan(graph, scheme, TARGET)
    demoted = {one.node: Demotion(Mode.DYNAMIC, "why") for one in full.decisions if one.mode is Mode.STATIC}
    dynamic_plan = make_plan(graph, scheme, TARGET, demoted) if dynamic is not None else None
    return Prices(graph, full, dynamic_plan, Costs(floats, static, dynamic), TARGET)


@pytest.fixture
def gated(build: Callable[..., ModelProto]) -> ModelProto:
    """Return two convolutions with a node between them that is never an integer kernel."""
    return build(
        "(float[1,8,8,8] x) => (float[1,8,6,6] y) { [a] p = Conv(x, w0) [tanh] q = Tanh(p) [b] y = Conv(q, w1) }",
        w0=(8, 8, 2, 2),
        w1=(8, 8, 2, 2),
    )


def test_what_runs_longer_behind_an_integer_node_counts_against_it(gated: ModelProto) -> None:
    found = priced(gated, times({"a": 9.0, "tanh": 1.0, "b": 9.0}), times({"a": 3.0, "tanh": 5.0, "b": 3.0}))
    assert found.static_nodes == {"a": 7.0, "b": 3.0}


def test_what_runs_shorter_is_no_gain_of_its_neighbour(gated: ModelProto) -> None:
    found = priced(gated, times({"a": 9.0, "tanh": 5.0, "b": 9.0}), times({"a": 3.0, "tanh": 1.0, "b": 3.0}))
    assert found.static_nodes == {"a": 3.0, "b": 3.0}


def test_measured_borders_count_in_their_direction_and_others_by_size(gated: ModelProto) -> None:
    floats = times({"a": 9.0, "tanh": 1.0, "b": 9.0})
    found = priced(gated, floats, times({"a": 3.0, "tanh": 1.0, "b": 3.0}, {"p": 5_000.0, "q": 4_000.0}))
    assert found.borders == (
        Border(None, ("a",), 3_000, 3_000),
        Border("a", ("tanh",), 7_000, 5_000),
        Border(None, ("b",), 4_000, 8_000),
        Border("b", ("",), 7_000, 8_000),
    )


def test_outputs_of_the_graph_and_bodies_read_floats(build: Callable[..., ModelProto]) -> None:
    model = build(
        """(float[1,8,8,8] x, bool c) => (float[1,8,6,6] p, float[1,8,4,4] y) {
            [a] p = Conv(x, w0)
            [b] q = Conv(p, w1)
            [choose] y = If (c) <
                then_branch = yes () => (float[1,8,4,4] u) { [inner] u = Sin(q) },
                else_branch = no () => (float[1,8,4,4] v) { [other] v = Cos(q) }>
        }""",
        w0=(8, 8, 3, 3),
        w1=(8, 8, 3, 3),
    )
    found = priced(model, times({"a": 9e3, "b": 9e3}), times({"a": 1e3, "b": 1e3}, {"p": 4e3, "q": 5e3}))
    assert [border.consumers for border in found.borders] == [("a",), ("b", ""), ("",)]
    integer = found.assignment(frozenset({"a", "b"}), SILENT, 0.0)
    assert integer.nanoseconds == 2e3 + 3_000 + 4e3 + 5e3


def test_a_node_that_the_scheme_wants_dynamic_is_stored_where_that_is_faster(perceptron: ModelProto) -> None:
    graph = prepare(read_model(perceptron))
    plan = make_plan(graph, preset_named("int8-dynamic"), TARGET)
    floats = times({"first": 9.0, "relu": 1.0, "second": 9.0})
    dynamic = times({"first": 2.0, "relu": 1.0, "second": 20.0})
    found = Prices(graph, plan, plan, Costs(floats, dynamic, dynamic), TARGET)
    chosen = found.assignment(frozenset(), SILENT, 0.0)
    assert chosen.dynamic == {"first"}
    assert found.demotions(chosen, SILENT) == {
        "second": Demotion(
            Mode.STORAGE,
            "it is not faster as an integer kernel on this machine",
            "0.000 ms in float, 0.000 ms as integers",
        )
    }


def test_a_clamp_and_its_producer_stay_together_and_followers_need_their_data(residual: ModelProto) -> None:
    names = [one.name for one in prepare(read_model(residual)).nodes]
    found = priced(residual, times(dict.fromkeys(names, 2.0)), times(dict.fromkeys(names, 1.0)))
    assert {("stem_relu", "stem"), ("stem", "stem_relu")} <= set(found.followers)
    assert {("sum", "right"), ("sum", "stem_relu"), ("sum_relu", "sum"), ("sum", "sum_relu")} <= set(found.followers)
    assert ("left", "stem_relu") not in found.followers


def test_the_float_side_takes_what_is_cheapest_for_the_weight_of_noise(perceptron: ModelProto) -> None:
    floats = times({"first": 9.0, "relu": 1.0, "second": 9.0})
    dynamic = times({"first": 2.0, "relu": 1.0, "second": 20.0})
    found = priced(perceptron, floats, floats, dynamic)
    noise = Noise({}, {"first": 0.5}, {})
    assert found.float_side("first", noise, 0.0) == (Mode.DYNAMIC, 2.0)
    assert found.float_side("first", noise, 100.0) == (Mode.STORAGE, 9.0)
    assert found.float_side("second", noise, 0.0) == (Mode.STORAGE, 9.0)
    left = {"second": Demotion(Mode.FLOAT, "why")}
    assert replace(found, left=left).float_side("second", Noise({}, {}, {"second": 9.0}), 1.0) == (Mode.FLOAT, 9.0)


def test_an_assignment_says_time_and_noise(perceptron: ModelProto) -> None:
    floats = times({"first": 9e3, "relu": 1e3, "second": 9e3})
    found = priced(perceptron, floats, times({"first": 3e3, "relu": 1e3, "second": 3e3}))
    noise = Noise({"first": 0.1, "second": 0.2}, {}, {"first": 0.01, "second": 0.02})
    one = found.assignment(frozenset({"first", "relu"}), noise, 0.0)
    assert one.noise == pytest.approx(0.12)
    assert one.nanoseconds == 3e3 + 1e3 + 9e3 + 3_000 + 3_500
    (demotion,) = found.demotions(one, noise).values()
    assert demotion.reason == "the time it gains as an integer kernel is not worth the noise"


def test_corrections_keep_what_was_not_seen(gated: ModelProto) -> None:
    floats = times({"a": 9.0, "tanh": 1.0, "b": 9.0})
    found = priced(gated, floats, times({"a": 3.0, "tanh": 1.0, "b": 3.0}, {"p": 5.0, "q": 4.0}))
    one = found.assignment(frozenset({"a"}), SILENT, 0.0)
    again = found.corrected(one, times({"a": 4.0, "tanh": 2.0, "b": 9.5}, {"p": 6.0}))
    assert again.costs.static.nodes == {"a": 4.0, "tanh": 2.0, "b": 3.0}
    assert again.costs.static.borders == {"p": 6.0, "q": 4.0}
    assert again.static_nodes == {"a": 5.0, "b": 3.0}
