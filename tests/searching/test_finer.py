"""Finer codes go to as few weights as will do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from onnx import ModelProto
from timed_models import planned

from onnxq.graph import Graph
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.presets import preset_named
from onnxq.scheme import Mode
from onnxq.searching.finer import FinerWeights
from onnxq.searching.search import FINER, FINEST
from onnxq.targets import target_named


@dataclass
class Weights:
    """A laboratory in which only weights make noise: less where they are finer, none where they are finest."""

    graph: Graph
    noise: Mapping[str, float]
    finer: float = 0.01
    seen: set[object] = field(default_factory=set)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named("int8"), target_named("onnxruntime-cpu"), demotions)

    def sqnr(self, plan: Plan) -> float:
        self.seen.add(plan.effect)
        left = {FINER: self.finer, FINEST: 0.0}
        weighted = [one for one in plan.decisions if one.weights]
        ratio = sum(self.noise.get(one.node, 0.0) * left.get(one.weights[0].spec, 1.0) for one in weighted)
        return -10 * math.log10(ratio + 1e-9)


def finer(
    build: Callable[..., ModelProto], noise: Mapping[str, float], goal: float = 20.0, **known: Any
) -> FinerWeights:
    nodes = " ".join(f"[c{i}] t{i + 1} = MatMul(t{i}, w{i})" for i in range(8))
    made = build(f"(float[4,64] t0) => (float[4,64] t8) {{ {nodes} }}", **{f"w{i}": (64, 64) for i in range(8)})
    graph, full = planned(made)
    stores = {one.node: Demotion(Mode.STORAGE, "why") for one in full.decisions}
    return FinerWeights(Weights(graph, noise, **known), full, stores, goal)


def test_quiet_weights_need_nothing(build: Callable[..., ModelProto]) -> None:
    assert not finer(build, dict.fromkeys(("c0", "c1"), 1e-3)).are_needed


@pytest.mark.parametrize(("share", "spec"), [(0.001, FINER), (0.5, FINEST)], ids=["scales of blocks", "sixteen bits"])
def test_the_noisiest_weights_alone_get_finer_codes(
    build: Callable[..., ModelProto], share: float, spec: object
) -> None:
    noise = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    found = finer(build, noise, finer=share)
    assert found.are_needed
    better = found.found(noise)
    assert {node for node, one in better.items() if one.weight == spec} == {"c3", "c5"}
    assert found.laboratory.sqnr(found.laboratory.plan({**found.stores, **better})) >= 20
    assert len(found.laboratory.seen) <= 8


def test_where_no_codes_are_fine_enough_weights_stay_float(build: Callable[..., ModelProto]) -> None:
    found = finer(build, {"c3": 0.5}, goal=200.0)
    assert {one.mode for one in found.found({"c3": 0.5}).values()} == {Mode.FLOAT}
