"""Regions are joined by codes, and their borders count with them."""

from __future__ import annotations

from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import target_named
from onnxq.search.kernel_times import NodeTime, NodeTimes, Region, find_regions, node_times


def test_a_float_node_parts_two_regions(residual: ModelProto) -> None:
    graph = prepare(read_model(residual))
    names = [node.name for node in graph.nodes]
    demotions = {name: Demotion(Mode.STORAGE, "why") for name in ("sum", "sum_relu")}
    plan = make_plan(graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)
    floats = NodeTimes(dict.fromkeys(names, 2e6), {}, {}, 0.0)
    integers = NodeTimes(dict.fromkeys(names, 1e6), {"x": 5e5, "e": 25e4, "g": 1e6}, {}, 0.0)
    assert find_regions(graph, plan, floats, integers) == (
        Region("stem", 5, Mode.STATIC, 10.0, 5.75),
        Region("last", 1, Mode.STATIC, 2.0, 2.0),
    )


def test_dynamic_nodes_are_regions_of_their_own(perceptron: ModelProto) -> None:
    graph = prepare(read_model(perceptron))
    demotions = {node.name: Demotion(Mode.DYNAMIC, "why") for node in graph.nodes}
    plan = make_plan(graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)
    times = NodeTimes({"first": 1e6, "second": 2e6}, {}, {}, 0.0)
    found = find_regions(graph, plan, times, times)
    assert [(region.first, region.mode) for region in found] == [("second", Mode.DYNAMIC), ("first", Mode.DYNAMIC)]


def test_a_border_that_two_regions_share_is_counted_once(residual: ModelProto) -> None:
    graph = prepare(read_model(residual))
    names = [node.name for node in graph.nodes]
    demotions = {name: Demotion(Mode.STORAGE, "why") for name in ("left", "left_relu", "sum", "sum_relu")}
    plan = make_plan(graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)
    ones = NodeTimes(dict.fromkeys(names, 1e6), {}, {}, 0.0)
    borders = {"b": 4e6, "d": 2e6, "e": 1e6, "g": 8e6}
    found = find_regions(graph, plan, ones, NodeTimes(ones.nodes, borders, {}, 0.0))
    assert {region.first: region.nodes for region in found} == {"stem": 2, "right": 1, "last": 1}
    assert sum(region.milliseconds for region in found) == 4.0 + 15.0


def test_times_of_nodes_stand_in_the_order_of_the_plan() -> None:
    decisions = tuple(Decision(name, "Conv", Mode.STATIC, "why") for name in "cab")
    floats, integers = NodeTimes({"a": 2e6, "c": 4e6}, {}, {}, 0.0), NodeTimes({"a": 1e6}, {}, {}, 0.0)
    found = node_times(Plan(decisions, (), "int8", "onnxruntime-cpu"), floats, integers)
    assert found == (NodeTime("c", 4.0, 0.0), NodeTime("a", 2.0, 1.0))
