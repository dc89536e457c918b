"""Costs of small models whose times are given."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, all_graphs, read_model
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search.cost_model import CostModel, KernelOption, OfferedOption, takers, wishes
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.profiling import PlanProfiler

TARGET = target_named("onnxruntime-cpu")


def times(nodes: Mapping[str, float], borders: Mapping[str, float] | None = None) -> NodeTimes:
    return NodeTimes(nodes, borders or {}, dict.fromkeys(nodes, 1_000.0), 0.0)


def let_integers_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches find integers ten times as fast as floats, and models with them twice, whatever the machine does."""

    def known(profiler: PlanProfiler, plan: Plan | None) -> NodeTimes:
        static = {one.node for one in plan.decisions if one.mode is Mode.STATIC} if plan is not None else set()
        nodes = [node.name for scope in all_graphs(profiler.evaluator.bench.graph) for node in scope.nodes]
        return times({node: 1e3 if node in static else 1e4 for node in nodes})

    monkeypatch.setattr(PlanProfiler, "times", known)
    monkeypatch.setattr(PlanProfiler, "speeds", lambda profiler, plans: [2.0] * len(plans))


def planned(model: ModelProto, scheme: str = "int8") -> tuple[Graph, Plan]:
    """Return a prepared graph and what a scheme wants of it."""
    graph = prepare(read_model(model))
    return graph, make_plan(graph, preset_named(scheme), TARGET)


def timed(
    model: ModelProto,
    floats: NodeTimes,
    static: NodeTimes,
    offers: Mapping[KernelOption, NodeTimes] | None = None,
    scheme: str = "int8",
) -> CostModel:
    """Return the costs of a model, of which these were measured."""
    graph, full = planned(model, scheme)
    found = []
    for alternative, measured in (offers or {}).items():
        wished = wishes(alternative, full, TARGET)
        plan = make_plan(graph, preset_named(scheme), TARGET, wished)
        found.append(OfferedOption(alternative, plan, takers(alternative, plan, wished.keys()), measured))
    return CostModel(graph, TARGET, full, floats, static, tuple(found))
