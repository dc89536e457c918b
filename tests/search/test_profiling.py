"""What is profiled before a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import Graph
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.search.cost_model import CostModel, KernelOption
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.profiling import profile_costs
from onnxq.system.resources import silent
from search.timed_models import TARGET, planned


@dataclass
class Recorder:
    """A laboratory that only remembers which plans were profiled."""

    graph: Graph
    scheme: str = "int8"
    can_decode: bool = True
    fits: bool = True
    others: float = 0.0
    profiled: list[Plan | None] = field(default_factory=list)
    measured: int = 0
    is_timed: bool = True

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named(self.scheme), TARGET, demotions)

    def sqnr(self, plan: Plan) -> float:
        return math.inf

    def expresses(self, plan: Plan) -> bool:
        return self.can_decode or not plan.count(Mode.WEIGHT_ONLY)

    def times(self, plan: Plan | None) -> NodeTimes:
        self.profiled.append(plan)
        return NodeTimes({"first": 1.0, "other": self.others} if self.fits else {}, {}, {}, 0.0)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        return [1.0 for _ in plans]


def profiled(profiler: Recorder, latest: float = math.inf) -> CostModel:
    full = profiler.plan({})
    stores = {one.node: Demotion(Mode.STORAGE, "why") for one in full.decisions if one.mode is Mode.STATIC}
    return profile_costs(profiler, profiler.graph, TARGET, stores, latest=latest, progress=silent)


def test_each_alternative_is_profiled_where_all_take_it(perceptron: ModelProto) -> None:
    profiler = Recorder(planned(perceptron)[0])
    costs = profiled(profiler)
    assert [offer.nodes for offer in costs.offers] == [{"first", "second"}] * 3
    assert [None if plan is None else plan.by_node["first"].mode for plan in profiler.profiled] == [
        None,
        Mode.STATIC,
        Mode.DYNAMIC,
        Mode.WEIGHT_ONLY,
        Mode.WEIGHT_ONLY,
    ]


@pytest.mark.parametrize(("scheme", "offers"), [("int8", 0), ("int8-dynamic", 1)])
def test_nodes_that_take_hardly_any_time_are_not_profiled_otherwise(
    perceptron: ModelProto, scheme: str, offers: int
) -> None:
    profiler = Recorder(planned(perceptron)[0], scheme, others=99.0)
    assert len(profiled(profiler).offers) == offers
    assert len(profiler.profiled) == 2


def test_nothing_is_profiled_that_no_node_can_take(residual: ModelProto) -> None:
    profiler = Recorder(planned(residual)[0])
    assert profiled(profiler).offers == ()
    assert len(profiler.profiled) == 2


def test_an_alternative_that_no_model_can_express_is_left_out(perceptron: ModelProto) -> None:
    profiler = Recorder(planned(perceptron)[0], can_decode=False)
    assert [offer.alternative.mode for offer in profiled(profiler).offers] == [Mode.DYNAMIC]


def test_what_makes_too_many_events_for_a_profile_is_no_offer(perceptron: ModelProto) -> None:
    profiler = Recorder(planned(perceptron)[0], fits=False)
    costs = profiled(profiler)
    assert (costs.offers, costs.static_nodes, costs.borders) == ((), {}, ())


@pytest.mark.parametrize(("scheme", "offers"), [("int8", []), ("int8-dynamic", [{"first", "second"}])])
def test_when_it_is_late_only_what_the_scheme_wants_is_offered_and_nothing_more_is_profiled(
    perceptron: ModelProto, scheme: str, offers: list[set[str]]
) -> None:
    profiler = Recorder(planned(perceptron)[0], scheme)
    costs = profiled(profiler, latest=-math.inf)
    assert [offer.nodes for offer in costs.offers] == offers
    assert all(offer.alternative == KernelOption(Mode.DYNAMIC) for offer in costs.offers)
    assert len(profiler.profiled) == 2
