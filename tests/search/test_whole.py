"""Where a runtime does not tell of nodes, the fastest of whole models is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, read_model
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.search.frontier import fastest_uniform_plan
from search.timed_models import TARGET


@dataclass
class Clocked:
    """A laboratory in which dynamic plans have a known speed and fidelity."""

    graph: Graph
    speed: float
    fidelity: float

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named("int8"), TARGET, demotions)

    def expresses(self, plan: Plan) -> bool:
        return True

    def sqnr(self, plan: Plan) -> float:
        return self.fidelity

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        return [self.speed if _modes(plan) == {Mode.DYNAMIC} else 1.0 for plan in plans]


def _modes(plan: Plan) -> set[Mode]:
    return {one.mode for one in plan.decisions if one.weights}


@pytest.mark.parametrize(
    ("speed", "fidelity", "taken"),
    [
        (2.0, 30.0, Mode.DYNAMIC),
        (2.0, 10.0, Mode.STATIC),
        (0.5, 30.0, Mode.STATIC),
        (math.nan, 30.0, Mode.STATIC),
    ],
)
def test_the_fastest_faithful_one_is_taken(perceptron: ModelProto, speed: float, fidelity: float, taken: Mode) -> None:
    profiler = Clocked(prepare(read_model(perceptron)), speed, fidelity)
    found = fastest_uniform_plan(profiler, TARGET, profiler.plan({}), goal=20.0)  # type: ignore[arg-type]
    assert _modes(found) == {taken}
